"""Losses of engine formats: of K or V of single layers, and of whole caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.accounting.engine_formats import FORMATS, check_holds, formats_of
from kvalloc.engine.contract import MEASURED_WITH, Advance, ModelFacts, engine_of
from kvalloc.errors import UnsupportedModelError
from kvalloc.files import provenance
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.measure.checkpoint import kept_work
from kvalloc.measure.curves import check_finite
from kvalloc.measure.job import Measured, Steps, measured_samples
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.models.loading import require_run_packages
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    pass

SAMPLES, CONTEXT_TOKENS = 3, 600
"""Texts, and tokens of each, by default."""

SINGLE_SHARE = 5
"""Single losses are measured on one part in so many of each text, its first tokens."""

RANDOM_MIXTURES = 6
"""Whole caches with a random pair of formats in each layer; in half of them some stay at 16
bits."""


def profile_formats(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    formats: Sequence[str],
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model_id: str | None = None,
    samples: int | None = None,
    context: int = CONTEXT_TOKENS,
    seed: int = 0,
) -> FormatLosses:
    """Measure what a model loses if K or V are stored in the formats of other engines.

    Each text is read at once. The unchanged model reads it once; a layer's K or V in one format
    need one forward from that layer on.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
        A causal language model, the same afterwards.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    texts : iterable of str, Document or Prompt
        As for `kvalloc.profile`.
    formats : sequence of str
        Engines or formats; see `kvalloc.accounting.engine_formats.formats_of`.
    output : str or Path, optional
        The file to write, atomically. Finished layers are kept in ``OUTPUT.partial`` until then.
    resume : bool
        Go on with what an earlier, killed call left there.
    progress : callable, optional
        Called with (layers done, layers in all).
    model_id : str, optional
        Instead of what the model's config says.
    samples : int, optional
        Texts to measure; 3 by default.
    context : int
        Tokens of each.
    seed : int
        Of the choice of samples.

    Returns
    -------
    FormatLosses

    Raises
    ------
    InputError
        If an engine or format is not known, a format cannot hold the model's heads, or text or
        options cannot be used.
    UnsupportedModelError
        If the model's attention cannot be seen, or it stores latents.
    """
    require_run_packages()
    names, engine = formats_of(formats), engine_of(model)
    facts = engine.facts(model_id)
    shape = facts.shape
    check_holds(names, shape)
    if "latent" in shape.layer_types:
        raise UnsupportedModelError(
            f"{shape.model_id} stores latents instead of K and V, which no engine format is for; "
            "measure it without formats"
        )
    chosen = choose_samples(
        texts,
        tokenizer,
        context_tokens=context,
        least_tokens=2 * SINGLE_SHARE,
        samples=samples or SAMPLES,
        seed=seed,
    )
    mixtures = mixtures_of(names, shape.n_layers)
    with kept_work(output, partial(_record, facts, chosen, names), resume=resume) as kept:
        n_pieces = len(chosen.samples) * (shape.n_layers + 1)
        work = _Work(shape=shape, samples=chosen, names=names, mixtures=mixtures)
        steps = Steps(n_pieces, progress)
        pieces, failed = measured_samples(
            engine, work, range(n_pieces), kept, steps, sample_steps=1
        )
        if failed:
            raise failed[min(failed)].of_every_sample(shape.model_id)
        result = _assemble(pieces, work, context)
        if kept is not None:
            result.save(kept.output)
            kept.finish()
    return result


def mixtures_of(names: Sequence[str], n_layers: int) -> IntArray:
    """Return the whole caches that are measured, as `FormatLosses.choices` has them.

    Each format everywhere; keys in the format of most bits with values in that of fewest, and the
    other way round; and random pairs by layer.

    Parameters
    ----------
    names : sequence of str
        Formats.
    n_layers : int

    Returns
    -------
    ndarray of int64, (n_mixtures, n_layers, 2)
    """
    random, count = np.random.default_rng(0), len(names)
    by_bits = sorted(range(count), key=lambda index: FORMATS[names[index]].bits(64))
    ends = by_bits[0], by_bits[-1]
    pairs = [*((index, index) for index in range(count)), ends[::-1], ends]
    even = np.repeat(np.array(pairs)[:, None], n_layers, axis=1)
    shape = (RANDOM_MIXTURES // 2, n_layers, 2)
    drawn = [random.integers(low, count, shape) for low in (0, -1)]
    return np.concatenate([even, *drawn]).astype(np.int64)


def _record(facts: ModelFacts, samples: SampleSet, names: Sequence[str]) -> dict[str, Any]:
    """Return everything that decides the numbers, for the manifest of a checkpoint."""
    return {**facts.record(), "text_digest": samples.digest(), "formats": names}


class _Work:
    """Measures a piece: single losses of one layer on one text, or all mixtures on it.

    A worker keeps what the unchanged model makes of a text for the pieces that follow.
    """

    def __init__(
        self,
        *,
        shape: ModelShape,
        samples: SampleSet,
        names: tuple[str, ...],
        mixtures: IntArray,
    ) -> None:
        self.shape, self.samples, self.names, self.mixtures = shape, samples, names, mixtures
        self._probe: tuple[tuple[int, bool], Any] | None = None

    def __call__(self, model: Any, place: int, advance: Advance) -> Mapping[str, Any]:
        """Return the arrays of a piece."""
        index, layer = divmod(place, self.shape.n_layers + 1)
        whole = layer == self.shape.n_layers
        if self._probe is None or self._probe[0] != (index, whole):
            from kvalloc.measure.format_probe import FormatProbe  # loads torch

            ids = self.samples.samples[index].token_ids
            ids = ids if whole else ids[: -(-ids.size // SINGLE_SHARE)]
            self._probe = (index, whole), FormatProbe(model, ids, self.names, self.shape)
        probe = self._probe[1]
        arrays: Measured = probe.mixed(self.mixtures) if whole else probe.single(layer)
        what = f"the losses of {self.shape.model_id} in sample {index}"
        for array in arrays.values():
            check_finite(what, array)
        advance(1)
        return arrays


def _assemble(pieces: Mapping[int, Measured], work: _Work, context: int) -> FormatLosses:
    """Return the losses of all pieces, as means over the tokens of all texts."""
    shape, samples = work.shape, work.samples
    by_text = np.array_split(list(pieces.values()), len(samples.samples))
    *layers, _ = zip(*by_text, strict=True)
    singles = [np.concatenate([one["kls"] for one in texts], axis=-1) for texts in layers]
    kls, agree = (
        np.concatenate([pieces_of_text[-1][name] for pieces_of_text in by_text], axis=-1)
        for name in ("kls", "agrees")
    )
    p99, p999 = np.quantile(kls, (0.99, 0.999), axis=-1)
    return FormatLosses(
        shape=shape,
        context_tokens=max(one.token_ids.size for one in samples.samples),
        formats=work.names,
        n_tokens=kls.shape[-1],
        losses=np.maximum(np.stack(singles).mean(axis=-1), 0),
        choices=work.mixtures,
        mean=kls.mean(axis=-1),
        p99=p99,
        p999=p999,
        top1=agree.mean(axis=-1),
        text_digest=samples.digest(),
        text_description=samples.description,
        **provenance(*MEASURED_WITH),
    )
