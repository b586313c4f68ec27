"""Trains the models with Lightning: modules, callbacks, run directory and command line."""
