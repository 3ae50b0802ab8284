"""Where the time of a training step goes, measured on the engine itself."""
