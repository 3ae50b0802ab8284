"""Experiments that say how far a model scales."""
