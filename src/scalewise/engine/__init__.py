"""The engine: weights = f(task, recipe), on any number of processes."""
