"""Scores of many sets of pictures by one extractor."""

from weakref import WeakKeyDictionary

from torch import Tensor

from headmix_vision.evaluation.extractors import FeatureExtractor
from headmix_vision.evaluation.frechet import Statistics
from headmix_vision.evaluation.sample_sets import SampleSet
from headmix_vision.evaluation.scores import Scorer


class RememberingScorer(Scorer):
    """Scorer that keeps features, logits and statistics of a set of pictures as long as the set exists."""

    def __init__(self, extractor: FeatureExtractor, batch_size: int = 256) -> None:
        super().__init__(extractor, batch_size)
        self._collected: WeakKeyDictionary[SampleSet, dict[str, Tensor]] = WeakKeyDictionary()
        self._statistics: WeakKeyDictionary[SampleSet, Statistics] = WeakKeyDictionary()

    def collect(self, images: SampleSet, name: str = "features") -> Tensor:
        known = self._collected.setdefault(images, {})
        if name not in known:
            known[name] = super().collect(images, name)
        return known[name]

    def statistics(self, images: SampleSet) -> Statistics:
        if images not in self._statistics:
            self._statistics[images] = super().statistics(images)
        return self._statistics[images]
