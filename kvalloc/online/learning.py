"""A surrogate that is fitted while a model is used, so that later prompts are read once."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedModelError, option
from kvalloc.formats.shipped_profiles import learnt_file
from kvalloc.measure.sampling import Sample, SampleSet
from kvalloc.measure.scorer_fitting import SurrogateFit, sample_sums
from kvalloc.models.attention import rotates_halves
from kvalloc.models.loading import shape_of
from kvalloc.shape import ModelShape

ENOUGH_TOKENS, LEAST_PROMPTS = 8_192, 4
"""Tokens and prompts from which it is fitted: half of what ``kvalloc fit`` takes."""

SHORTEST = 64
"""Tokens of a prompt below which nothing is learnt from it."""


class Learning:
    """Collects what a second read of prompts looks up, and fits the surrogate when it is enough.

    Each prompt is measured as `kvalloc.fit` does with its own, which takes about three times as
    long as to read it; only sums are kept. The file stays for later processes.

    Parameters
    ----------
    shape : ModelShape
        Of the model.

    Attributes
    ----------
    lock : Lock
        Of one thread that reads.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._shape, self.lock = shape, threading.Lock()
        self._samples: list[Sample] = []
        self._sums: list[dict[str, Any]] = []

    def read(self, model: Any, prompt: IntArray) -> None:
        """Learn from a prompt, unless it is too short, or too long to be read twice.

        Parameters
        ----------
        model : transformers.PreTrainedModel
        prompt : ndarray of int64, (n_tokens,)

        Raises
        ------
        KVAllocError
            As `kvalloc.fit`.
        """
        limit = self._shape.max_context_tokens
        if prompt.size < SHORTEST or (limit is not None and 2 * prompt.size > limit):
            return
        sample = Sample(token_ids=prompt, name=f"prompt {len(self._samples)}")
        self._sums.append(sample_sums(model, self._shape, sample, sample.name, _nothing))
        self._samples.append(sample)
        sizes = [one.token_ids.size for one in self._samples]
        if len(sizes) < LEAST_PROMPTS or sum(sizes) < ENOUGH_TOKENS:
            return
        samples = SampleSet(samples=tuple(self._samples), description="prompts as they came")
        fit = SurrogateFit(shape=self._shape, samples=samples, context=max(sizes))
        file = learnt_file(self._shape)
        file.parent.mkdir(parents=True, exist_ok=True)
        fit.fitted(dict(enumerate(self._sums)), {}).save(file)
        self._samples, self._sums = [], []


_LEARNING: weakref.WeakKeyDictionary[Any, Learning] = weakref.WeakKeyDictionary()


def learning_of(model: Any) -> Learning:
    """Return what is learnt of a model, for as long as it lives.

    Raises
    ------
    UnsupportedModelError
        If the model does not rotate halves of its keys.
    """
    if not rotates_halves(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} does not rotate halves of its keys, so no surrogate can be "
            f"fitted to it; leave out {option('fit_as_you_go')}"
        )
    if model not in _LEARNING:
        _LEARNING[model] = Learning(shape_of(model))
    return _LEARNING[model]


def _nothing(layers: int) -> None:
    """Show no progress."""
