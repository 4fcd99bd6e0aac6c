"""Budgets inside kvpress, and its scores here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, UnsupportedModelError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.interop.kvpress import make_press, read_peer_name, require_kvpress
from kvalloc.interop.lu_kv import LUKV
from kvalloc.interop.target import restrict
from kvalloc.models.attention import AttentionStates
from kvalloc.models.rope import Rotation, known_rotation, rotate
from kvalloc.scorers.base import Positive, Scorer

if TYPE_CHECKING:
    from torch import Tensor


def budget_press(profile: BudgetProfile, press: Any, *, accept: Collection[str] = ()) -> Any:
    """Return a press of kvpress that keeps a profile's budgets.

    Use it like others: ``with budget_press(profile, SnapKVPress())(model): ...``. The inner press,
    at any compression ratio, ranks entries; the profile's sinks and window stay. Layers with one
    budget for all heads free evicted entries. Others only hide them, as kvpress by head;
    `kvalloc.make_cache` frees them.

    Parameters
    ----------
    press : kvpress.ScorerPress
    accept : collection of str
        As in `kvalloc.interop.exporting.export`.

    Raises
    ------
    InputError
        If a loss is not accepted, or the press gives no scores.
    """
    base: Any = require_kvpress().BasePress
    _require_scores(press)
    left = restrict(profile, LUKV(), accept)

    class BudgetPress(base):  # type: ignore[misc]  # kvpress has no types
        def post_init_from_model(self, model: Any) -> None:
            from kvalloc.models.loading import shape_of

            left.shape.require_same_model(shape_of(model))
            press.post_init_from_model(model)

        def compress(
            self, module: Any, hidden: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> Any:
            budgets = left.budgets_for(keys.shape[2])[module.layer_idx]
            if module.layer_idx not in left.shape.full_layers or budgets.min() == keys.shape[2]:
                return keys, values
            scores = press.score(module, hidden, keys, values, attentions, kwargs).clone()
            above_all = scores.max() + 1
            scores[..., : left.policy.sinks] = above_all
            scores[..., max(0, keys.shape[2] - left.policy.window) :] = above_all
            order = scores.argsort(dim=-1, descending=True, stable=True)
            if (budgets == budgets[0]).all():
                kept = order[..., : budgets[0]].sort(dim=-1).values[..., None]
                kept = kept.expand(*kept.shape[:3], keys.shape[3])
                return keys.gather(2, kept).contiguous(), values.gather(2, kept).contiguous()
            ranks = order.argsort(dim=-1)
            evicted = ranks >= ranks.new_tensor(budgets)[:, None]
            module.masked_key_indices = evicted.nonzero(as_tuple=True)
            return keys, values

    return BudgetPress()


def _require_scores(press: Any) -> None:
    if not isinstance(press, require_kvpress().ScorerPress):
        raise InputError(
            f"{type(press).__name__} gives no scores; take one of kvpress' ScorerPress, such as "
            "SnapKVPress"
        )


@dataclass(frozen=True, kw_only=True)
class PressScorer(Scorer):
    """Scores of a press at its defaults, shifted to a minimum of 0.

    It gets queries, keys and values; queries without positions stand for hidden states. Tokens that
    it protects rank first, after the last ``window``.

    Raises
    ------
    InputError
        If there is no such press, or it gives no scores.

    References
    ----------
    NVIDIA kvpress 0.5.5, ``ScorerPress.score``.
    """

    name = "kvpress"
    summary = "the scores of a press of kvpress, such as SnapKV; needs 'make peers'"
    reference = "kvpress 0.5.5 (NVIDIA)"
    rotates = True

    press: str = "SnapKV"
    window: Positive = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_scores(make_press(read_peer_name(f"kvpress:{self.press}")))

    def query_rows(self, n_tokens: int) -> int:
        """Return the whole prompt's length."""
        return n_tokens

    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Return one layer's scores; see `Scorer.score`.

        Raises
        ------
        UnsupportedModelError
            If the model's rotation of queries is unknown or scales them.
        UnsupportedRequestError
            If the press reads more, such as learnt filters.
        """
        import torch

        rotation = known_rotation(
            states.rotation, user="the scorer kvpress", instead="use a scorer of kvalloc"
        )
        if rotation.scales is not None:
            raise UnsupportedModelError(
                "a press rotates queries itself, and this model scales them behind the rotation; "
                "use a scorer of kvalloc"
            )
        batch, n_heads, n_tokens, head_dim = states.queries.shape
        order = order_of_halves(rotation, head_dim)  # presses rotate halves of the whole head
        rates = rotation.frequencies.float().to(states.keys.device)
        rates = torch.nn.functional.pad(rates, (0, head_dim // 2 - len(rates)))

        def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
            turned = positions[..., None].float() * rates
            turned = torch.cat([turned, turned], dim=-1).reshape(1, -1, head_dim)
            return turned.cos(), turned.sin()

        positions = torch.arange(n_tokens, device=states.keys.device)
        plain = rotate(states.queries.float(), -positions, rotation)[..., order]
        config = SimpleNamespace(
            num_attention_heads=n_heads, num_key_value_heads=states.keys.shape[1]
        )
        module = SimpleNamespace(
            layer_idx=states.layer,
            head_dim=head_dim,
            config=config,
            num_key_value_groups=n_heads // states.keys.shape[1],
            q_proj=lambda hidden: hidden,
            rotary_emb=lambda _, places: angles(places),
        )
        try:
            scores = make_press(read_peer_name(f"kvpress:{self.press}")).score(
                module,
                plain.transpose(1, 2).reshape(batch, n_tokens, n_heads * head_dim),
                states.keys.float()[..., order],
                states.values.float(),
                None,
                {"position_embeddings": angles(positions)},
            )
        except (AssertionError, AttributeError, KeyError, RuntimeError) as error:
            raise UnsupportedRequestError(
                f"{self.press}Press cannot score a prompt of {n_tokens} tokens by its queries, "
                f"keys and values alone: {error}; take another press"
            ) from error
        scores = scores.float() - scores.min()
        return self.without_protected(scores, states, sinks=sinks)


def order_of_halves(rotation: Rotation, head_dim: int) -> list[int]:
    """Return a head's dimensions with rotated pairs first in each half."""
    dims = range(head_dim)
    first, second = dims[rotation.first], dims[rotation.second]
    unpaired = [dim for dim in dims if dim not in first and dim not in second]
    middle = len(unpaired) // 2
    return [*first, *unpaired[:middle], *second, *unpaired[middle:]]
