"""Scores of generated images: Fréchet distance, KID, inception score, precision and recall.

The command line is `headmix-evaluate`. From Python:

    from headmix_vision.evaluation.extractors import ClassifierExtractor
    from headmix_vision.evaluation.sample_sets import open_images
    from headmix_vision.evaluation.scores import fid
"""

from headmix_vision.extras import require_extra

require_extra("eval", __name__)
