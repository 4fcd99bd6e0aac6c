"""How many entries stay of what competes, whatever is there."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from factories import make_shape

from kvalloc.accounting.costs import BIT_WIDTHS, head_bytes, within_bytes
from kvalloc.runtime.following import Followed, Settling

SINKS, HEADS = 2, 2


@st.composite
def layers(draw: st.DrawFn, window: int) -> dict[int, Followed]:
    """Layers of some rows; what was kept is within the budgets of the tokens before."""
    rows = draw(st.integers(1, 3))
    new = np.array(draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows)))
    size = {"min_size": rows * HEADS, "max_size": rows * HEADS}
    found = {}
    for layer in range(draw(st.integers(1, 3))):
        kept = np.array(draw(st.lists(st.integers(SINKS + window, 60), **size)))
        kept = kept.reshape(rows, HEADS)
        if draw(st.booleans()):  # some rows are whole
            kept[draw(st.integers(0, rows - 1))] = 60
        more = np.array(draw(st.lists(st.integers(0, 40), **size))).reshape(rows, HEADS)
        budgets = kept + np.minimum(more, new[:, None])
        found[layer] = Followed(budgets=budgets, kept=kept, new=new, idle=new == 0, tokens=60 + new)
    return found


@given(data=st.data())
def test_targets_are_within_the_room_and_the_newest_window_stays(data: st.DataObject) -> None:
    window = data.draw(st.integers(1, 6), label="window")
    followed = data.draw(layers(window), label="layers")
    rows = len(followed[0].new)
    shared = data.draw(st.booleans(), label="shared")
    flags = st.lists(st.booleans(), min_size=rows, max_size=rows)
    everything = np.array(data.draw(flags, label="all compete"))

    def settled(layers: dict[int, Followed], all_compete: object) -> Settling:
        return Settling.of(
            layers,
            shared=shared,
            all_compete=all_compete,
            window=window,
            protected=SINKS + window,
        )

    settling = settled(followed, everything)
    alone = settling.new_alone
    assert not (everything & alone).any()
    assert settling.targets.keys() == followed.keys()
    stored = {
        index: own + followed[index].kept * alone[:, None]
        for index, own in settling.targets.items()
    }
    for row in range(rows):
        own = {
            index: Followed(
                **{name.name: getattr(one, name.name)[row : row + 1] for name in fields(one)}
            )
            for index, one in followed.items()
        }
        by_itself = settled(own, everything[row : row + 1])
        assert by_itself.new_alone == alone[row]
        for index, target in by_itself.targets.items():
            assert (target == settling.targets[index][row]).all()
        granted = sum(one.budgets.sum() for one in own.values())
        assert sum(stored[index][row].sum() for index in own) <= granted
    for index, one in followed.items():
        target = settling.targets[index]
        there = np.where(alone[:, None], one.new[:, None] + 0 * target, one.there)
        assert (target[one.idle] == there[one.idle]).all()
        if shared:
            continue
        assert (stored[index] <= one.budgets).all()
        assert (target <= there).all()
        least = np.where(alone, window, SINKS + window)[:, None]
        assert (target >= np.minimum(there, least)).all()


@given(
    budgets=st.lists(st.integers(0, 500), min_size=4, max_size=4),
    bits=st.lists(st.sampled_from(BIT_WIDTHS), min_size=2, max_size=2),
    most=st.integers(0, 2**18),
    least=st.integers(0, 20),
    biased=st.booleans(),
)
def test_budgets_within_bytes_are_the_largest_of_one_factor(
    budgets: list[int], bits: list[int], most: int, least: int, biased: bool
) -> None:
    shape = make_shape(n_layers=2, n_kv_heads=2)
    table, widths = np.array(budgets).reshape(2, 2), np.array(bits)[:, None]
    found = within_bytes(table, most, widths, shape, least=least, biased=biased)

    def taken(numbers: np.ndarray) -> int:
        return int(head_bytes(numbers, widths, shape, biased=biased).sum())

    floor, whole = np.minimum(table, least), max(*budgets, 1)
    every = [np.maximum(table * part // whole, floor) for part in range(whole + 1)]
    fit = [own for own in every if taken(own) <= most]
    assert (found == (fit[-1] if fit else floor)).all()
