"""Optimizer rules on the flat weights, whole or in shards."""
