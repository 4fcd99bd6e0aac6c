"""Attention matching: the kept entries take over what the evicted ones gave.

For reference queries r with attention weights a over all entries of a head, and kept entries S:

1. mass: w minimises ``sum_r c_r (sum_S a_rj w_j - sum_all a_rj)^2 + lambda sum_S (w_j - 1)^2``, and
   is cut to between `LEAST_WEIGHT` and `MOST_WEIGHT`; the logit bias of entry j is ``log w_j``;
2. output: V' minimises ``sum_r c_r |sum_S b_rj v'_j - sum_all a_rj v_j|^2 + lambda |V' - V|^2``,
   with b the softmax over S with these biases.

Both are ridge regressions toward what the entries are by themselves, with c_r the weight of a query
and lambda the ridge times the mean of the diagonal of the normal matrix. Where entries are stored
at fewer bits, what the kept ones give is that of their rounded keys: both make up for that, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from kvalloc.errors import InputError
from kvalloc.models.attention import AttentionStates, Observed
from kvalloc.runtime.policies.base import Combined, Limits
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.quantization import round_first_keys
from kvalloc.runtime.selection import gathered, put_at
from kvalloc.scorers import Scorer
from kvalloc.scorers.attention_rows import (
    attention_logits,
    attention_softmax,
    known_rows,
    queries_behind,
    row_divisors,
    want_rows,
)
from kvalloc.scorers.later_pass import Later, LaterStep
from kvalloc.scorers.parameters import Count, Positive

LEAST_WEIGHT, MOST_WEIGHT = 0.05, 50.0
"""How many entries one may count for."""

VALUE_RIDGE, BIAS_RIDGE = 0.01, 0.3
"""How close values and biases stay to what the entries have by themselves."""

FOLLOWING_WEIGHT = 10.0
"""How much a query of the tokens that follow counts beside one of the prompt."""

_LEAST_RIDGE = 1e-6
"""Of a ridge over the number of entries: below it normal matrices in float32 are too rough."""

_ALIKE = 1.25
"""Heads are fitted at once where none keeps more than so many times the entries of another."""

_NOTHING = 1e-30
"""Least lambda."""

_AHEAD_TOKENS = 8
"""How far behind the prompt's end its last queries are put."""


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(Score):
    """The best scores stay, with values and logit biases that match attention over all entries.

    What later queries get from the whole prompt is known for two kinds of them: those of the tokens
    that follow it first, and the prompt's last ones, put where the answer begins (queries in their
    own places look at their neighbours, which later ones do not have). Each KV head's kept entries
    get the logit biases and values that reproduce it best, close to what they were: see
    `match_attention`. Keys and the number of entries stay; a bias takes 4 bytes an entry. The cache
    holds the prompt until it is complete and those tokens have followed.

    Parameters
    ----------
    scorer : Scorer
        Picks the entries that stay.
    rows : int
        Last queries of the prompt, tokens; 0 for none.
    every : int
        Only each N-th of these rows is matched, and counts for N. On SmolLM2-135M every second of
        64 loses what all of them do, in half the time.
    following : int
        Tokens that are waited for, as the scorer ``lookahead`` does; 0 for none.
    biases : bool
        Whether there are logit biases.

    Raises
    ------
    InputError
        If a parameter is out of range, or there are neither rows nor following tokens.

    References
    ----------
    Fast KV Compaction via Attention Matching (Zweiger et al., 2026, arXiv 2602.16284). There the
    queries come from repeating the context or from questions about it; the ridges, and queries of
    the tokens that follow and of the prompt's end, are ours.
    """

    name = "attention_matching"
    summary = "the best scores, with values that make up for what is evicted"
    reference = "Attention Matching (Zweiger et al., 2026); our queries and ridges"

    rows: Count = 128
    every: Positive = 2
    following: Count = 16
    biases: bool = True

    def __post_init__(self) -> None:
        """Check; see `Parameterized`."""
        super().__post_init__()
        if not self.rows and not self.following:
            raise InputError(
                f"policy {self.name}: rows and following are both 0, so there is nothing to match"
            )

    @property
    def _waits(self) -> tuple[FollowingQueries, ...]:
        return (FollowingQueries(tokens=self.following),) if self.following else ()

    def again(self, *, rotates: bool) -> Score:
        """Return the best scores: fitted to other queries, values that were fitted lose."""
        return Score(scorer=self._scorer_again(rotates=rotates))

    @property
    def holds(self) -> bool:
        """Return True: every chunk would change values that the next one has to match."""
        return True

    def later_scorers(self, layer: int) -> tuple[Scorer, ...]:
        """Return the scorer's own, and what notes the queries that are matched."""
        return (*super().later_scorers(layer), *self._waits)

    def query_rows(self, n_tokens: int) -> int:
        """Return the larger of the scorer's number and of the rows that are matched."""
        return max(super().query_rows(n_tokens), min(self.rows, n_tokens))

    def combine(
        self, states: AttentionStates, kept: Tensor, budgets: Tensor, **limits: Unpack[Limits]
    ) -> Combined:
        """Give what stays its new values and biases; see `EvictionPolicy.combine`.

        Raises
        ------
        UnsupportedModelError
            If the prompt's queries cannot be put elsewhere.
        """
        queries, counts = self._references(states)
        sizes, group = budgets.to(kept.device), queries.shape[1] // kept.shape[1]
        # what counts for nothing changes nothing: a head that keeps everything stays as it is
        counts = counts.reshape(*sizes.shape, -1) * ~kept.all(dim=-1, keepdim=True)
        values = states.values.clone(memory_format=torch.contiguous_format)
        bias = torch.zeros(kept.shape, device=kept.device)
        bias += 0.0 if states.bias is None else states.bias
        most_of = budgets.masked_fill((budgets == kept.shape[2]).all(dim=0), 0).amax(dim=0)
        for heads, most in _alike(most_of.tolist()):
            of_heads = slice(heads.start * group, heads.stop * group)
            sinks = None if states.sink_logits is None else states.sink_logits[of_heads]
            mine = queries[:, of_heads]
            own = replace(states, queries=mine, mask=None, sink_logits=sinks)
            n_queries = int(queries.shape[2])
            if (known := self._known(states, heads)) is None:
                logits = attention_logits(own, states.keys[:, heads], 0, n_queries)
                if states.bias is not None:
                    logits += bias[:, heads, None, None]
                weights = attention_softmax(logits, sinks)
                known = weights, row_divisors(logits, weights)
            weights, divisors = known
            # evicted entries come behind the kept ones, where a head keeps fewer than another
            order = kept[:, heads].byte().argsort(dim=-1, descending=True, stable=True)
            places = order[..., :most]
            added = bias[:, heads].gather(2, places)
            as_stored = None
            if states.key_bits is not None:
                stored = gathered(states.keys[:, heads], places)
                round_first_keys(stored, budgets[:, heads], states.key_bits[heads])
                as_stored = attention_logits(own, stored, 0, n_queries)
                if states.bias is not None:
                    as_stored += added[:, :, None, None]
                as_stored = as_stored.sub_(divisors).exp_().flatten(2, 3)
            found = match_attention(
                weights.flatten(2, 3),
                states.values[:, heads],
                places,
                sizes=sizes[:, heads],
                query_weights=counts[:, heads],
                biases=self.biases,
                bias=added,
                as_stored=as_stored,
                others=sinks is not None,
            )
            put_at(values[:, heads], places, found.values)
            if found.logit_bias is not None:
                put_at(bias[:, heads, :, None], places, found.logit_bias[..., None])
        return Combined(keys=states.keys, values=values, logit_bias=bias if self.biases else None)

    def _known(self, states: AttentionStates, heads: slice) -> tuple[Tensor, Tensor] | None:
        """Return `known_rows` of the references, where the same queries have just voted."""
        if self.following:
            return None
        voted = [states.kv_head(head) for head in range(heads.start, heads.stop)]
        known = [found for one in voted if (found := known_rows(one, _AHEAD_TOKENS)) is not None]
        if len(known) < len(voted):
            return None
        every = zip(*known, strict=True)
        weights, divisors = (own[0] if len(own) == 1 else torch.cat(own, dim=1) for own in every)
        return weights, divisors

    def scores(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return the scorer's; what it computes of the queries that are matched is kept."""
        if self.rows and not self.following:
            want_rows(states, self.rows, self.every)
        return super().scores(states, sinks=sinks)

    def _references(self, states: AttentionStates) -> tuple[Tensor, Tensor]:
        """Return queries behind the prompt, and their weights: (batch, n_query_heads, n, ...)."""
        queries, counts = [], []
        if self.rows:
            end = int(states.queries.shape[2])
            first = end - min(self.rows, end)
            places = (
                torch.arange(first, end, device="cpu").flip(0)[:: self.every].flip(0)
            )  # the last among them
            instead = "match the queries of what follows alone (rows=0)"
            who = "the policy attention_matching"
            queries.append(queries_behind(states, places, _AHEAD_TOKENS, who=who, instead=instead))
            counts.append(float(self.every))
        for waits in self._waits:
            noted = waits.later_notes(states).totals["queries"].to(states.keys.device)
            queries.append(noted.float())
            counts.append(FOLLOWING_WEIGHT)
        weights = [
            torch.full(own.shape[:3], count, device=own.device)
            for own, count in zip(queries, counts, strict=True)
        ]
        return torch.cat(queries, dim=2), torch.cat(weights, dim=2)


@dataclass(frozen=True, kw_only=True)
class FollowingQueries(Scorer):
    """Notes the queries of the tokens that follow, and scores nothing: a policy's part of waiting.

    Parameters
    ----------
    tokens : int
        How many have to follow.
    """

    name = "following_queries"
    summary = "the queries of the tokens that follow"
    reference = "ours"

    tokens: Count
    window: Count = 0

    @property
    def later(self) -> Later:
        """Return these tokens."""
        return Later(kind="following", tokens=self.tokens)

    @property
    def later_key(self) -> Hashable:
        """Return what tells its notes from those of other scorers."""
        return (self.name, self.tokens)

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """Note the last queries, (batch, n_query_heads, n, head_dim)."""
        queries = states.queries[:, :, -self.tokens :]
        return Observed(n_tokens=int(queries.shape[2]), totals={"queries": queries})

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return zeros: it scores nothing."""
        return states.keys.new_zeros(states.keys.shape[:3], dtype=torch.float32)


def _alike(sizes: list[int]) -> list[tuple[slice, int]]:
    """Return heads that keep about as many entries, to be fitted at once, and their maximum.

    They are neighbours, so that nothing of theirs is copied. Heads of size 0 are left out.
    """
    found: list[tuple[slice, int]] = []
    first, least, most = 0, sizes[0], sizes[0]
    for head, size in enumerate([*sizes[1:], 0], start=1):
        smaller, larger = min(least, size), max(most, size)
        if head < len(sizes) and larger <= smaller * _ALIKE:
            least, most = smaller, larger
        else:
            found += [(slice(first, head), most)] if most else []
            first, least, most = head, size, size
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """What the kept entries of a head become.

    Attributes
    ----------
    values : Tensor, (..., n_kept, head_dim)
    logit_bias : Tensor of float32, (..., n_kept), or None
        None where none was asked for.
    """

    values: Tensor
    logit_bias: Tensor | None


def match_attention(
    weights: Tensor,
    values: Tensor,
    kept: Tensor,
    *,
    query_weights: Tensor,
    biases: bool = True,
    sizes: Tensor | None = None,
    bias: Tensor | None = None,
    as_stored: Tensor | None = None,
    others: bool = False,
) -> Matched:
    """Fit values and logit biases of kept entries to the attention over all entries.

    Parameters
    ----------
    weights : Tensor of float32, (..., n_queries, n_tokens)
        Attention weights of the reference queries, for any number of heads at once.
    values : Tensor, (..., n_tokens, head_dim)
    kept : Tensor of int64, (..., n_kept)
        No entry twice in a head.
    query_weights : Tensor of float32, (..., n_queries)
        How much each query counts, at least 0.
    biases : bool
        Whether there are to be logit biases.
    sizes : Tensor of int64, (...), optional
        Where heads keep different numbers: how many of the first places of `kept` count. The
        entries at the others are not kept, and come back as they were.
    bias : Tensor of float32, (..., n_kept), optional
        What the logits of the kept entries have added already, as `weights` knows.
    as_stored : Tensor of float32, (..., n_queries, n_kept), optional
        What the kept entries get of `weights` once their keys are rounded, before rows sum to 1;
        their part of `weights` by default.
    others : bool
        Whether something without an entry takes part in the softmax, so that a row sums to less
        than 1.

    Returns
    -------
    Matched

    References
    ----------
    Fast KV Compaction via Attention Matching (Zweiger et al., 2026, arXiv 2602.16284): biases by
    non-negative least squares, then values by least squares. There without a ridge, on thousands
    of queries; here toward the entries' own values, so that a few queries are enough, and the
    mass in closed form, cut to its bounds.
    """
    n_kept = int(kept.shape[-1])
    if _LEAST_RIDGE * n_kept > VALUE_RIDGE:
        weights = weights.double()
    sizes = kept.new_full(kept.shape[:-1], n_kept) if sizes is None else sizes
    there = torch.arange(n_kept, device=kept.device) < sizes[..., None]
    if as_stored is None:
        index = kept[..., None, :].expand(*weights.shape[:-1], n_kept)
        as_stored = weights.gather(-1, index)
    own = as_stored.to(weights.dtype) * there[..., None, :]
    roots = query_weights.to(weights.dtype).sqrt()[..., None]
    counts = None
    if biases:
        lacking = weights.sum(dim=-1, keepdim=True) - own.sum(dim=-1, keepdim=True)
        more = ridge_step(roots * own, roots * lacking, BIAS_RIDGE, sizes)[..., 0]
        before = torch.ones_like(more) if bias is None else bias.to(more.dtype).exp()
        counts = (before * (1 + more)).clamp(LEAST_WEIGHT, MOST_WEIGHT)
        own *= (counts / before)[..., None, :]
    total = own.sum(dim=-1, keepdim=True)
    if others:
        total = total + (1 - weights.sum(dim=-1, keepdim=True)).clamp(min=0)  # they stay
    design = own.mul_(roots / total.clamp_(min=torch.finfo(own.dtype).tiny))
    first = values.gather(-2, kept[..., None].expand(*kept.shape, values.shape[-1]))
    first = first.to(weights.dtype)
    lacking = roots * (weights @ values.to(weights.dtype)) - design @ first
    added = ridge_step(design, lacking, VALUE_RIDGE, sizes)
    return Matched(
        values=(first + added).to(values.dtype),
        logit_bias=None if counts is None else counts.log().float(),
    )


def ridge_step(design: Tensor, target: Tensor, ridge: float, sizes: Tensor) -> Tensor:
    """Return ``argmin |design x - target|^2 + lambda |x|^2``, lambda relative to the design.

    Parameters
    ----------
    design : Tensor, (..., n_rows, n_columns)
        Its type is that of all but the small system, which is solved in float64.
    target : Tensor, (..., n_rows, n_targets)
    ridge : float
        lambda over the mean of the diagonal of ``design^T design``.
    sizes : Tensor of int64, (...)
        Columns of each design, from the first; all others are 0.

    Returns
    -------
    Tensor of the design's type, (..., n_columns, n_targets)
        In the form of rows or of columns, whichever system is smaller. 0 where the ridge is too
        small to make the system regular.
    """
    by_rows = design.shape[-2] < design.shape[-1]
    system = (design @ design.mT if by_rows else design.mT @ design).double()
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    scale = diagonal.sum(dim=-1) / sizes * ridge
    diagonal += scale.clamp(min=_NOTHING)[..., None]  # nothing is attended: no change
    factor, failed = torch.linalg.cholesky_ex(system)
    aim = target if by_rows else design.mT @ target
    solved = torch.cholesky_solve(aim.double(), factor).to(design.dtype)
    found = design.mT @ solved if by_rows else solved
    return torch.where((failed == 0)[..., None, None], found, 0.0)
