"""What a user may ask for, and what a request becomes."""

import re
from functools import partial

import numpy as np
import pytest
from factories import make_bits, make_posed, make_scores, make_shape

from kvalloc.accounting.costs import POSITION_BYTES, full_bytes
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import PosedRequest, formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InfeasibleError, InputError
from kvalloc.problem import Aggregate, Sense
from kvalloc.units import parse_bytes, parse_indices, parse_share

READ = [
    (parse_share, {"20%": 0.2, " 20 % ": 0.2, "100%": 1, "0.2": 0.2, 0.5: 0.5, 1: 1, "1e-3": 1e-3}),
    (parse_bytes, {"512MiB": 512 * 2**20, "1.5GB": 1.5e9, "1.5 gib": 1.5 * 2**30, " 7 ": 7}),
    (parse_bytes, {4096: 4096, "3b": 3, "1kB": 1000, "2TiB": 2 * 2**40, ".5KiB": 512}),
    (parse_indices, {"0": (0,), "0-2": (0, 1, 2), " 1 - 2 , 5": (1, 2, 5), "3,1": (3, 1)}),
    (parse_indices, {"4-4": (4,)}),
]
NOT_READ = [
    (parse_share, "write 20% or 0.2", ("0", "0%", "-1%", "101%", "20", 1.0001, "", "%")),
    (parse_share, "write 20% or 0.2", ("a fifth", "nan", "inf", "nan%", "1,5%")),
    (parse_bytes, "write 512MiB", ("0", "-5", "0.2", "MiB", "", "ten", "5XB", "1e3", "1.5.5MB")),
    (parse_bytes, "write 512MiB", ("1 2", "9" * 400, "nan", True)),
    (parse_indices, "no list of layers", ("", "all", "-1", "1,,2", "9" * 7)),
    (parse_indices, "write 1-3", ("3-1",)),
    (parse_indices, "twice", ("0-3,2",)),
]


@pytest.mark.parametrize(
    ("read", "given", "found"), [(read, *one) for read, row in READ for one in row.items()]
)
def test_what_people_write(read, given, found):
    assert read(given) == (pytest.approx(found) if isinstance(found, int | float) else found)


@pytest.mark.parametrize(
    ("read", "words", "given"), [(read, words, one) for read, words, row in NOT_READ for one in row]
)
def test_what_cannot_be_read(read, words, given):
    with pytest.raises(InputError, match=words):
        read(given)


def test_the_problem_of_a_hand_computed_profile():
    """Two layers, two heads, six evictable entries: every number by hand."""
    shape = make_shape(n_layers=2, n_kv_heads=2, head_dim=4, dtype_bytes=2)  # 16 bytes an entry
    curve = np.array([0.0, 0.5, 0.75, 0.875, 1.0, 1.0, 1.0])
    flat = np.linspace(0, 1, 7)
    scores = make_scores(
        shape=shape,
        context_tokens=8,
        sinks=1,
        window=1,
        curves=np.stack([np.stack([curve, flat]), np.stack([flat, flat])])[None],
        masses=np.array([[[3.0, 1.0], [1.0, 1.0]]]),
    )
    problem = formulate(scores, Request.parse(budget="50%", batch=3))
    assert problem.n_units == 2
    assert problem.tokens[0].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert problem.values[0].tolist() == pytest.approx((0.75 * curve + 0.25 * flat).tolist())
    assert problem.values[1].tolist() == pytest.approx(flat.tolist())
    assert problem.costs[0].tolist() == [t * 2 * (16 + POSITION_BYTES) * 3 for t in range(2, 9)]
    assert problem.weights.tolist() == [0.5, 0.5]
    assert problem.capacity_bytes == 8 // 2 * 2 * 2 * 16 * 3
    assert problem.layers.tolist() == [0, 1]
    assert problem.heads.tolist() == [-1, -1]
    assert problem.protected_tokens == 2
    heads = formulate(scores, Request.parse(target_retention=0.5, level="head"))
    assert heads.sense is Sense.MIN_COST
    assert heads.target == 0.5
    # Each layer counts half, each head its share of the layer's mass: what an option is worth.
    worth = heads.weights * heads.values[:, 3]
    assert worth.tolist() == pytest.approx([0.75 * 0.875 / 2, 0.125 / 2, 0.25 / 2, 0.25 / 2])
    assert heads.costs[0, 0] == 2 * (16 + POSITION_BYTES)
    assert heads.layers.tolist() == [0, 0, 1, 1]
    assert heads.heads.tolist() == [0, 1, 0, 1]


def test_pages_are_whole_but_for_the_last_of_the_context():
    scores = make_scores(context_tokens=40)  # sinks 2, window 3
    problem = formulate(scores, Request.parse(budget=0.5, page=16))
    assert problem.tokens[0].tolist() == [16, 32, 40]
    entry = (scores.shape.bytes_per_entry + POSITION_BYTES) * scores.shape.n_kv_heads
    assert problem.costs[0].tolist() == [16 * entry, 32 * entry, 48 * entry]
    assert problem.is_concave
    even = formulate(scores, Request.parse(budget=0.5, page=8, min_tokens=9))
    assert even.tokens[0].tolist() == [16, 24, 32, 40]
    whole = formulate(scores, Request.parse(budget=1.0, page=64))
    assert whole.tokens[0].tolist() == [40]


def test_another_context_stretches_the_curve():
    scores = make_scores(context_tokens=40)
    for context in (20, 40, 75, 400):
        problem = formulate(scores, Request.parse(target_retention=0.5, context=context))
        assert problem.context_tokens == context
        assert problem.tokens[0, 0] == 5
        assert problem.tokens[0, -1] == context
        assert problem.is_concave
        assert problem.values[:, 0] == pytest.approx(0.0, abs=1e-15)
        assert problem.values[:, -1] == pytest.approx(1.0)
    longer = formulate(scores, Request.parse(target_retention=0.5, context=75))  # twice 35, plus 5
    same = formulate(scores, Request.parse(target_retention=0.5))
    assert longer.values[:, ::2] == pytest.approx(same.values)


def test_the_worst_unit_is_judged_by_its_own_curve():
    scores = make_scores(3)
    problem = formulate(scores, Request.parse(budget=0.5, level="head", objective="worst"))
    assert problem.aggregate is Aggregate.WORST
    assert problem.values[:, -1] == pytest.approx(1.0)
    assert problem.weights.tolist() == [1.0] * 6


SLIDING = make_shape(
    n_layers=4, layer_types=("full", "sliding", "sliding", "full"), sliding_window=20
)


def test_sliding_layers_are_paid_for_but_not_decided():
    scores = make_scores(1, shape=SLIDING, context_tokens=100)
    for context, batch, entries in ((100, 1, 19), (10, 5, 10)):
        costs = make_posed(scores, budget=0.5, context=context, batch=batch).costs
        assert costs.constant_bytes == 2 * 2 * entries * SLIDING.bytes_per_entry * batch
    problem = formulate(scores, Request.parse(memory=full_bytes(SLIDING, 100)))
    assert problem.layers.tolist() == [0, 3]
    assert problem.weights.tolist() == [0.5, 0.5]
    profile = solve(scores, memory=2 * full_bytes(SLIDING, 100))
    assert profile.budgets.tolist() == [[100, 100], [19, 19], [19, 19], [100, 100]]
    assert profile.retained_bytes == profile.full_bytes == full_bytes(SLIDING, 100)


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        *(
            (lambda: make_scores(1, shape=SLIDING, context_tokens=100), asked)
            for asked in ({}, {"page": 16}, {"batch": 3}, {"batch": 3, "page": 16, "context": 50})
        ),
        (partial(make_scores, shape=make_shape(dtype_bytes=4)), {"level": "head"}),
        (make_bits, {"bits": (16, 8, 4), "page": 8, "batch": 2}),
    ],
)
def test_memory_is_a_peak_and_too_little_names_what_would_do(make, asked):
    """Sliding layers, positions, pages and what is held in full while a prompt is read count."""
    scores = make()
    with pytest.raises(InfeasibleError, match="in full while the prompt is read") as caught:
        solve(scores, memory=1, **asked)
    least = caught.value.nearest
    with pytest.raises(InfeasibleError, match=re.escape(f"ask for at least memory={least}")):
        solve(scores, memory=least - 1, **asked)
    for memory in (least, *(int(least * (1 + share)) for share in (0.1, 0.33, 0.7, 1.3, 1.6, 2))):
        profile = solve(scores, memory=memory, **asked)
        assert profile.peak_bytes_at(profile.context_tokens, profile.batch) <= memory
        if memory == least:
            floor = max(scores.protected_tokens, profile.page_tokens)
            assert profile.budgets[0].tolist() == [floor] * scores.shape.n_kv_heads


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"budget_tokens": 4}, 5),
        ({"budget": 0.1}, 0.1407),
        ({"budget_tokens": 15, "min_tokens": 16}, 16),
        ({"budget_tokens": 15, "page": 16}, 16),
    ],
)
def test_less_than_the_floors_is_infeasible_and_names_what_is_not(arguments, nearest):
    scores = make_scores()
    with pytest.raises(InfeasibleError) as caught:
        solve(scores, **arguments)
    assert caught.value.nearest == nearest
    target = next(iter(arguments))
    solve(scores, **{**arguments, target: nearest})  # what it names can be had


def test_everything_is_kept_at_100_percent_with_pages_that_do_not_divide_the_context():
    profile = solve(make_scores(), budget="100%", page=16)
    assert profile.budgets.min() == profile.context_tokens


def test_prompts_that_are_read_together_share_the_memory():
    one, three = (solve(make_scores(), memory=4000 * rows, batch=rows) for rows in (1, 3))
    assert one.budgets.tolist() == three.budgets.tolist()
    assert three.retained_bytes == 3 * one.retained_bytes


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ({"target_retention": 0.9}, "proportional"),
        ({"budget": "20%"}, "proportional"),
        ({"budget_tokens": 20}, "fixed"),
        ({"memory": 4000}, "fixed"),
    ],
)
def test_relative_targets_scale_and_absolute_ones_do_not(target, rule):
    assert solve(make_scores(), **target).length_rule == rule


def test_one_sample_of_heads_is_not_copied():
    """The curves of a long context are gigabytes: the problem looks at the measured ones."""
    scores = make_scores(n_samples=1)
    for request in (
        Request.parse(budget=0.5, level="head"),
        Request.parse(target_retention=0.9, level="head"),
        Request.parse(budget=0.5, level="head", objective="worst"),
    ):
        assert np.shares_memory(formulate(scores, request).values, scores.curves)


def test_one_sample_and_the_mean_of_equal_ones_pose_the_same_problem():
    shape = make_shape(n_layers=3, layer_types=("full", "sliding", "full"), sliding_window=8)
    one = make_scores(shape=shape, n_samples=1)
    three = make_scores(
        shape=shape, curves=np.repeat(one.curves, 3, axis=0), masses=np.repeat(one.masses, 3, 0)
    )
    for request in (
        Request.parse(budget=0.5, level="head"),
        Request.parse(budget=0.5, level="head", page=16),
        Request.parse(budget=0.5, level="head", context=60),
        Request.parse(budget=0.5, level="layer"),
        Request.parse(budget=0.5, level="head", objective="worst"),
    ):
        single, mean = formulate(one, request), formulate(three, request)
        expected = mean.weights[:, None] * mean.values
        assert single.weights[:, None] * single.values == pytest.approx(expected, abs=1e-14)
        sample = PosedRequest(scores=three, request=request, sample=1).problem
        assert sample.weights[:, None] * sample.values == pytest.approx(expected, abs=1e-14)
