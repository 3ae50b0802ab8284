"""Which samples a worker gets: streams of indices and random numbers, samples, batches, loader processes."""
