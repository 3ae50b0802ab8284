"""Experiments on a task and a recipe that use the engine: how far can this model scale?"""
