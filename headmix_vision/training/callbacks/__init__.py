"""Callbacks of the training command line."""
