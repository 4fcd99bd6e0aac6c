"""What the runtime knows of rows of different lengths, against loops over lists of numbers."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.door import Door
from kvalloc.runtime.notes import Queries
from kvalloc.runtime.tail import Tail

NUMBERS = itertools.count(1)


def chosen_rows(draw, rows):
    """Rows to go on with, and what they have."""
    places = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    return torch.tensor(places), [list(rows[place]) for place in places]


def lengths_of(draw, most):
    """A number for each row, up to its own."""
    found = [each if draw(st.booleans()) else draw(st.integers(0, each)) for each in most]
    return np.array(found, dtype=np.int64)


def new_tokens(draw, n_rows):
    """Numbers of each row, and the same as states, (rows, 2, n, 1), with others in front."""
    n_new = draw(st.sampled_from([1, 1, 2, 5, 70]))
    lengths = lengths_of(draw, [n_new] * n_rows)
    tokens = [[next(NUMBERS) for _ in range(length)] for length in lengths]
    states = torch.tensor([[-1.0] * (n_new - len(own)) + own for own in tokens])
    return tokens, lengths, states[:, None, :, None].expand(-1, 2, -1, 1)


def same_numbers(states, expected):
    numbers = torch.tensor(expected, dtype=torch.float32)[None, None, :, None]
    return torch.equal(states, numbers.expand(1, 2, -1, states.shape[3]))


@given(st.data())
def test_tails_and_queries_are_of_the_latest_tokens_of_each_row(data):
    """Of queries at least those that are asked for, and of a row alone not many more."""
    draw, queries = data.draw, Queries()
    rows = [[] for _ in range(draw(st.integers(1, 3)))]
    noted = np.zeros(len(rows), dtype=np.int64)  # queries, at least
    empty = [torch.empty(len(rows), 2, 0, dim) for dim in (1, 3)]
    tail = Tail(*empty, noted.copy())
    steps = st.sampled_from(["add", "add", "add", "trim", "cut", "forget", "select"])
    for step in draw(st.lists(steps)):
        most = draw(st.sampled_from([0, 1, 3, 8, 100]))
        if step == "add":
            tokens, lengths, states = new_tokens(draw, len(rows))
            interval = draw(st.sampled_from([1, 9, 200]))
            tail.add((states, states.expand(-1, -1, -1, 3)), lengths, interval=interval)
            queries.note(states, lengths, most)
            rows = [row + own for row, own in zip(rows, tokens, strict=True)]
            noted = np.minimum(noted + lengths, most)
        elif step == "trim":
            queries.trim(most)
            noted = np.minimum(noted, most)
            assert queries.buffers[0].shape[2] <= most or queries.tokens < most
        elif step == "cut":
            gone = lengths_of(draw, [len(row) for row in rows])
            for latest in (tail, queries):
                latest.cut(gone)
            rows = [row[: len(row) - count] for row, count in zip(rows, gone, strict=True)]
            noted = np.maximum(noted - gone, 0)
        elif step == "forget":
            own = np.array(sorted(draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))))
            for latest in (tail, queries):
                latest.forget(own)
            rows = [[] if place in own else row for place, row in enumerate(rows)]
            noted[own] = 0
        else:
            places, rows = chosen_rows(draw, rows)
            for latest in (tail, queries):
                latest.select(places)
            noted = noted[places.numpy()]
        check_tail(tail, rows)
        assert (noted <= queries.lengths).all()
        for place, row in enumerate(rows if queries.tokens else ()):
            count = int(queries.lengths[place])
            for wanted in (min(count, most), count):
                (found,) = queries.of(np.array([place]), wanted)
                assert same_numbers(found, row[len(row) - wanted :])


def test_what_is_before_forgotten_queries_is_forgotten_too():
    queries = Queries()
    queries.note(torch.randn(2, 1, 1, 1), np.array([1, 1]), 3)
    queries.note(torch.randn(2, 1, 5, 1), np.array([5, 1]), 3)
    assert queries.lengths.tolist() == [3, 2]


def check_tail(tail, rows):
    assert tail.lengths.tolist() == [len(row) for row in rows]
    starts = [tail.tokens - len(row) for row in rows]
    assert (tail.starts is None) == (not any(starts))
    assert tail.starts is None or tail.starts.tolist() == starts
    for place, row in enumerate(rows):
        found = (
            *tail.of(np.array([place])),
            *(own[[place], :, starts[place] :] for own in tail.states),
        )
        assert all(same_numbers(states, row) for states in found)
    assert tail.has_room == (tail.buffers[0].shape[2] > tail.tokens)
    assert all(buffer.is_contiguous() for buffer in tail.buffers)


def new_columns(draw, rows):
    """Which new columns each row has, and a mask that says so, or none."""
    n_new = draw(st.integers(1, 6))
    if draw(st.booleans()):
        return [[True] * n_new for _ in rows], None
    each = st.lists(st.booleans(), min_size=n_new, max_size=n_new)
    new = [draw(each) for _ in rows]
    return new, torch.tensor([row + own for row, own in zip(rows, new, strict=True)]).long()


@given(st.data(), st.sampled_from([None, 8]))
def test_the_door_knows_which_columns_are_tokens_of_each_row(data, announced):
    draw, door = data.draw, Door(announced)
    rows, complete = [[] for _ in range(draw(st.integers(1, 3)))], False
    for step in draw(st.lists(st.sampled_from(["enter", "enter", "abandon", "crop", "select"]))):
        seen = len(rows[0])
        if step == "crop":
            end = draw(st.integers(0, seen))
            door.crop(end)
            rows = [row[:end] for row in rows]
            continue
        if step == "select":
            places, rows = chosen_rows(draw, rows)
            door.select(places)
            continue
        new, mask = new_columns(draw, rows)
        n_new, in_prompt = len(new[0]), not complete or not seen
        if in_prompt and announced is not None and seen + n_new > announced:
            with pytest.raises(UnsupportedRequestError, match="made for a prompt of 8 tokens"):
                door.enter((len(rows), n_new), seen, mask)
            continue
        if mask is not None and seen:
            other = mask.clone()
            other[-1, draw(st.integers(0, seen - 1))] ^= 1
            with pytest.raises(UnsupportedRequestError, match="other tokens of the past"):
                door.enter((len(rows), n_new), seen, other)
        batch = door.enter((len(rows), n_new), seen, mask)
        assert batch.lengths.tolist() == [sum(own) for own in new]
        assert batch.follows == (not in_prompt)
        assert batch.completes == (in_prompt and announced in (None, seen + n_new))
        states = torch.arange(n_new).expand(len(rows), 1, -1)[..., None]
        ordered = batch.aligned(states)
        for own, columns in zip(new, ordered, strict=True):
            shown = [place for place in range(n_new) if own[place]]
            assert columns[0, n_new - len(shown) :, 0].tolist() == shown
        assert torch.equal(batch.in_columns(ordered.transpose(1, 2)), states.transpose(1, 2))
        if step == "abandon":
            door.abandon()
        else:
            door.commit(batch)
            complete = batch.completes or not in_prompt
            rows = [row + own for row, own in zip(rows, new, strict=True)]
            assert door.tokens(batch).tolist() == [sum(row) for row in rows]
            assert door.complete == complete
        check_columns(door, rows)


def check_columns(door, rows):
    assert (door.visible is None) == all(map(all, rows))
    assert door.visible is None or door.visible.tolist() == rows
    every, half = torch.arange(len(rows[0])), len(rows[0]) // 2
    for place, row in enumerate(rows):
        tokens = [column for column, shown in enumerate(row) if shown]
        assert every[door.columns(place)].tolist() == tokens
        assert door.in_columns(place, torch.arange(len(tokens))).tolist() == tokens
        assert door.count(place, half) == sum(row[:half])
        assert (door.place(place) == door.place(0)) == (row == rows[0])
