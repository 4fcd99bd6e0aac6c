"""What a request makes of measured curves: losses, policies, limits, bits."""

import dataclasses
import itertools

import numpy as np
import pytest
from factories import make_bits, make_losses, make_posed, make_problem, make_scores, make_shape
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.accounting.costs import POSITION_BYTES, stored_bytes
from kvalloc.allocation.decision import solve
from kvalloc.allocation.formulation import EVEN_OPTIONS, formulate
from kvalloc.allocation.request import LayerCap, Request
from kvalloc.allocation.verification import solve_problem
from kvalloc.errors import InputError, SolverError
from kvalloc.formats.budget_profile import relative_gap
from kvalloc.problem import GroupCap, MaxDistinct
from kvalloc.problem.registry import get_solver, solver_names
from kvalloc.report.wording import request_text

# Loss curves: what a file may hold, what they make of a problem, and what is told of them


def test_the_problem_is_less_the_measured_loss():
    scores = make_losses(3, n_samples=2)
    assert scores.loss_tokens is not None
    problem = formulate(scores, Request.parse(target_loss=0.05, level="head"))
    mean = scores.losses[:, :, :, 0].mean(axis=0)
    for unit in range(problem.n_units):
        layer, head = int(problem.layers[unit]), int(problem.heads[unit])
        expected = np.interp(problem.tokens[unit], scores.loss_tokens, mean[layer, head])
        np.testing.assert_allclose(problem.values[unit], -expected, atol=1e-15)
    assert problem.target == -0.05
    assert problem.weights.tolist() == [1.0] * problem.n_units
    single = make_posed(scores, 1, target_loss=0.05, level="head").problem
    at_first = -scores.losses[1].reshape(problem.n_units, -1)[:, 0]
    np.testing.assert_allclose(single.values[:, 0], at_first, atol=1e-15)


def test_options_start_where_a_loss_was_measured():
    scores = make_losses(levels=[11, 20, 40])
    problem = formulate(scores, Request.parse(budget=0.6, objective="loss"))
    assert int(problem.tokens.min()) == 11
    longer = formulate(scores, Request.parse(budget=0.6, objective="loss", context=75))
    # The same share of the evictable entries: 5 + 6 * 70 / 35.
    assert int(longer.tokens.min()) == 17
    assert make_posed(scores).predicted_loss(np.full((3, 2), 10)) is None
    assert make_posed(scores).predicted_loss(np.full((3, 2), 11)) is not None


@pytest.mark.parametrize(("context", "page"), [(40, 1), (2000, 1), (4096, 16), (5000, 7)])
def test_options_are_few_and_their_costs_keep_a_coarse_grain(context, page):
    scores = make_losses()
    problem = formulate(
        scores, Request.parse(budget=0.5, objective="loss", context=context, page=page)
    )
    assert problem.n_options <= EVEN_OPTIONS
    assert problem.step_bytes is not None
    assert problem.step_bytes % page == 0
    assert int(problem.tokens[0, -1]) == context
    # Everything is on offer where it is few.
    if context // page <= EVEN_OPTIONS:
        assert problem.step_bytes == page * 2 * (scores.shape.bytes_per_entry + POSITION_BYTES)


def test_whole_layers_only_where_whole_layers_were_measured():
    scores = make_losses(per="layer")
    assert formulate(scores, Request.parse(target_loss=0.1)).n_units == 3
    different = np.full((3, 2), 20)
    assert make_posed(scores).predicted_loss(different) is not None
    different[1, 0] = 19
    assert make_posed(scores).predicted_loss(different) is None


def test_a_loss_of_nothing_keeps_everything_that_does_harm():
    scores = make_losses(noise=0.0)
    decided = solve(scores, target_loss=0.0, level="head", solver="dp")
    assert decided.predicted_loss == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("bound", "gap"), [(-0.01, 0.5), (0.0, 1.0), (-0.02, 0.0), (None, None)])
def test_gaps_of_losses_are_shares_of_the_loss(bound, gap):
    assert relative_gap(-0.02, bound) == gap


def test_sliding_layers_have_no_loss():
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)
    scores = make_losses(shape=shape)
    losses = scores.losses.copy()
    losses[:, 1, :, :-1] = 9.0  # counts for nothing: no budget changes it
    scores = scores.replace(losses=losses)
    decided = solve(scores, target_loss=0.05, solver="dp")
    assert decided.predicted_loss <= 0.05
    assert decided.budgets[1].tolist() == [8, 8]


def test_the_interval_of_a_predicted_loss_is_over_samples():
    scores = make_losses(n_samples=40)
    decided = solve(scores, budget="40%", objective="loss")
    each = np.array(
        [make_posed(scores, s).predicted_loss(decided.budgets) for s in range(40)], dtype=float
    )
    found = make_posed(scores).predicted_loss_interval(decided)
    assert found is not None
    half = 1.96 * each.std() / 40**0.5
    assert decided.predicted_loss == pytest.approx(each.mean())
    assert found == pytest.approx((each.mean() - half, each.mean() + half), abs=0.25 * half)
    one = make_losses(n_samples=1)
    assert make_posed(one).predicted_loss_interval(solve(one, budget="40%")) is None


# Caps and few budgets: from a user's words to constraints that hold


def test_a_cap_is_layers_and_a_size():
    cap = LayerCap.parse(" 0-1, 5 = 2 KiB ")
    assert (cap.layers, cap.capacity_bytes) == ((0, 1, 5), 2048)
    assert (cap.name, cap.text) == ("layers 0-1,5", "0-1,5=2KiB")
    assert LayerCap.parse("3=1B").name == "layer 3"


SLIDING = make_shape(
    n_layers=4, layer_types=("full", "sliding", "sliding", "full"), sliding_window=9
)


def test_sliding_layers_count_towards_their_cap():
    scores = make_scores(1, shape=SLIDING)
    per_layer = 2 * 8 * SLIDING.bytes_per_entry
    problem = formulate(scores, Request.parse(budget=0.5, cap=("0-2=1500B",)))
    assert problem.constraints == (
        GroupCap(name="layers 0-2", units=(0,), capacity_bytes=1500 - 2 * per_layer),
    )
    profile = solve(scores, budget=1.0, cap="0-2=1500B")
    entry = SLIDING.bytes_per_entry + POSITION_BYTES
    stored = int(profile.budgets[0].sum()) * entry + 2 * per_layer
    assert 1500 - 2 * entry < stored <= 1500
    with pytest.raises(InputError, match="only layers without budgets"):
        solve(scores, budget=0.5, cap="1-2=1MiB")
    paged = formulate(scores, Request.parse(budget=0.5, page=5, cap=("0-1=2000B",)))
    (cap,) = paged.constraints
    assert isinstance(cap, GroupCap)
    assert cap.capacity_bytes == 2000 - 2 * 10 * SLIDING.bytes_per_entry


def test_the_worst_unit_is_measured_against_the_whole_context():
    """With a largest budget no unit reaches 1: it must not be taken for the whole."""
    problem = formulate(make_scores(3), Request.parse(budget=0.5, max_tokens=20, objective="worst"))
    whole = formulate(make_scores(3), Request.parse(budget=0.5, objective="worst"))
    assert problem.values.shape[1] == 16
    assert np.array_equal(problem.values, whole.values[:, :16])


def test_caps_on_no_unit_and_on_units_that_are_not_there():
    empty = GroupCap(name="nothing", units=(), capacity_bytes=5)
    problem = make_problem([[0.0, 1.0]] * 2, capacity=2, constraints=(empty,))
    choice = np.array([1, 1])
    assert empty.fault(problem, choice) is None
    problem.check_feasible()
    with pytest.raises(InputError, match="a unit twice"):
        GroupCap(name="device 0", units=(0, 0), capacity_bytes=5)
    beyond = GroupCap(name="device 0", units=(0, 2), capacity_bytes=5)
    with pytest.raises(InputError, match=r"cap of device 0 names units 0\.\.2 of 0\.\.1"):
        make_problem([[0.0, 1.0]] * 2, capacity=2, constraints=(beyond,))


# Tokens and bits chosen together: stored bytes, options, solvers, profiles


BITS = (16, 8, 4)


def _cost(tokens, bits, shape):
    """Bytes of the entries of one head, with two for the position of each."""
    return _by_hand(tokens, bits, shape.head_dim) + 2 * tokens


def _by_hand(tokens, bits, head_dim):
    """Bytes counted number by number: codes of 5 bits are planes of 4 and 1, of 3 of 2 and 1."""
    if bits == 16:
        return tokens * 2 * head_dim * 2
    planes = {5: (4, 1, 4), 3: (4, 2, 1), 2: (2, 1, 2)}.get(
        bits, (bits, bits)
    )  # of a key and a value
    row = sum((head_dim * plane + 7) // 8 for plane in planes)
    key_blocks = sum(1 for start in range(0, tokens, 64) for _ in range(head_dim))
    value_blocks = sum(1 for _ in range(tokens) for start in range(0, head_dim, 64))
    turned = bits < 8 and head_dim & (head_dim - 1) == 0  # a scale and no minimum
    return tokens * row + 4 * key_blocks + (2 if turned else 4) * value_blocks


@pytest.mark.parametrize("head_dim", [1, 3, 64, 65, 128])
@pytest.mark.parametrize("bits", [16, 8, 5, 4, 3, 2])
def test_stored_bytes_are_those_counted_one_by_one(head_dim, bits):
    shape = make_shape(head_dim=head_dim, dtype_bytes=4)  # whatever the model computes in
    tokens = np.array([0, 1, 63, 64, 65, 200])
    expected = [_by_hand(n, bits, head_dim) for n in tokens.tolist()]
    assert stored_bytes(tokens, bits, shape).tolist() == expected
    assert stored_bytes(tokens, bits, shape).dtype == np.int64


def test_solvers_that_count_tokens_refuse():
    problem = formulate(make_bits(), Request.parse(budget=0.3, level="head", bits=BITS))
    able = {name: get_solver(name).can_solve(problem) for name in solver_names()}
    for name in ("uniform", "pyramid", "adaptive_head", "proportional", "head_classes"):
        assert "use dp, lagrangian or ilp" in str(able[name]), name
        with pytest.raises(SolverError, match="no bits"):
            solve(make_bits(), budget=0.3, bits=BITS, level="head", solver=name)
    for name in ("dp", "lagrangian", "hull", "ilp", "auto"):
        assert able[name] is True, name


@pytest.mark.parametrize("bits", [None, (8, 4)])
def test_a_budget_is_the_same_share_of_a_cache_at_16_bits_in_any_type(bits):
    decided = []
    for dtype_bytes in (2, 4):
        shape = make_shape(n_layers=3, n_kv_heads=2, head_dim=32, dtype_bytes=dtype_bytes)
        scores = make_bits(2, shape=shape)
        decided.append(solve(scores, budget=0.5, level="head", objective="loss", bits=bits))
        text = request_text(decided[-1])
        assert "least predicted loss in 50% of the bytes of a cache at 16 bits, " in text
    assert (decided[0].budgets == decided[1].budgets).all()
    assert decided[0].retained_bytes == decided[1].retained_bytes <= 0.5 * decided[0].full_bytes


def test_sliding_layers_stay_at_16_bits():
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)
    decided = solve(make_bits(shape=shape), budget="20%", bits=(8, 4))
    assert decided.bits[1].tolist() == [16, 16]
    assert int(decided.bits[[0, 2]].max()) < 16
    with pytest.raises(InputError, match="16 there"):
        decided.replace(bits=np.full((3, 2), 8))


def test_constraints_that_compare_budgets_are_refused_with_bits():
    values, costs = [[0.1, 0.5]] * 2, [[2, 3]] * 2
    bits = np.array([[8, 16]] * 2)
    tokens = np.array([[4, 3]] * 2)  # fewer tokens at more bits: dearer all the same
    problem = make_problem(values, costs=costs, tokens=tokens, bits=bits, capacity=5)
    assert problem.bits[np.arange(2), [0, 1]].tolist() == [8, 16]  # type: ignore[index]
    with pytest.raises(InputError, match="compares budgets in tokens"):
        dataclasses.replace(problem, constraints=(MaxDistinct(maximum=1),))
    with pytest.raises(InputError, match="tokens must be >= 0 and rise"):
        make_problem(values, costs=costs, tokens=tokens, capacity=5)
    with pytest.raises(InputError, match="bits are int64 shaped"):
        make_problem(values, costs=costs, tokens=tokens, bits=bits[:1], capacity=5)


IN_BITS = {"objective": "loss", "bits": BITS}


def _losses_by_hand(scores, layer, head):
    """The loss of a head by tokens and bits, linear between the levels."""
    by_width = scores.losses[:, layer, head].mean(axis=0)  # type: ignore[index]
    levels, tokens = scores.loss_tokens.tolist(), range(5, scores.context_tokens + 1)  # type: ignore[union-attr]
    rows = [np.interp(tokens, levels, one) for one in by_width]
    return {
        (n, bits): float(row[at])
        for bits, row in zip(BITS, rows, strict=True)
        for at, n in enumerate(tokens)
    }


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.floats(0.1, 0.95), st.booleans())
def test_exact_solvers_find_the_least_loss_of_entries_and_bits(seed, share, dear):
    """By brute force over all products of tokens and bits, with losses read off by hand."""
    shape = make_shape(n_layers=2, n_kv_heads=1, head_dim=32)
    scores = make_bits(seed, shape=shape, context_tokens=22)
    each = [_losses_by_hand(scores, layer, 0) for layer in range(2)]
    every = [(_cost(*option, shape), option) for option in each[0]]
    pairs = itertools.product(every, repeat=2)
    found = [(a[0] + b[0], each[0][a[1]] + each[1][b[1]]) for a, b in pairs]
    if dear:
        least, maximum = min(loss for _, loss in found), max(loss for _, loss in found)
        limit = max(0.0, least) + share * (maximum - least)
        best = min(cost for cost, loss in found if loss <= limit + 1e-12)
        request = Request.parse(target_loss=limit, level="head", bits=BITS)
    else:
        room = int(share * 2 * 22 * 2 * shape.head_dim * 2 + 1e-9)  # of all entries at 16 bits
        affordable = [loss for cost, loss in found if cost <= room]
        if not affordable:
            return
        best = -min(affordable)
        request = Request.parse(budget=share, level="head", **IN_BITS)
    problem = formulate(scores, request)
    for name in ("dp", "ilp", "auto"):
        answer = solve_problem(problem, get_solver(name))
        assert answer.objective == pytest.approx(best, abs=1e-12), name
