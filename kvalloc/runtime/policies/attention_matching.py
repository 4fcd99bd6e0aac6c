"""Attention matching: fitted values of kept entries make up for evicted entries.

Reference queries r have attention weights a over all entries of a head, and b over the kept entries
S. The new values V' minimise:

    sum_r |sum_S b_rj v'_j - sum_all a_rj v_j|^2 + lambda |V' - V|^2.

lambda is the ridge times the normal matrix's mean diagonal. At fewer bits, b uses rounded keys, and
values of wider entries make up for the rounding of narrower ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from kvalloc.models.attention import AttentionStates, ChosenWidths
from kvalloc.runtime.key_rounding import round_kept_keys
from kvalloc.runtime.policies.base import SHORT_TOKENS, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.quantization import quantised_values
from kvalloc.runtime.selection import gathered, put_at
from kvalloc.scorers.attention_rows import (
    attention_logits,
    attention_softmax,
    known_rows,
    queries_behind,
    row_divisors,
    want_rows,
)
from kvalloc.scorers.base import Positive

VALUE_RIDGE = 0.01
"""Ridge that keeps fitted values close to the entries' first values."""

_LEAST_RIDGE = 1e-6
"""Below this ridge over the number of entries, normal matrices in float32 are too rough."""

_ALIKE = 1.25
"""Largest ratio between the kept entries of heads that are fitted in one call."""

_UNHARMED_WIDTH = 8
"""From this width on, rounding loses too little to be fitted."""

_NOTHING = 1e-30
"""Smallest lambda."""

_AHEAD_TOKENS = 8
"""Tokens behind the prompt's end to which its last queries are moved."""

_AHEADS = (2, 8, 20, 33, 50, 75, 100, 150, 200, 300)
"""Tokens behind the prompt's end, cycled over the queries, so that rounded keys suit an answer."""


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(Score):
    """The best scores, with values that match attention over all entries.

    The prompt's last queries stand for later ones, moved to the answer's beginning: unmoved, they
    attend to neighbours. Values of each KV head's kept entries are fitted to their output; keys
    change by rounding only. A prompt in chunks is evicted once complete; a turn changes only its
    own values.

    Parameters
    ----------
    rows : int
        Number of the prompt's last queries.
    interval : int
        Step between matched rows.

    References
    ----------
    Attention Matching (Zweiger et al., 2026, arXiv 2602.16284), there with thousands of queries
    from repeating the context or from questions. The ridges, which make few queries enough, are
    ours.
    """

    name = "attention_matching"
    summary = "the best scores, with values that make up for what is evicted"
    reference = "Attention Matching (Zweiger et al., 2026); our queries and ridges"
    rotates = True
    fits_new = True

    rows: Positive = 128
    interval: Positive = 2

    def turn_policy(self, *, rotates: bool) -> Score:
        """Return a policy that fits only a turn's values; `Score` if queries cannot be moved."""
        scorer = self._turn_scorer(rotates=rotates)
        return replace(self, scorer=scorer) if rotates else Score(scorer=scorer)

    @property
    def holds(self) -> bool:
        """True: every chunk would change values that the next one has to match."""
        return True

    def query_rows(self, n_tokens: int) -> int:
        """Return how many last queries the scorer or the fit needs."""
        return max(super().query_rows(n_tokens), min(self.rows, n_tokens))

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> tuple[Tensor, Tensor] | None:
        """Fit values of kept entries; see `EvictionPolicy.combine`.

        A head that keeps all entries, none below 8 bits, stays as it is.

        Raises
        ------
        UnsupportedModelError
            If queries cannot be moved.
        """
        widths, changes = states.widths, budgets < kept.shape[2]
        if widths is not None:
            narrow = [n for width, n in widths.counts.items() if width < _UNHARMED_WIDTH]
            changes |= torch.from_numpy(sum(narrow, np.zeros_like(budgets.numpy())) > 0)
        if not changes.any():
            return None
        queries = self._references(states, (_AHEAD_TOKENS,))
        sizes, group = budgets.to(kept.device), queries.shape[1] // kept.shape[1]
        keys, values = states.keys, states.values.clone(memory_format=torch.contiguous_format)
        moments = None
        if widths is not None and not states.latest:
            keys, moments = keys.clone(memory_format=torch.contiguous_format), self._moments(states)
        largest = budgets.masked_fill(~changes.any(dim=0), 0).amax(dim=0)
        groups = _alike(largest.tolist())
        if kept.shape[2] <= SHORT_TOKENS:
            groups = [(slice(0, len(largest)), int(budgets.max()))]
        changed = changes.to(kept.device)[..., None, None]
        for heads, n_kept in groups:
            of_heads = slice(heads.start * group, heads.stop * group)
            sinks = None if states.sink_logits is None else states.sink_logits[of_heads]
            of_group = queries[:, of_heads]
            reference = replace(states, queries=of_group, mask=None, sink_logits=sinks)
            n_queries = int(queries.shape[2])
            if (known := self._known(states, heads)) is None:
                logits = attention_logits(reference, states.keys[:, heads], 0, n_queries)
                weights = attention_softmax(logits, sinks)
                known = weights, row_divisors(logits, weights)
            weights, divisors = known
            # heads with fewer kept entries are padded with evicted ones
            order = kept[:, heads].byte().argsort(dim=-1, descending=True, stable=True)
            places = order[..., :n_kept]
            as_stored = stored_widths = None
            if widths is not None:
                plain = gathered(states.keys[:, heads], places)
                stored = plain.clone()
                stored_widths = widths.of_places(heads, places)
                seen = None if moments is None else moments[:, heads]
                round_kept_keys(stored, stored_widths.counts, stored_widths.of, seen)
                if moments is not None:
                    put_at(keys[:, heads], places, torch.where(changed[:, heads], stored, plain))
                as_stored = attention_logits(reference, stored, 0, n_queries)
                as_stored = as_stored.sub_(divisors).exp_().flatten(2, 3)
            fixed = None
            if states.latest:
                fixed = places < states.keys.shape[2] - states.latest
            fitted = match_attention(
                weights.flatten(2, 3),
                states.values[:, heads],
                places,
                fixed=fixed,
                sizes=sizes[:, heads],
                changes=changed[:, heads],
                as_stored=as_stored,
                widths=stored_widths,
                has_sinks=sinks is not None,
            )
            put_at(values[:, heads], places, fitted)
        return keys, values

    def _known(self, states: AttentionStates, heads: slice) -> tuple[Tensor, Tensor] | None:
        if (rows := known_rows(states, _AHEAD_TOKENS)) is not None:
            return rows[0][:, heads], rows[1][:, heads]
        voted = [states.kv_head(head) for head in range(heads.start, heads.stop)]
        known = [rows for one in voted if (rows := known_rows(one, _AHEAD_TOKENS)) is not None]
        if len(known) < len(voted):
            return None
        by_kind = zip(*known, strict=True)
        weights, divisors = (
            tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1) for tensors in by_kind
        )
        return weights, divisors

    def scores(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return scores, and store attention of the reference queries."""
        want_rows(states, self.rows, self.interval)
        return super().scores(states, sinks=sinks)

    def _moments(self, states: AttentionStates) -> Tensor:
        queries = self._references(states, _AHEADS).double()
        batch, n_heads, _, head_dim = states.keys.shape
        by_head = queries.reshape(batch, n_heads, -1, head_dim)
        moments: Tensor = by_head.mT @ by_head / by_head.shape[2]
        return moments

    def _references(self, states: AttentionStates, aheads: Sequence[int]) -> Tensor:
        end = int(states.queries.shape[2])
        first = end - min(self.rows, end)
        places = (
            torch.arange(first, end, device="cpu").flip(0)[:: self.interval].flip(0)
        )  # the last among them
        instead = "choose a policy that fits no values"
        user = "the policy attention_matching"
        device = states.keys.device
        ahead = torch.from_numpy(np.resize(aheads, len(places))).to(device)
        return queries_behind(states, places, ahead, user=user, instead=instead)


def _alike(sizes: list[int]) -> list[tuple[slice, int]]:
    """Return slices of heads with similar sizes, and each slice's maximum."""
    groups: list[tuple[slice, int]] = []
    first, low, high = 0, sizes[0], sizes[0]
    for head, size in enumerate([*sizes[1:], 0], start=1):
        smaller, larger = min(low, size), max(high, size)
        if head < len(sizes) and larger <= smaller * _ALIKE:
            low, high = smaller, larger
        else:
            groups += [(slice(first, head), high)] if high else []
            first, low, high = head, size, size
    return groups


def match_attention(
    weights: Tensor,
    values: Tensor,
    kept: Tensor,
    *,
    changes: Tensor,
    sizes: Tensor | None = None,
    as_stored: Tensor | None = None,
    fixed: Tensor | None = None,
    widths: ChosenWidths | None = None,
    has_sinks: bool = False,
) -> Tensor:
    """Fit values of kept entries, (..., n_kept, head_dim), to the attention over all entries.

    Parameters
    ----------
    weights : Tensor of float32, (..., n_queries, n_tokens)
        Attention weights of the reference queries.
    values : Tensor, (..., n_tokens, head_dim)
    kept : Tensor of int64, (..., n_kept)
        No entry twice in a head.
    changes : Tensor of bool, (..., 1, 1)
        Whether a head's values may change.
    sizes : Tensor of int64, (...), optional
        First places of `kept` that count; others stay unchanged.
    as_stored : Tensor of float32, (..., n_queries, n_kept), optional
        Weights with rounded keys, before rows sum to 1; by default from `weights`.
    fixed : Tensor of bool, (..., n_kept), optional
        Entries that stay unchanged.
    has_sinks : bool
        Whether rows sum to less than 1.
    """
    n_kept = int(kept.shape[-1])
    if values.dtype == torch.float64 or _LEAST_RIDGE * n_kept > VALUE_RIDGE:
        weights = weights.double()
    sizes = kept.new_full(kept.shape[:-1], n_kept) if sizes is None else sizes
    counts = torch.arange(n_kept, device=kept.device) < sizes[..., None]
    if as_stored is None:
        index = kept[..., None, :].expand(*weights.shape[:-1], n_kept)
        as_stored = weights.gather(-1, index)
    shares = as_stored.to(weights.dtype) * counts[..., None, :]
    total = shares.sum(dim=-1, keepdim=True)
    if has_sinks:
        total = total + (1 - weights.sum(dim=-1, keepdim=True)).clamp(min=0)  # they stay
    design = shares.div_(total.clamp_(min=torch.finfo(shares.dtype).tiny))
    first = values.gather(-2, kept[..., None].expand(*kept.shape, values.shape[-1]))
    first = first.to(weights.dtype)
    lacking = weights @ values.to(weights.dtype) - design @ first
    free = counts
    if fixed is not None:
        free = counts & ~fixed
        sizes = free.sum(dim=-1).clamp(min=1)
    lacking = lacking * changes
    fitted = first + ridge_step(design * free[..., None, :], lacking, sizes)
    if widths is not None:
        _make_up(fitted, design, widths, free)
    return fitted.to(values.dtype)


def _make_up(fitted: Tensor, design: Tensor, widths: ChosenWidths, free: Tensor) -> None:
    """Let values of wider entries make up for the rounding of narrower ones."""
    if widths.of is None:
        return
    ascending = sorted(widths.counts)
    for place, width in enumerate(ascending[:-1]):
        wider = sum(widths.counts[one] for one in ascending[place + 1 :])
        rows, heads = np.nonzero((widths.counts[width] > 0) & (wider > 0))
        if not len(rows):
            continue
        chosen = torch.from_numpy(rows), torch.from_numpy(heads)
        of, shares = widths.of[chosen], design[chosen]
        segment, place_of = (of == width).nonzero(as_tuple=True)
        exact = fitted[chosen[0][segment], chosen[1][segment], place_of]
        lost = fitted.new_zeros(*of.shape, fitted.shape[-1])
        lost[segment, place_of] = exact - quantised_values(exact[None, None], width)[0, 0]
        adjusted = free[chosen] & (of > width)
        sizes = adjusted.sum(dim=-1).clamp(min=1)
        fitted[chosen] += ridge_step(shares * adjusted[:, None], shares @ lost, sizes)


def ridge_step(design: Tensor, target: Tensor, sizes: Tensor) -> Tensor:
    """Return ``argmin |design x - target|^2 + lambda |x|^2``, (..., n_columns, n_targets).

    lambda is `VALUE_RIDGE` times the mean diagonal of ``design^T design``; ``sizes`` count first
    columns that are not 0. The smaller system is solved in float64; if singular, the result is 0.
    """
    by_rows = design.shape[-2] < design.shape[-1]
    system = (design @ design.mT if by_rows else design.mT @ design).double()
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.sum(dim=-1) / sizes * VALUE_RIDGE
    diagonal += scale.clamp(min=_NOTHING)[..., None]  # nothing is attended: no change
    factor, failed = torch.linalg.cholesky_ex(system)
    aim = target if by_rows else design.mT @ target
    solved = torch.cholesky_solve(aim.double(), factor).to(design.dtype)
    result = design.mT @ solved if by_rows else solved
    return torch.where((failed == 0)[..., None, None], result, 0.0)
