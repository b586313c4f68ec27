"""Sweeps: classifiers that differ in one thing, each with its own learning rate, compared over seeds."""
