"""Callbacks of the training command line; each also works in any Trainer."""
