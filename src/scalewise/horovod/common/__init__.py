"""Horovod's shared names where scripts import them from."""
