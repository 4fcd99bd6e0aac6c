"""Score profiles with loss curves."""

import numpy as np
import pytest
from tiny_models import WordTokenizer, tiny_model, words

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure import Prompt, profile
from kvalloc.measure.loss_plan import LossPlan

TOKENIZER = WordTokenizer()
PLAN = {"shares": (0.0, 0.3, 0.6), "continuation_tokens": 5, "batch": 4}


def measure(texts=None, model=None, **options):
    texts = [words(300)] if texts is None else texts
    values = {"context": 60, "samples": 2, "model_id": "tests/tiny", **options}
    return profile(tiny_model() if model is None else model, TOKENIZER, texts, **values)


@pytest.mark.parametrize("method", ["measured", "fast"])
@pytest.mark.parametrize(("level", "heads"), [("layer", 1), ("head", 2)])
def test_losses_lie_beside_the_retention_curves(tmp_path, method, level, heads):
    plain = measure()
    output = tmp_path / "s.safetensors"
    plan = LossPlan(method=method, level=level, **PLAN)
    options = {"context": 60, "samples": 2, "model_id": "tests/tiny", "loss": plan}
    profile(tiny_model(), TOKENIZER, [words(300)], output=output, **options)
    found = ScoreProfile.load(output)
    assert np.array_equal(found.curves, plain.curves)
    assert found.loss_tokens.tolist() == [12, 26, 41, 60]
    assert found.losses.shape == (2, 3, heads, 4) == found.loss_stderr.shape
    assert (found.losses[..., -1] == 0).all()
    assert (found.losses[..., 0] > 0).all()
    assert not plain.has_losses
    assert (found.loss_method, plain.loss_method) == (method, "")


def test_a_target_loss_is_met_on_what_was_measured():
    scores = measure(loss=LossPlan(level="layer", **PLAN))
    everything = float(scores.losses[..., 0].mean(axis=0).sum())
    decided = solve(scores, target_loss=everything / 3)
    assert decided.predicted_loss <= everything / 3
    assert decided.retained_bytes < decided.full_bytes


def test_answers_are_what_the_loss_is_measured_on():
    asked = Prompt(text=words(60))
    answered = Prompt(text=words(60), answer="w1 w2 w3")
    plan = LossPlan(**PLAN)
    own = measure([asked], samples=1, loss=plan)
    given = measure([answered], samples=1, loss=plan)
    assert np.array_equal(own.curves, given.curves)
    assert not np.allclose(own.losses, given.losses)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": "exact"}, "loss method is 'exact'"),
        ({"loss": "fast", "loss_level": "token"}, "loss level is 'token'"),
    ],
)
def test_bad_plans_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        measure(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"shares": ()}, "not shares"), ({"shares": (1.2,)}, "not shares"), ({"batch": 0}, "batch")],
)
def test_bad_sizes_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        LossPlan(**options)
