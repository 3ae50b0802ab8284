"""Why did a run lose accuracy? Records in, ranked findings out."""
