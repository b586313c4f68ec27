"""Trains classifiers that differ in one thing, each with its own learning rate, and compares them over seeds."""
