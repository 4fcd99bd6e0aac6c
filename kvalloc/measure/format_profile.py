"""Losses of engine formats, in single layers and whole caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.engine_formats import FORMATS, check_holds, formats_of
from kvalloc.engine.contract import MEASURED_WITH, Advance, engine_of
from kvalloc.errors import UnsupportedModelError
from kvalloc.files import provenance
from kvalloc.formats.format_losses import WHOLE, FormatLosses
from kvalloc.measure.checkpoint import kept_work
from kvalloc.measure.curves import check_finite
from kvalloc.measure.engine_formats import gguf_order, round_trip
from kvalloc.measure.job import Measured, Steps, measured_samples
from kvalloc.measure.kl import Predictions
from kvalloc.measure.mini_prefill import LayerInputs, check_seen
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.models.attention import AttentionStates, Compute, intercept_attention
from kvalloc.models.structure import evaluating, input_device
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.shape import ModelShape

SAMPLES, CONTEXT_TOKENS = 3, 600
"""Texts, and tokens of each, by default."""

SINGLE_SHARE, SINGLE_TOKENS = 6, 96
"""Single losses are measured on the first tokens of each text: the text's length over the first
number, and at least the second. On fewer tokens they are noise."""

RANDOM_MIXTURES = 6
"""Number of whole caches with random pairs of formats by layer; half of them leave some layers at
16 bits."""


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
    """Measure a model's losses with K or V in other engines' formats.

    Each text runs in one forward. Other parameters are as for `kvalloc.profile`.

    Parameters
    ----------
    formats : sequence of str
        Engines or formats; see `kvalloc.accounting.engine_formats.formats_of`.
    samples, context : int
        Number of texts, 3 by default, and tokens of each.

    Raises
    ------
    InputError
        If formats are unknown or do not fit the heads, or text or options are invalid.
    UnsupportedModelError
        If attention cannot be seen, or the model stores latents.
    """
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
    n_pieces = len(chosen.samples) * (shape.n_layers + 1)
    work, steps = _Work(shape, chosen, names), Steps(n_pieces, progress)
    decided = {"text_digest": chosen.digest(), "formats": names}
    with kept_work(output, lambda: facts.record() | decided, resume=resume) as kept:
        pieces, failed = measured_samples(
            engine, work, range(n_pieces), kept, steps, sample_steps=1
        )
        if failed:
            raise failed[min(failed)].of_every_sample(shape.model_id)
        result = work.joined([*pieces.values()])
        if kept is not None:
            kept.finish(result)
    return result


def mixtures_of(names: Sequence[str], n_layers: int) -> IntArray:
    """Return the measured whole caches, as in `FormatLosses.choices`, (n_mixtures, n_layers, 2).

    They have one format; keys at the most bits and values at the fewest, and the reverse; or random
    pairs by layer.
    """
    random, count = np.random.default_rng(0), len(names)
    by_bits = sorted(range(count), key=lambda index: FORMATS[names[index]].bits(64))
    ends = by_bits[0], by_bits[-1]
    pairs = [*((index, index) for index in range(count)), ends[::-1], ends]
    even = np.repeat(np.array(pairs)[:, None], n_layers, axis=1)
    shape = (RANDOM_MIXTURES // 2, n_layers, 2)
    drawn = [random.integers(low, count, shape) for low in (0, -1)]
    return np.concatenate([even, *drawn]).astype(np.int64)


class _Work:
    def __init__(self, shape: ModelShape, samples: SampleSet, names: tuple[str, ...]) -> None:
        self.shape, self.samples, self.names = shape, samples, names
        self.mixtures = mixtures_of(names, shape.n_layers)
        self._known: tuple[tuple[int, bool], FormatProbe] | None = None

    def __call__(self, model: Any, place: int, advance: Advance) -> Mapping[str, Any]:
        index, layer = divmod(place, self.shape.n_layers + 1)
        key = index, layer == self.shape.n_layers
        if self._known is None or self._known[0] != key:
            ids = self.samples.samples[index].token_ids
            ids = ids if key[1] else ids[: max(-(-ids.size // SINGLE_SHARE), SINGLE_TOKENS)]
            self._known = key, FormatProbe(model, ids, self.names, self.shape)
        probe = self._known[1]
        arrays = probe.mixed(self.mixtures) if key[1] else probe.single(layer)
        what = f"the losses of {self.shape.model_id} in sample {index}"
        check_finite(what, arrays["kls"])
        advance(1)
        return arrays

    def joined(self, pieces: Sequence[Measured]) -> FormatLosses:
        def joined(places: IntArray, name: str = "kls") -> FloatArray:
            return np.concatenate([pieces[place][name] for place in places], axis=-1)

        *layers, whole = np.arange(len(pieces)).reshape(-1, self.shape.n_layers + 1).T
        kls = np.maximum(joined(whole), 0)  # rounding may take a loss of nothing below 0
        p99, p999 = np.quantile(kls, (0.99, 0.999), axis=-1)
        return FormatLosses(
            shape=self.shape,
            context_tokens=max(one.token_ids.size for one in self.samples.samples),
            formats=self.names,
            n_tokens=kls.shape[-1],
            losses=np.maximum([joined(places).mean(axis=-1) for places in layers], 0),
            choices=self.mixtures,
            mean=kls.mean(axis=-1),
            p99=p99,
            p999=p999,
            top1=joined(whole, "agrees").mean(axis=-1),
            text_digest=self.samples.digest(),
            text_description=self.samples.description,
            **provenance(*MEASURED_WITH),
        )


class FormatProbe:
    """Predictions of the unchanged model on one text, (n_tokens,), and losses of formats.

    Raises
    ------
    UnsupportedModelError
        As `mini_prefill`.
    """

    @torch.no_grad()
    def __init__(
        self, model: Any, token_ids: IntArray, names: Sequence[str], shape: ModelShape
    ) -> None:
        self._model, self._names, self._shape = model, names, shape
        self._ids = torch.from_numpy(token_ids)[None].to(input_device(model))
        self._inputs, self._seen = LayerInputs(model), set[int]()
        with self._inputs.recorded():
            logits = self._logits(None)
        storing = [index for index, one in enumerate(shape.by_layer) if one.kv_heads]
        check_seen(model, storing, self._seen)
        self._full = Predictions(logits)

    @torch.no_grad()
    def single(self, layer: int) -> dict[str, FloatArray]:
        """Return ``kls`` with K or V of one layer in each format.

        They are KL(unchanged || formats), nats, (2, n_formats, n_tokens); 0 without K and V.
        """
        kls = np.zeros((2, len(self._names), self._ids.shape[1]))
        if self._shape.by_layer[layer].kv_heads:
            with self._inputs.begun(layer, 1):
                for part, index in np.ndindex(*kls.shape[:2]):
                    choices = np.full((self._shape.n_layers, 2), WHOLE)
                    choices[layer, part] = index
                    logits = self._logits(choices)
                    kls[part, index] = self._full.divergences(logits).cpu().numpy()
        return {"kls": kls}

    @torch.no_grad()
    def mixed(self, mixtures: IntArray) -> dict[str, FloatArray]:
        """Return ``kls``, nats, and ``agrees``, 1 for the same likeliest token, with each mixture.

        Both are (n_mixtures, n_tokens). Mixtures are indices of formats, (n_mixtures, n_layers, 2),
        -1 for 16 bits.
        """
        rows = []
        for choices in mixtures:
            logits = self._logits(choices)
            rows.append((self._full.divergences(logits), self._full.agrees(logits).double()))
        kls, agrees = (torch.stack(one).cpu().numpy() for one in zip(*rows, strict=True))
        return {"kls": kls, "agrees": agrees}

    def _logits(self, choices: IntArray | None) -> Tensor:
        def handler(states: AttentionStates, compute: Compute) -> tuple[Tensor, Tensor | None]:
            self._seen.add(states.layer)
            key = value = WHOLE
            if choices is not None:
                key, value = choices[self._shape.source(states.layer)].tolist()
            keys, values = states.keys, states.values
            if key != WHOLE:
                order = gguf_order(self._model, states.rotation, int(keys.shape[-1]))
                keys = round_trip(keys, self._names[key], keys=True, order=order)
            if value != WHOLE:
                values = round_trip(values, self._names[value], keys=False)
            return compute(states.mask, keys, values)

        with evaluating(self._model), intercept_attention(self._model, handler):
            logits: Tensor = self._model(input_ids=self._ids, use_cache=False).logits[0]
        return logits
