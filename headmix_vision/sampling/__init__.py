"""Drawing samples from trained generators, from the command line: `sample.py`."""
