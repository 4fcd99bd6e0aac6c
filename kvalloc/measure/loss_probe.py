"""Predictions with a reduced cache in one layer, for many variants in one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from kvalloc.accounting.costs import counts_of
from kvalloc.errors import InputError
from kvalloc.measure.kl import Predictions
from kvalloc.measure.mini_prefill import LayerInputs, check_seen
from kvalloc.models.attention import (
    AttentionStates,
    ChosenWidths,
    intercept_attention,
    latent_states,
)
from kvalloc.models.names import cache_keyword
from kvalloc.models.structure import end_tokens, evaluating, input_device, text_config
from kvalloc.runtime.key_rounding import round_kept_keys
from kvalloc.runtime.policies.base import Limits
from kvalloc.runtime.quantization import quantised_values
from kvalloc.runtime.second_read import PromptLayer
from kvalloc.runtime.selection import chosen_widths, evictable, gathered, keep_best, put_at
from kvalloc.scorers.repeats import repeat_counts, with_repeats

if TYPE_CHECKING:
    from kvalloc.accounting import IntArray
    from kvalloc.measure.sampling import Sample
    from kvalloc.models.attention import Compute
    from kvalloc.runtime.policies.score import Score
    from kvalloc.shape import LayerShape, ModelShape


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """Entries that variants see in one layer.

    Attributes
    ----------
    keep : Tensor of bool, (n_variants, n_kv_heads, n_tokens)
    keys, values : Tensor, (n_kv_heads, n_variants, n_tokens, head_dim), or None
        Rounded; None if all variants see them unrounded.
    """

    keep: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None


class LossProbe:
    """Full cache of one prompt, and losses from hiding or rounding entries of one layer.

    Predictions inside the question do not count. Without an answer, the model writes one with the
    full cache, greedily, up to its end of turn; `continuation_tokens` limits both. The policy ranks
    entries and may fit kept values; `sinks` have no scores.

    Attributes
    ----------
    prompt_ids : Tensor of int64, (n_tokens,)
    scores : dict of int to Tensor, (n_kv_heads, n_tokens)
        By full-attention layer.
    continuation_ids : Tensor of int64, (n_continuation,)
        Question and answer; ``n_measured`` predictions follow the question's last token or later
        ones.

    Raises
    ------
    InputError
        If the model ends its turn at once.
    UnsupportedModelError
        If layers or their attention cannot be seen.
    """

    def __init__(
        self,
        model: Any,
        sample: Sample,
        policy: Score,
        *,
        sinks: int,
        shape: ModelShape,
        continuation_tokens: int = 24,
    ) -> None:
        device = input_device(model)
        prompt, question, answer = (
            torch.from_numpy(np.empty(0, np.int64) if ids is None else ids).to(device)
            for ids in (sample.token_ids, sample.question_ids, sample.answer_ids)
        )
        self._model, self.prompt_ids = model, prompt
        self._inputs = LayerInputs(model)
        self._policy, self._scorer = policy, policy.scorer
        self._sinks, self._shape = sinks, shape
        self._unmeasured = max(0, question.numel() - 1)
        self.n_tokens = prompt.numel()
        self._cache: Any = DynamicCache(config=text_config(model))
        self._states: dict[int, AttentionStates] = {}
        self._prompts: dict[int, AttentionStates] = {}
        self.scores: dict[int, Tensor] = {}
        with torch.no_grad(), evaluating(model):
            logits = self._prefill()
            if not answer.numel():
                answer = self._written(logits, question, continuation_tokens)
            answer = answer[:continuation_tokens]
            self.continuation_ids = torch.cat([question, answer])
            with self._inputs.recorded():
                logits = self._run(self._first_states, self.continuation_ids[None])
            self._full = Predictions(self._measured(logits[0]))

    @property
    def n_measured(self) -> int:
        """Number of measured predictions."""
        return int(self.continuation_ids.numel()) - self._unmeasured

    def budget(self, tokens: int, context_tokens: int) -> int:
        """Return the budget with the same evictable share as `tokens` in a context."""
        protected = self._sinks + self._scorer.window
        share = (tokens - protected) / (context_tokens - protected)
        evictable = max(0, self.n_tokens - protected)
        return min(self.n_tokens, protected + round(share * evictable))

    @torch.no_grad()
    def kept(self, layer: int, budgets: Sequence[int]) -> list[Tensor]:
        """Return a layer's kept entries at each budget, bool (n_kv_heads, n_tokens)."""
        scores, sinks, window = self.scores[layer], self._sinks, self._scorer.window
        rows = [torch.full((1, scores.shape[0]), one, device="cpu") for one in budgets]
        return [keep_best(scores[None], row, sinks=sinks, window=window)[0] for row in rows]

    @torch.no_grad()
    def losses(self, layer: int, keep: Tensor, *, bits: IntArray | None = None) -> Tensor:
        """Return KL(full cache || reduced cache), nats, float64 (n_variants, n_measured).

        Rounding may take 0 slightly below 0.

        Parameters
        ----------
        keep : Tensor of bool, (n_variants, n_kv_heads, n_tokens)
        bits : ndarray of int64, (n_variants, n_kv_heads), optional
        """
        reduced = {layer: self._reduced(layer, keep, bits)}
        with self._inputs.begun(layer, len(keep)):
            return self._divergences(reduced, len(keep))

    @torch.no_grad()
    def joint_losses(self, keep: Mapping[int, Tensor]) -> Tensor:
        """Return `losses` with several layers reduced."""
        (n_variants,) = {len(variants) for variants in keep.values()}
        reduced = {layer: self._reduced(layer, one, None) for layer, one in keep.items()}
        return self._divergences(reduced, n_variants)

    def _divergences(self, reduced: Mapping[int, Reduced], n_variants: int) -> Tensor:
        def attend(states: AttentionStates) -> Tensor:
            return self._attend(states, reduced.get(self._shape.source(states.layer)))

        logits = self._run(attend, self.continuation_ids.expand(n_variants, -1))
        return self._full.divergences(self._measured(logits))

    def _reduced(self, layer: int, keep: Tensor, bits: IntArray | None) -> Reduced:
        if bits is None or (bool((bits == 16).all()) and not self._policy.combines):
            return Reduced(keep=keep)
        stored, kept_counts = self._entries(layer), keep.sum(dim=-1).cpu()
        keys, values = (one.expand(len(keep), -1, -1, -1) for one in stored)
        counts = counts_of(kept_counts.numpy(), np.broadcast_to(bits, kept_counts.shape))
        limits = Limits(sinks=self._sinks, window=self._scorer.window)
        free, scores = evictable(keep, **limits), self.scores[layer].expand(keep.shape)
        of = chosen_widths(scores, keep, counts, free)
        if (seen := self._prompts.get(layer)) is not None:
            queries = seen.queries.expand(len(keep), -1, -1, -1)
            widths = ChosenWidths(counts=counts, of=of)
            states = replace(seen, queries=queries, keys=keys, values=values, widths=widths)
            made = self._policy.combine(states, keep, kept_counts, **limits)
            keys, values = (keys, values) if made is None else made
        keys, values = (one.clone(memory_format=torch.contiguous_format) for one in (keys, values))
        order = keep.byte().argsort(dim=-1, descending=True, stable=True)
        kept_keys = gathered(keys, order)
        round_kept_keys(kept_keys, counts, of.gather(2, order))
        put_at(keys, order, kept_keys)
        for width in counts:
            its = of == width
            values[its] = quantised_values(values[its][None, None], width)[0, 0]
        shown = self._seen_as(layer, (keys.transpose(0, 1), values.transpose(0, 1)))
        return Reduced(keep=keep, keys=shown[0], values=shown[1])

    @torch.no_grad()
    def outputs(self, layer: int, keep: Tensor | None, bits: IntArray | None = None) -> Tensor:
        """Return a layer's heads' outputs, (n_variants, n_continuation, n_query_heads, head_dim).

        `keep` is bool (n_variants, n_kv_heads, n_tokens), None for one variant with all entries.
        """
        states = self._states[layer]
        if keep is None:
            return self._attend(states, None)
        wide = {
            name: getattr(states, name).expand(keep.shape[0], -1, -1, -1)
            for name in ("queries", "keys", "values")
        }
        return self._attend(replace(states, **wide), self._reduced(layer, keep, bits))

    def sensitivities(self, n_draws: int, *, seed: int = 0) -> dict[int, Tensor]:
        """Return gradients of drawn tokens' log probability by the heads' outputs of each layer.

        They are (n_draws, n_continuation, n_query_heads, head_dim), a backward pass each. Tokens
        are drawn from the full cache's predictions: the mean outer product is the outputs' Fisher
        information.
        """
        offsets: dict[int, Tensor] = {}

        def attend(states: AttentionStates) -> Tensor:
            output = self._attend(states, None)
            if states.layer in self._shape.full_layers:
                offsets[states.layer] = torch.zeros_like(output, requires_grad=True)
                output = output + offsets[states.layer]
            return output

        probabilities = self._full.probabilities.double().cpu()
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(probabilities, n_draws, replacement=True, generator=generator)
        at = drawn.T.to(self.continuation_ids.device)
        with torch.enable_grad():
            logits = self._run(attend, self.continuation_ids[None])
            likely = self._measured(logits)[0].float().log_softmax(dim=-1)
            # One forward serves all draws; each has its own backward pass.
            sums = [likely.gather(-1, tokens[:, None]).sum() for tokens in at]
            inputs = list(offsets.values())
            rows = [torch.autograd.grad(one, inputs, retain_graph=True) for one in sums]
        gradients = [torch.cat(of_layer) for of_layer in zip(*rows, strict=True)]
        return dict(zip(offsets, gradients, strict=True))

    def _prefill(self) -> Tensor:
        seen: set[int] = set()
        counts = repeat_counts(self.prompt_ids.cpu().numpy())

        def handler(states: AttentionStates, compute: Compute) -> tuple[Tensor, Tensor | None]:
            seen.add(states.layer)
            if states.layer in self._shape.full_layers:
                states = with_repeats(states, counts)
                self.scores[states.layer] = self._policy.scores(states, sinks=self._sinks)[0]
                if self._policy.combines:
                    last = self._policy.query_rows(self.n_tokens)
                    queries = states.queries[:, :, -last:].clone()
                    self._prompts[states.layer] = replace(states, queries=queries)
            return compute(states.mask)

        with intercept_attention(self._model, handler):
            logits: Tensor = self._model(
                input_ids=self.prompt_ids[None],
                logits_to_keep=1,
                **cache_keyword(self._model, self._cache),
            ).logits
        check_seen(self._model, self._shape.full_layers, seen)
        return logits

    def _entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's entries, (n_kv_heads, n_tokens, dim); the last ones if it slides."""
        stored = self._cache.layers[self._shape.source(layer)]
        return stored.keys[0], stored.values[0]

    def _seen_as(self, layer: int, entries: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        latent = self._shape.layer_types[layer] == "latent"
        return latent_states(*entries) if latent else entries

    def _measured(self, logits: Tensor) -> Tensor:
        """Drop predictions inside the question."""
        return logits[..., self._unmeasured :, :]

    def _written(self, logits: Tensor, question: Tensor, n_tokens: int) -> Tensor:
        cache, ends = copy.deepcopy(self._cache), end_tokens(self._model)
        keyword = cache_keyword(self._model, cache)
        if question.numel():
            logits = self._model(input_ids=question[None], **keyword).logits
        written = [logits[0, -1].argmax()]
        check_continues(self._model, int(written[0]))
        while len(written) < n_tokens and int(written[-1]) not in ends:
            logits = self._model(input_ids=written[-1].view(1, 1), **keyword).logits
            written.append(logits[0, -1].argmax())
        return torch.stack(written)

    def _first_states(self, states: AttentionStates) -> Tensor:
        self._states[states.layer] = states
        return self._attend(states, None)

    def _run(self, attend: Callable[[AttentionStates], Tensor], ids: Tensor) -> Tensor:
        positions = self.n_tokens + torch.arange(ids.shape[1], device=ids.device)[None]
        with (
            evaluating(self._model),
            intercept_attention(self._model, lambda states, compute: (attend(states), None)),
        ):
            states = self._with_states(len(ids))
            logits: Tensor = self._model(input_ids=ids, position_ids=positions, **states).logits
        return logits

    def _with_states(self, n_variants: int) -> dict[str, Any]:
        """Return a cache of the prompt's states, without entries."""
        if not self._shape.state_bytes:
            return {"use_cache": False}
        rows, layers = torch.zeros(n_variants, dtype=torch.long, device="cpu"), []
        for layer in self._cache.layers:
            entries = None
            if getattr(layer, "keys", None) is not None:
                empty = (one[:, :, :0] for one in (layer.keys, layer.values))
                entries = [one.expand(n_variants, -1, -1, -1) for one in empty]
            prompt_layer = PromptLayer(source=layer, rows=rows, entries=entries)
            layers.append(prompt_layer.layer(None, self.n_tokens))
        return cache_keyword(self._model, Cache(layers=layers))

    def _attend(self, states: AttentionStates, reduced: Reduced | None) -> Tensor:
        """Return attention to all visible tokens, (n_variants, n_new, n_query_heads, head_dim)."""
        variants, _, n_new, head_dim = states.queries.shape
        entries = self._seen_as(states.layer, self._entries(states.layer))
        keys, values = (stored[:, None] for stored in entries)
        if reduced is not None and reduced.keys is not None and reduced.values is not None:
            keys, values = reduced.keys, reduced.values
        n_kv_heads, apart, stored, _ = keys.shape
        layer = self._shape.by_layer[self._shape.source(states.layer)]
        queries = states.queries.reshape(variants, n_kv_heads, -1, n_new, head_dim)
        rows = queries.transpose(0, 1).reshape(n_kv_heads, apart, -1, head_dim)
        before = (rows @ keys.transpose(2, 3)).float() * states.scaling
        before = before.view(n_kv_heads, variants, -1, n_new, stored)
        among = (queries @ states.keys[:, :, None].transpose(-1, -2)).float() * states.scaling
        visible = _visible(n_new, stored, layer, self.n_tokens, before.device)
        if states.softcap is not None:
            before = states.softcap * torch.tanh(before / states.softcap)
            among = states.softcap * torch.tanh(among / states.softcap)
        before.masked_fill_(~visible[:, :stored], float("-inf"))
        among.masked_fill_(~visible[:, stored:], float("-inf"))
        if reduced is not None:
            kept = reduced.keep.transpose(0, 1)[:, :, None, None]
            before.masked_fill_(~kept, float("-inf"))
        logits = [before.transpose(0, 1), among]
        if states.sink_logits is not None:
            extra = states.sink_logits.float().view(1, n_kv_heads, -1, 1, 1)
            logits.append(extra.expand(*among.shape[:-1], 1))
        weights = torch.cat(logits, dim=-1).softmax(dim=-1).to(values.dtype)
        seen = weights[..., :stored].transpose(0, 1).reshape(n_kv_heads, apart, -1, stored) @ values
        output = seen.view(n_kv_heads, variants, -1, n_new, values.shape[-1]).transpose(0, 1)
        output = output + weights[..., stored : stored + n_new] @ states.values[:, :, None]
        return output.flatten(1, 2).transpose(1, 2).contiguous()


def check_continues(model: Any, token: int, *, where: str = "") -> None:
    """Raise `InputError`, beginning with `where`, if the first written token ends the turn."""
    if token in end_tokens(model):
        raise InputError(
            f"{where}the model ends its turn at once after this prompt, so there is no "
            "continuation to measure a loss on; give the prompt an answer, or leave it out"
        )


def _visible(
    n_new: int, stored: int, layer: LayerShape, n_before: int, device: torch.device
) -> Tensor:
    """Return visible tokens of each new token, bool (n_new, stored + n_new)."""
    place = torch.arange(stored + n_new, device=device) + n_before - stored
    new, visible = place[stored:, None], place <= place[stored:, None]
    if layer.window is None:
        return visible
    if layer.kind == "chunked":
        return visible & (place // layer.window == new // layer.window)
    return visible & (new - place < layer.window)
