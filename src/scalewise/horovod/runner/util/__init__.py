"""Helpers of Horovod's launcher that scripts and tests use, too."""
