"""How many workers? Records in, a plan over workers, time and money out."""
