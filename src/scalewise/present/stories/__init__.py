"""What each kind of run has to say: one file per kind, records in, sections out."""
