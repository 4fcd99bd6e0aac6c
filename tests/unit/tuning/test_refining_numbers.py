"""What refining computes without a model: splits, scales, shrinkage, corrected curves."""

from itertools import product

import numpy as np
import pytest
from factories import make_losses
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.allocation.formulation import formulate
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError
from kvalloc.tuning.correction import corrected, most_undecided, moved, neighbours, region
from kvalloc.tuning.shrinking import pooled, shrink, shrink_by_folds
from kvalloc.tuning.tasks import (
    comparable_scales,
    folds,
    interval,
    prompt_weights,
    split_prompts,
)

TASKS = st.lists(st.sampled_from(["needle", "prose", "code"]), min_size=4, max_size=30)


def make_problem(seed=0, level="head"):
    scores = make_losses(seed=seed)
    return formulate(scores, Request.parse(budget=0.5, level=level, objective="loss"))


@given(TASKS, st.floats(0.1, 0.49), st.integers(0, 99))
def test_a_split_takes_its_share_of_every_task(tasks, share, seed):
    counts = {task: tasks.count(task) for task in sorted(set(tasks))}
    pairs = [task for task, count in counts.items() if count == 2]
    if max(counts.values()) < 3 and len(pairs) < 2:
        with pytest.raises(InputError, match="none can be held out"):
            split_prompts(tasks, held_out_share=share, seed=seed)
        return
    split = split_prompts(tasks, held_out_share=share, seed=seed)
    sides = (split.learn, split.choose, split.report)
    assert sorted(one for side in sides for one in side.prompts) == list(range(len(tasks)))
    for side in sides:
        assert side.tasks == tuple(tasks[place] for place in side.prompts)
    for task, count in counts.items():
        wanted = min((count - 1) // 2, max(1, round(share * count)))
        held = tuple(side.tasks.count(task) for side in sides[1:])
        if count == 2:
            assert held == ((1, 0), (0, 1))[pairs.index(task) % 2]
        else:
            assert held == (wanted, wanted)
    again = split_prompts(tasks, held_out_share=share, seed=seed)
    assert np.array_equal(again.report.prompts, split.report.prompts)


@given(st.integers(0, 999), st.integers(2, 9))
def test_all_sides_get_their_share_of_the_prompts_that_lose_most(seed, n):
    random = np.random.default_rng(seed)
    losses = random.permutation(np.r_[random.random(3 * n), 100 + random.random(n)])
    split = split_prompts(["a"] * (4 * n), losses, seed=seed)
    for side in (split.choose, split.report):
        assert len(side.prompts) == n
        heavy = (losses[side.prompts] > 100).sum()
        assert n // 4 <= heavy <= -(-n // 4)
        ranks = np.sort(np.argsort(np.argsort(losses))[side.prompts]) // 4
        assert ranks.tolist() == list(range(n))  # one of every four


@pytest.mark.parametrize(
    ("tasks", "share", "said"),
    [
        (["a", "a", "a"], 0.25, "at least 4 prompts.*there are 3"),
        (["a", "b", "c", "d"], 0.25, "no task has three prompts"),
        (["a", "a", "c", "d"], 0.25, "no task has three prompts"),
        (["a"] * 4, 0.5, "not between 0 and 1/2"),
    ],
)
def test_what_cannot_be_split_is_refused(tasks, share, said):
    with pytest.raises(InputError, match=said):
        split_prompts(tasks, held_out_share=share)


@given(TASKS, st.integers(2, 4))
def test_every_prompt_is_left_out_once(tasks, n_folds):
    left_out = []
    for kept, out in folds(tasks, n_folds):
        assert not set(kept) & set(out)
        assert len(kept) + len(out) == len(tasks)
        left_out += out.tolist()
    assert sorted(left_out) == list(range(len(tasks)))


@given(TASKS, st.data())
def test_scales_bring_tasks_nearer_and_keep_the_mean(tasks, data):
    size = len(tasks)
    losses = np.array(data.draw(st.lists(st.floats(1e-2, 3), min_size=size, max_size=size)))
    scales = comparable_scales(tasks, losses)
    names = np.asarray(tasks)
    plain = np.array([losses[names == task].mean() for task in sorted(scales)])
    scaled = plain * [scales[task] for task in sorted(scales)]
    assert scaled.mean() == pytest.approx(plain.mean())
    assert scaled.max() / scaled.min() == pytest.approx((plain.max() / plain.min()) ** 0.5)
    assert prompt_weights(tasks, scales) @ losses == pytest.approx(plain.mean())
    assert prompt_weights(tasks) @ losses == pytest.approx(plain.mean())


def test_tasks_without_loss_are_left_as_they_are():
    assert comparable_scales(["a", "b"], np.zeros(2)) == {"a": 1.0, "b": 1.0}
    scales = comparable_scales(["a", "b"], np.array([0.5, 0.0]))
    assert scales["a"] == pytest.approx(1.0)  # nothing else carries the mean
    assert np.isfinite(scales["b"])


def test_an_interval_draws_prompts_within_their_task():
    # one value a task: every draw is the same, however different the tasks are
    assert interval(["a", "a", "b", "b"], np.array([1.0, 1.0, 3.0, 3.0])) == [2.0, 2.0]
    # of a task with one prompt nobody knows how much its prompts differ
    low, high = interval(["a", "a", "b"], np.array([1.0, 1.0, 3.0]))
    assert (low, high) == (1.0, 3.0)
    assert interval(["a"], np.array([0.5])) == [0.5, 0.5]


def test_the_pooled_curve_by_hand():
    # up: (0.3 + 0.5) / (0.1 + 0.3) = 2; down: -0.2 / -0.4 = 0.5; of two prompts
    changes = np.array([[0.2, 0.6, -0.3], [0.4, 0.4, -0.1]])
    expected = np.array([0.1, 0.3, -0.4])
    np.testing.assert_allclose(pooled(changes, expected), [0.2, 0.6, -0.2])
    # less harm than nothing is no shape: the factor ends at 0
    assert pooled(-changes[:, :2], expected[:2]).tolist() == [0.0, 0.0]


def test_shrinkage_by_hand():
    changes = np.array([[0.2, 0.0], [0.4, 0.2]])
    expected = np.array([0.1, 0.1])
    # mean 0.3 and 0.1, factor 2: pooled 0.2 each; variance 0.02 each, of the mean 0.01; sizes are
    # 0.1 + 0.1, so a spread of 0.5 is a prior variance of 0.01: halfway
    found = shrink(changes, expected, ["a", "a"], 0.5)
    np.testing.assert_allclose(found.mean(axis=0), [0.25, 0.15])
    np.testing.assert_allclose(shrink(changes, expected, ["a", "a"], 0.0), [[0.2, 0.2]] * 2)
    np.testing.assert_allclose(shrink(changes, expected, ["a", "a"], float("inf")), changes)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(0.01, 8))
def test_shrinkage_stays_between_pooled_and_measured(seed, n, spread):
    random = np.random.default_rng(seed)
    expected = random.normal(size=7)
    tasks = ["a"] * n + ["b"] * n
    changes = expected + random.normal(size=(2 * n, 7))
    found = shrink(changes, expected, tasks, spread)
    for rows in (slice(0, n), slice(n, 2 * n)):
        common, mean = pooled(changes[rows], expected), changes[rows].mean(axis=0)
        low, high = np.minimum(common, mean), np.maximum(common, mean)
        got = found[rows].mean(axis=0)
        assert np.all(got >= low - 1e-9)
        assert np.all(got <= high + 1e-9)


def test_folds_choose_little_shrinkage_for_signal_and_much_for_noise():
    random = np.random.default_rng(3)
    expected = random.uniform(0.5, 1.5, size=60)
    tasks = ["a"] * 8
    own = expected * random.uniform(0.2, 2.0, size=60)  # units differ, prompts hardly
    signal = own + 0.01 * random.normal(size=(8, 60))
    noise = expected + 1.0 * random.normal(size=(8, 60))  # units are alike, prompts differ
    of_signal = shrink_by_folds(signal, expected, tasks)
    of_noise = shrink_by_folds(noise, expected, tasks)
    assert of_signal.spread > 0
    np.testing.assert_allclose(of_signal.changes.mean(axis=0), own, atol=0.02)
    assert of_noise.spread <= 0.125
    raw = noise.mean(axis=0)
    shrunk = of_noise.changes.mean(axis=0)
    assert ((shrunk - expected) ** 2).sum() < 0.25 * ((raw - expected) ** 2).sum()


@given(st.integers(0, 50))
@settings(max_examples=25)
def test_neighbours_lie_on_both_sides_where_there_is_room(seed):
    problem = make_problem(seed % 5)
    choice = np.random.default_rng(seed).integers(0, problem.option_counts)
    figures = neighbours(problem, choice)
    for unit, chosen in enumerate(choice.tolist()):
        found = figures.options[figures.units == unit]
        assert (found < chosen).sum() == (chosen > 0)
        assert (found > chosen).sum() == (chosen < problem.last_options[unit])


def test_the_most_undecided_lose_least_at_the_price():
    problem = make_problem()
    choice = problem.last_options // 2
    figures = neighbours(problem, choice)
    price = 1e-6
    few = most_undecided(problem, choice, figures, price, 4)
    assert few.size == 4
    wanted = set(zip(few.units.tolist(), few.options.tolist(), strict=True))

    def lost(unit, option):
        gain = problem.values[unit, choice[unit]] - problem.values[unit, option]
        saved = problem.costs[unit, choice[unit]] - problem.costs[unit, option]
        return float(gain - price * saved)

    every = list(zip(figures.units.tolist(), figures.options.tolist(), strict=True))
    assert max(lost(*pair) for pair in wanted) <= min(
        lost(*pair) for pair in every if pair not in wanted
    )
    assert most_undecided(problem, choice, figures, price, 99) is figures


@given(st.integers(0, 1000), st.floats(0.3, 1.0))
@settings(max_examples=30)
def test_corrected_curves_pass_through_what_was_measured(seed, reach):
    problem = make_problem(seed % 5)
    random = np.random.default_rng(seed)
    choice = random.integers(0, problem.option_counts)
    figures = neighbours(problem, choice)
    changes = random.normal(size=figures.size)
    whole, options = corrected(problem, region(problem, choice, figures), 0.7, changes)
    units = np.arange(problem.n_units)
    at = np.array([row.tolist().index(k) for row, k in zip(options, choice, strict=True)])
    assert whole.objective_value(at) == pytest.approx(-0.7)
    for figure, (unit, option) in enumerate(zip(figures.units, figures.options, strict=True)):
        other = at.copy()
        other[unit] = options[unit].tolist().index(option)
        assert whole.objective_value(other) == pytest.approx(-0.7 - changes[figure])
        assert whole.cost(other) == problem.cost(options[units, other])
    near, _ = corrected(problem, region(problem, choice, figures, reach), 0.7, changes)
    assert near.tokens.min() >= whole.tokens.min()
    assert (near.option_counts <= whole.option_counts).all()
    # no option beyond the measured neighbours
    ends = problem.tokens[figures.units, figures.options]
    for unit in units:
        kept = whole.tokens[unit, : whole.option_counts[unit]]
        mine = [*ends[figures.units == unit], problem.tokens[unit, choice[unit]]]
        assert (kept.min(), kept.max()) == (min(mine), max(mine))


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_moved_curves_hold_what_was_measured_and_keep_their_shape_elsewhere(seed):
    problem = make_problem(seed % 5)
    random = np.random.default_rng(seed)
    choice = random.integers(0, problem.option_counts)
    figures = neighbours(problem, choice)
    changes = random.normal(size=figures.size)
    allowed = region(problem, choice, figures)
    after = moved(problem, allowed, choice, changes)
    units, options = figures.units, figures.options
    risen = after.values[units, options] - after.values[units, choice[units]]
    np.testing.assert_allclose(risen, -changes, atol=1e-12)
    for unit in range(problem.n_units):
        mine = [*options[units == unit], choice[unit]]
        for steps in (slice(0, min(mine) + 1), slice(max(mine), None)):
            np.testing.assert_allclose(
                np.diff(after.values[unit, steps]), np.diff(problem.values[unit, steps]), atol=1e-12
            )


def test_a_corrected_problem_is_solved_within_its_region():
    """The best choice of all that the region allows, by trying them all."""
    scores = make_losses()
    request = Request.parse(budget=0.5, level="layer", page=8, objective="loss")
    problem = formulate(scores, request)
    choice = np.ones(problem.n_units, dtype=np.int64)
    figures = neighbours(problem, choice)
    changes = np.random.default_rng(1).normal(size=figures.size)
    small, options = corrected(problem, region(problem, choice, figures), 1.0, changes)
    from kvalloc.allocation.verification import solve_problem
    from kvalloc.problem.registry import get_solver

    found = solve_problem(small, get_solver("dp"))
    every = product(*(range(count) for count in small.option_counts.tolist()))
    best = max(
        small.objective_value(np.array(one))
        for one in every
        if small.cost(np.array(one)) <= (small.capacity_bytes or 0)
    )
    assert found.value == pytest.approx(best)
    assert problem.cost(options[np.arange(3), found.choice]) == found.cost_bytes
