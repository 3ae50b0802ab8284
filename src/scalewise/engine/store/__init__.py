"""What is stored: the run folder, checkpoints, shards, the lock."""
