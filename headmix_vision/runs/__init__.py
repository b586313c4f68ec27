"""Finished runs: their directory, checkpoints, networks, pipelines and exports, read without Lightning."""

from headmix_vision.extras import require_extra

require_extra("models", __name__)
