"""`kvalloc verify` believes nothing: true profiles pass, and every kind of lie is found."""

import re

import numpy as np
import pytest
from factories import make_bits, make_losses, make_scores, make_shape
from refusals import untrue

import kvalloc
from kvalloc.accounting.costs import head_bytes
from kvalloc.allocation.audit import verify
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.report.wording import objective_text

SLIDING = make_shape(layer_types=("full", "sliding", "full"), sliding_window=8)
BITS = {"bits": (16, 8, 4)}

ASKED = [
    *(
        (make_scores, asked)
        for asked in (
            {"budget": "40%"},
            {"target_retention": 0.8},
            {"target_retention": 0.7, "level": "head"},
            {"budget_tokens": 12, "level": "head", "min_tokens": 7},
            {"memory": 7000, "page": 4, "context": 60, "batch": 2},
            {"budget": 0.5, "objective": "mean", "solver": "pyramid"},
            {"budget": 0.5, "solver": "ilp", "page": 4},
            {"budget": 0.5, "average": "allocations"},
        )
    ),
    *(
        (make_scores, {**goal, **limits})
        for goal in ({"budget": "40%"}, {"target_retention": 0.5})
        for limits in (
            {"cap": ["0=300B", "0-1=900B"]},
            {"cap": "1-2=700B", "max_distinct": 2},
            {"max_distinct": 1, "level": "head"},
            {"level": "head", "max_distinct": 2, "page": 4},
            {"max_tokens": 15, "min_tokens": 9, "page": 3, "level": "head"},
        )
    ),
    (lambda: make_scores(3, shape=SLIDING), {"memory": 3000}),
    (lambda: make_bits(3), {"budget": "25%", "level": "head", **BITS}),
    (make_bits, {"memory": 5000, "page": 8, "batch": 2, **BITS}),
    (lambda: make_losses(5), {"target_loss": 0.05, "level": "head", "solver": "dp"}),
    (
        lambda: make_losses(1, per="layer"),
        {"budget": "50%", "objective": "loss", "solver": "dp"},
    ),
    (make_losses, {"budget": "40%", "level": "head", "objective": "loss"}),
    (make_losses, {"budget": "40%", "average": "allocations", "objective": "loss"}),
    (
        lambda: make_losses(1, shape=SLIDING),
        {"budget": "60%", "level": "head", "objective": "loss"},
    ),
]


@pytest.mark.parametrize(
    ("make", "asked"), ASKED, ids=lambda value: getattr(value, "__name__", str(value))[:60]
)
def test_what_solve_writes_is_true_and_comes_back(make, asked, tmp_path):
    scores = make()
    profile = kvalloc.solve(scores, **asked)
    assert untrue(profile, scores) == set()
    for context in (profile.context_tokens, 2 * profile.context_tokens):
        pages = -(-profile.budgets_for(context) // profile.page_tokens) * profile.page_tokens
        stored = head_bytes(pages, 16 if profile.bits is None else profile.bits, scores.shape)
        sliding = list(scores.shape.constant_layers)
        stored[sliding] = pages[sliding] * scores.shape.plain_bytes_per_entry
        assert profile.retained_bytes_at(context, 2) == 2 * int(stored.sum())
    assert profile.retained_bytes <= profile.requested.get("bytes", profile.full_bytes)
    profile.save(tmp_path / "p.json")
    again = kvalloc.load_profile(tmp_path / "p.json")
    for name in BudgetProfile.model_fields:
        np.testing.assert_equal(getattr(again, name), getattr(profile, name), name)
    assert again == profile
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "p.json").read_bytes()


@pytest.mark.parametrize("context", [6, 9, 10, 12, 20, 30])
def test_averaged_budgets_are_true_and_meet_what_the_mean_can(context):
    """A price's last bit made some of them WRONG, and one sample that cannot refused a target."""
    random = np.random.default_rng(context)
    scores = make_scores(1, context_tokens=context, sinks=0, window=1, n_samples=2)
    line = np.linspace(0.0, 1.0, context)
    scores = scores.replace(
        curves=np.broadcast_to(line, scores.curves.shape).copy(),
        masses=random.uniform(0.2, 1.0, scores.masses.shape),
    )
    for share in np.arange(0.3, 0.9, 0.05):
        profile = kvalloc.solve(scores, budget=float(share), average="allocations")
        assert untrue(profile, scores) == set(), share
    losses = np.ones((2, 3, 1, 1, 3)) * np.array([1.0, 0.8, 0.0])
    losses[1] *= 0.2
    levels = np.array([1, context - 2, context])
    scores = scores.replace(losses=losses, loss_tokens=levels, loss_bits=np.array([16]))
    for loss in (1.45, 2.0, 3.0):  # the mean loses 1.44 at the largest budget, the first one 2.4
        asked = {"target_loss": loss, "max_tokens": context - 2}
        profile = kvalloc.solve(scores, **asked, average="allocations")
        assert profile.predicted_loss <= loss
        assert untrue(profile, scores) == set(), loss
    with pytest.raises(InfeasibleError, match="the least is target_loss=1.44"):
        kvalloc.solve(scores, target_loss=1.4, max_tokens=context - 2, average="allocations")


def more(profile):
    return {"budgets": np.minimum(profile.budgets + 5, profile.context_tokens)}


def fewer(profile):
    return {"budgets": np.maximum(profile.budgets - 3, profile.policy.protected_tokens)}


def other_widths(profile):
    return {"bits": np.where(profile.bits == 4, 8, 4)}


def requesting(**asked):
    return lambda profile: {"requested": {**profile.requested, **asked}}


def moved(name, by):
    return lambda profile: {name: getattr(profile, name) + by}


SHARE = {"budget": "40%"}
HEADS = {**SHARE, "level": "head"}
LOSSES = {**HEADS, "objective": "loss"}

FALSE = [
    *(
        (make_scores, SHARE, change, names)
        for change, names in (
            (moved("objective", 1e-6), {"objective"}),
            (moved("retention", 1e-6), {"retention"}),
            (moved("bound", -1e-6), {"bound"}),
            (moved("bound", 1e-6), {"bound"}),
            (lambda profile: {"problem_digest": "0"}, {"problem digest"}),
            (lambda profile: {"score_digest": "0"}, {"score profile digest"}),
            (more, {"within capacity", "retention", "objective", "bound"}),
        )
    ),
    (make_scores, {"target_retention": 0.8}, fewer, {"target met", "retention", "objective"}),
    (make_scores, {**SHARE, "page": 8}, moved("budgets", -1), {"budgets are options"}),
    (make_scores, {**HEADS, "max_distinct": 9}, requesting(max_distinct=1), {"different budgets"}),
    (make_scores, {**HEADS, "max_distinct": 9}, requesting(cap=["0=200B"]), {"cap of layer 0"}),
    (make_losses, {"target_loss": 0.05}, moved("predicted_loss", -0.01), {"predicted loss"}),
    (make_losses, LOSSES, lambda profile: {"retention": 0.5}, {"retention"}),
    (make_bits, {**HEADS, **BITS}, other_widths, {"budgets are options", "predicted loss"}),
]


@pytest.mark.parametrize(("make", "asked", "change", "names"), FALSE)
def test_a_false_statement_is_found(make, asked, change, names):
    scores = make(3)
    profile = kvalloc.solve(scores, **asked)
    assert untrue(profile, scores) == set()
    assert names <= untrue(profile.replace(**change(profile)), scores)


@pytest.mark.parametrize(
    ("asked", "unit"),
    [
        ({"budget": "30%", "objective": "loss"}, "nats per token"),
        ({"target_loss": 0.1}, "bytes"),
        ({"target_retention": 0.8}, "bytes"),
        ({"budget": "30%", "objective": "mean"}, ""),
    ],
)
def test_numbers_have_the_sign_and_unit_that_solve_prints(asked, unit):
    scores = make_losses(3)
    profile = kvalloc.solve(scores, solver="dp", **asked)
    checks = {check.name: check for check in verify(profile, scores)}
    for name in ("objective", "bound"):
        for text in (checks[name].stated, checks[name].recomputed.removesuffix(" by duality")):
            assert re.fullmatch(rf"[\d.,e-]+{f' {unit}' if unit else ''}", text)
            assert not text.startswith("-")
    stated, objective = checks["objective"].stated, objective_text(profile.objective, profile)
    assert round(number_of(stated), 6) == number_of(objective)
    if "target_loss" in asked:
        assert checks["target met"].stated == "0.1 nats per token"


def number_of(text):
    return float(text.partition(" ")[0].replace(",", ""))


def test_a_profile_without_its_request_cannot_be_verified():
    profile = kvalloc.solve(make_scores(0), budget="40%").replace(requested={})
    with pytest.raises(InputError, match="does not say what was requested"):
        verify(profile, make_scores(0))
