"""Finished runs: their directory, checkpoints, networks, pipelines and exports, read without Lightning."""

from headmix_vision.errors import require_extra

require_extra("models", __name__)
