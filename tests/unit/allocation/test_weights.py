"""Weights of layers and heads in the objective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factories import make_losses, make_scores, make_shape

from kvalloc.allocation.curves import head_weights
from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request, read_weights
from kvalloc.errors import InputError


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("weights", [[1.0, 3.0, 0.5], [[1.0, 2.0], [0.0, 4.0], [0.5, 0.5]]])
def test_the_value_is_the_weighted_mean(level: Any, weights: Any) -> None:
    scores = make_scores(3)
    problem = formulate(scores, Request.parse(budget=0.5, level=level, weights=weights))
    each = np.asarray(weights) if np.ndim(weights) == 2 else np.array(weights)[:, None]
    added = scores.contributions()
    rng = np.random.default_rng(0)
    for _ in range(5):
        choice = rng.integers(0, problem.n_options, problem.n_units)
        tokens = problem.chosen_tokens(choice).reshape(3, -1) * np.ones((1, 2), dtype=int)
        kept = np.take_along_axis(added, tokens[..., None] - 5, axis=2)[..., 0]
        expected = (each * kept).sum() / (each * added[..., -1]).sum()
        assert problem.objective_value(choice) == pytest.approx(expected, abs=1e-12)
    assert problem.objective_value(problem.last_options) == pytest.approx(1.0, abs=1e-12)


def test_losses_are_weighted_too() -> None:
    scores = make_losses(1)
    plain = formulate(scores, Request.parse(budget=0.5, objective="loss"))
    heavy = formulate(scores, Request.parse(budget=0.5, objective="loss", weights=[1, 0, 2]))
    np.testing.assert_allclose(heavy.values, plain.values * [[1.0], [0.0], [2.0]], atol=1e-15)


def test_weights_of_sliding_layers_do_not_count() -> None:
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)
    np.testing.assert_allclose(head_weights(shape, [1, 100, 3]), [[0.5, 0.5], [1.5, 1.5]])
    with pytest.raises(InputError, match="full-attention layers are 0"):
        head_weights(shape, [0, 1, 0])


def test_files_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text("[1, 2.5, 0]")
    assert read_weights(path) == (1.0, 2.5, 0.0)
    assert read_weights(np.ones((2, 2))) == ((1.0, 1.0), (1.0, 1.0))
    for text, message in (
        ("{}", "no table"),
        ("3", r"shaped \(\)"),
        ("[1, NaN]", "layer 1 is nan"),
        ("[1,", "no JSON"),
        ('["a"]', "no table"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            read_weights(path)
        assert str(path) in str(caught.value)
    with pytest.raises(InputError, match="cannot read the weights"):
        read_weights(tmp_path / "none.json")
