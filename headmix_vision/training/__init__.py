"""Trains the models with Lightning: modules, callbacks, run directory and command line."""

from headmix_vision.extras import require_extra

require_extra("train", __name__)
