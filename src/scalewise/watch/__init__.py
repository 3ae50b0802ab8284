"""Watching anyone's own training loop, for `scalewise doctor`: hooks that see, and never change, what happens."""
