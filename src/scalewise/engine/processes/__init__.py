"""Processes of one run and of one machine: how they start, find each other, are watched, and what they leave behind."""
