"""Finished runs: their directory, checkpoints, networks, pipelines and exports, read without Lightning."""
