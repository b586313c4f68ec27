"""Speed and memory of ops, layers, models and training. Each script runs from the root: `python -m benchmarks.NAME`."""
