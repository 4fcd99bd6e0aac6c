"""Surrogate (KVzap), the scorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.errors import InputError, UnsupportedRequestError, option
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.formats.shipped_profiles import load_surrogate
from kvalloc.models.attention import AttentionStates
from kvalloc.models.rope import Rotation, known_rotation, rotate
from kvalloc.scorers.base import Above0, Count, Positive, Scorer
from kvalloc.scorers.lookahead import LATEST_VOTES, TURN_VOTES, with_votes
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_NORM = 1e-6
_BLOCK_TOKENS = 2048
_LOG_RANGE = (-40.0, 40.0)
"""Range of the prediction; its exponential is a float32."""

LATER_WEIGHT = 30.0
"""Weight of the latest queries' attention when kept and new entries are ranked together. Without
it, a third more is lost (SmolLM2-135M, 20%)."""


@dataclass(frozen=True, kw_only=True)
class Surrogate(Scorer):
    """Exponential of a linear map of key and value, by layer and KV head.

    The maps are fitted once for a model, to the log of ``reconstruction``. The prediction depends
    only on entry and position: chunks make no difference, decoded tokens have one too. Scores are
    divided by the root of `repeats`, since later tokens need one of them.

    Parameters
    ----------
    file : str
        File of ``kvalloc fit`` for this model, or the name of a shipped one.
    window : int
    votes : int
        Last queries, as in `Lookahead`. The score is the prediction, or `votes_weight` times their
        largest attention if larger. By default 128 if they helped in the fit, else 0.
    votes_weight : float
        Above 0; by default as fitted, or 30.

    Raises
    ------
    InputError
        If no file is named.
    ProfileFileError
        If the file is missing, or holds no trustworthy surrogate.

    References
    ----------
    KVzap (NVIDIA, 2026, arXiv 2601.07891), with a linear map of the hidden state. Here key and
    value, linear in it, exist as long as the entry.
    """

    name = "surrogate"
    summary = "a second read's attention, predicted from key and value (KVzap)"
    reference = "KVzap (NVIDIA, 2026), on keys and values; ours"
    holds_queries = False
    rotates = True
    by_head = True
    across_layers = True
    reads_repeats = True

    file: str = ""
    window: Positive = 8
    votes: Count = None  # type: ignore[assignment]  # as the fit has chosen
    votes_weight: Above0 = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Take queries and their weight from the file by default, and check."""
        if not self.file:
            raise InputError(
                "scorer surrogate: file is '', expected what 'kvalloc fit' wrote for this model"
            )
        votes: int | None = self.votes
        if votes is None:
            object.__setattr__(self, "votes", LATEST_VOTES if self.fitted.votes_weight else 0)
        weight: float | None = self.votes_weight
        if weight is None:
            weight = self.fitted.votes_weight or LATER_WEIGHT
            object.__setattr__(self, "votes_weight", weight)
        super().__post_init__()

    @cached_property
    def fitted(self) -> FittedSurrogate:
        """The file's surrogate."""
        return load_surrogate(self.file)

    def check_model(self, shape: ModelShape, *, allow_other_model: bool = False) -> None:
        """Refuse a model that the file was not fitted to."""
        self.fitted.shape.require_same_model(
            shape,
            allow_other_model=allow_other_model,
            file=f"surrogate {self.file}",
            made_by=self.fitted.MADE_BY,
        )

    @property
    def for_turns(self) -> Surrogate:
        """The scorer with attention of the latest queries."""
        return replace(self, votes=TURN_VOTES, votes_weight=LATER_WEIGHT)

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """See `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            As `entry_features`.
        UnsupportedRequestError
            If the layer was not fitted.
        """
        import torch

        keys, places = states.keys, states.positions
        if places is None:
            places = torch.arange(keys.shape[2], device=keys.device)
        scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        for begin in range(sinks, keys.shape[2], _BLOCK_TOKENS):
            block = slice(begin, begin + _BLOCK_TOKENS)
            block_states = replace(
                states,
                keys=keys[:, :, block],
                values=states.values[:, :, block],
                positions=places[..., block],
            )
            features = _features(block_states)  # joined, they take twice the time
            sizes = [int(feature.shape[-1]) for feature in features]
            *weights, constant = torch.split(self._weights(states, sum(sizes)), [*sizes, 1], dim=-1)
            scores[..., block] = constant + sum(
                (feature @ weight[..., None])[..., 0]
                for feature, weight in zip(features, weights, strict=True)
            )
        scores = self.without_protected(scores.clamp_(*_LOG_RANGE).exp_(), states, sinks=sinks)
        if self.votes:
            scores = with_votes(
                scores,
                states,
                votes=self.votes,
                weight=self.votes_weight,
                window=self.window,
                sinks=sinks,
            )
        if states.repeats is not None:
            scores = scores / states.repeats.sqrt()
        return scores

    def query_rows(self, n_tokens: int) -> int:
        """Return the number of queries that count."""
        return self.votes

    def _weights(self, states: AttentionStates, n_features: int) -> Tensor:
        """Return the heads' weights, float32, (n_kv_heads, n_features + 1)."""
        import torch

        fitted, shown = self.fitted.shape.full_layers, states.layers or (states.layer,)
        n_kv_heads, first = int(states.keys.shape[1]) // len(shown), states.first_head
        by_layer = []
        for layer in shown:
            weights = self.fitted.weights[fitted.index(layer)] if layer in fitted else None
            mine = None if weights is None else weights[first : first + n_kv_heads]
            if mine is None or mine.shape != (n_kv_heads, n_features + 1):
                raise UnsupportedRequestError(
                    f"the surrogate {self.file} was not fitted to layer {layer} of this model "
                    "as it is; make one for it with 'kvalloc fit'"
                )
            by_layer.append(mine)
        joined = np.concatenate(by_layer).astype(np.float32)
        return torch.from_numpy(joined).to(states.keys.device)


def entry_features(states: AttentionStates) -> Tensor:
    """Return features of entries, float32, (batch, n_kv_heads, n_tokens, n_features).

    The key at position 0, the value, lengths of the key's rotated pairs, logs of both norms.

    Raises
    ------
    UnsupportedModelError
        If the keys' rotation is unknown.
    """
    import torch

    return torch.cat(_features(states), dim=-1)


def _features(states: AttentionStates) -> list[Tensor]:
    import torch

    rotation = surrogate_rotation(states.rotation)
    keys, values, places = states.keys.float(), states.values.float(), states.positions
    if places is None:
        places = torch.arange(keys.shape[2], device=keys.device)
    keys = rotate(keys, -places, rotation, keys=True)
    lengths = torch.hypot(keys[..., rotation.first], keys[..., rotation.second])
    # as many in each layer, whether it rotates its keys or not
    lengths = torch.nn.functional.pad(lengths, (0, keys.shape[-1] // 2 - lengths.shape[-1]))
    norms = [
        one.norm(dim=-1, keepdim=True).clamp_(min=_LEAST_NORM).log_() for one in (keys, values)
    ]
    return [keys, values, lengths, *norms]


def surrogate_rotation(rotation: Rotation) -> Rotation:
    """Return the keys' rotation to undo."""
    if rotation.known:
        return rotation
    return known_rotation(
        rotation,
        user="the scorer surrogate, which 'kvalloc fit' makes,",
        instead=f"name {option('budget', '20%')} alone, which needs no fit, or a scorer that looks "
        "at attention, such as snapkv",
    )
