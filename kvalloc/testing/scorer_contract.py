"""The contract of a scorer as a pytest suite: subclass it and give one fixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvalloc.models.attention import AttentionStates
from kvalloc.scorers import Scorer

SINKS = 2


class ScorerContract:
    """Checks of `Scorer.score` on random attention of one layer.

    Examples
    --------
    ::

        class TestMyScorer(ScorerContract):
            @pytest.fixture
            def scorer(self):
                return MyScorer()
    """

    @pytest.fixture
    def scorer(self) -> Scorer:
        """Return the scorer under test: override this."""
        raise NotImplementedError("override the fixture 'scorer' to return yours")

    def states(self, n_tokens: int = 40, **more: Any) -> AttentionStates:
        """Return attention of 3 rows with 2 KV heads and 4 query heads: override to add states."""
        generator = torch.Generator().manual_seed(n_tokens)
        shapes = (3, 4, n_tokens, 8), (3, 2, n_tokens, 8), (3, 2, n_tokens, 8)
        queries, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
        return AttentionStates(
            layer=0,
            queries=queries,
            keys=keys,
            values=values,
            scaling=8**-0.5,
            mask=None,
            frequencies=torch.tensor([1.0, 0.3, 0.1, 0.03]),
            output_projection=torch.randn(32, 32, generator=generator),
            **more,
        )

    @pytest.mark.parametrize("n_tokens", [1, SINKS, 7, 40])
    def test_each_entry_has_a_score(self, scorer: Scorer, n_tokens: int) -> None:
        """Scores are float32, finite, not negative, and 0 for sinks and window."""
        states = self.states(n_tokens)
        scores = scorer.score(states, sinks=SINKS)
        assert scores.shape == states.keys.shape[:3]
        assert scores.dtype == torch.float32
        assert scores.isfinite().all()
        assert (scores >= 0).all()
        assert not scores[..., :SINKS].any()
        assert not scores[..., max(n_tokens - scorer.window, 0) :].any()

    def test_it_tells_entries_apart(self, scorer: Scorer) -> None:
        """Scores differ among the entries: if they did not, the first entries would stay."""
        scores = scorer.score(self.states(SINKS + 40 + scorer.window), sinks=SINKS)
        free = scores[..., SINKS : SINKS + 40]
        assert (free.amax(dim=-1) > free.amin(dim=-1)).all()

    def test_it_answers_the_same_twice(self, scorer: Scorer) -> None:
        """A scorer remembers no text, and does not change its arguments."""
        states = self.states()
        before = [tensor.clone() for tensor in (states.queries, states.keys, states.values)]
        first = scorer.score(states, sinks=SINKS).clone()
        scorer.score(self.states(20), sinks=SINKS)
        assert torch.equal(scorer.score(replace(states), sinks=SINKS), first)
        for old, new in zip(before, (states.queries, states.keys, states.values), strict=True):
            assert torch.equal(old, new)

    def test_a_row_does_not_see_its_neighbours(self, scorer: Scorer) -> None:
        """The scores of a row do not depend on the batch."""
        states = self.states()
        scores = scorer.score(states, sinks=SINKS)
        for row in range(len(scores)):
            one = {
                name: getattr(states, name)[row : row + 1] for name in ("queries", "keys", "values")
            }
            single = scorer.score(replace(states, **one), sinks=SINKS)[0]
            torch.testing.assert_close(scores[row], single, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_scored_in_float32(self, scorer: Scorer, dtype: torch.dtype) -> None:
        """The same numbers in another type have the same scores."""
        halves, names = self.states(), ("queries", "keys", "values")
        halves = replace(halves, **{name: getattr(halves, name).to(dtype) for name in names})
        wide = replace(halves, **{name: getattr(halves, name).float() for name in names})
        torch.testing.assert_close(
            scorer.score(halves, sinks=SINKS), scorer.score(wide, sinks=SINKS), rtol=1e-4, atol=1e-6
        )
