"""Experiments that use the engine: how far can this model scale?"""
