"""Contract of a scorer as a pytest suite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvalloc.models.attention import AttentionStates
from kvalloc.models.rope import Rotation
from kvalloc.scorers import Scorer

SINKS, TENSORS = 2, ("queries", "keys", "values")


class ScorerContract:
    """Checks of `Scorer.score` on random attention of a layer: override the fixture ``scorer``."""

    @pytest.fixture
    def scorer(self) -> Scorer:
        """Return the scorer under test."""
        raise NotImplementedError("override the fixture 'scorer' to return yours")

    def states(self, n_tokens: int = 40, **more: Any) -> AttentionStates:
        """Return attention of 3 rows, 2 KV heads and 4 query heads: override to add states."""
        import torch

        generator = torch.Generator().manual_seed(n_tokens)
        sizes = (3, 4, n_tokens, 8), (3, 2, n_tokens, 8), (3, 2, n_tokens, 8)
        queries, keys, values = (torch.randn(size, generator=generator) for size in sizes)
        return AttentionStates(
            layer=0,
            queries=queries,
            keys=keys,
            values=values,
            scaling=8**-0.5,
            mask=None,
            rotation=Rotation(lambda: torch.tensor([1.0, 0.3, 0.1, 0.03]), slice(4), slice(4, 8)),
            output_projection=torch.randn(32, 32, generator=generator),
            **more,
        )

    @pytest.mark.parametrize("n_tokens", [1, SINKS, 7, 40])
    def test_each_entry_has_a_score(self, scorer: Scorer, n_tokens: int) -> None:
        """Check that scores are float32, finite, not negative, and 0 for sinks and window."""
        states = self.states(n_tokens)
        scores = scorer.score(states, sinks=SINKS)
        assert scores.shape == states.keys.shape[:3]
        assert str(scores.dtype) == "torch.float32"
        assert scores.isfinite().all()
        assert (scores >= 0).all()
        assert not scores[..., :SINKS].any()
        assert not scores[..., max(n_tokens - scorer.window, 0) :].any()

    def test_it_tells_entries_apart(self, scorer: Scorer) -> None:
        """Check that scores differ: otherwise the first entries would stay."""
        scores = scorer.score(self.states(SINKS + 40 + scorer.window), sinks=SINKS)
        free = scores[..., SINKS : SINKS + 40]
        assert (free.amax(dim=-1) > free.amin(dim=-1)).all()

    def test_it_answers_the_same_twice(self, scorer: Scorer) -> None:
        """Check that it remembers no text and changes no argument."""
        states, before = self.states(), self.states()
        first = scorer.score(states, sinks=SINKS).clone()
        scorer.score(self.states(20), sinks=SINKS)
        assert scorer.score(replace(states), sinks=SINKS).equal(first)
        assert all(getattr(states, name).equal(getattr(before, name)) for name in TENSORS)

    def test_a_row_does_not_see_its_neighbours(self, scorer: Scorer) -> None:
        """Check that a row's scores do not depend on the batch."""
        states = self.states()
        scores = scorer.score(states, sinks=SINKS)
        for row in range(len(scores)):
            of_row = {name: getattr(states, name)[row : row + 1] for name in TENSORS}
            single = scorer.score(replace(states, **of_row), sinks=SINKS)[0]
            assert scores[row].allclose(single, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("method", ["bfloat16", "half"])
    def test_half_precision_is_scored_in_float32(self, scorer: Scorer, method: str) -> None:
        """Check that a number's type does not change scores."""
        states = self.states()
        halves = {name: getattr(getattr(states, name), method)() for name in TENSORS}
        wide = {name: half.float() for name, half in halves.items()}
        half, full = (scorer.score(replace(states, **one), sinks=SINKS) for one in (halves, wide))
        assert half.allclose(full, rtol=1e-4, atol=1e-6)
