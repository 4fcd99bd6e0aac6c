"""Groups of layers: how they are read, what they may be, and what a profile must hold of them."""

import re

import pytest
from factories import make_scores, make_shared_scores

from kvalloc.errors import InputError
from kvalloc.formats.sharing_groups import (
    groups_fault,
    groups_text,
    parse_groups,
    runs_of,
    segments_of,
)


def test_text_and_back():
    groups = ((2, 3), (4, 5, 6))
    assert parse_groups(groups_text(groups)) == groups
    assert segments_of(range(8), groups) == ((0,), (1,), (2, 3), (4, 5, 6), (7,))


@pytest.mark.parametrize(
    ("groups", "fault"),
    [
        (((2, 4),), "not a run"),
        (((2,),), "not a run"),
        (((1, 2),), "first two layers"),
        (((4, 5),), "layer 5 .* no full attention"),
        (((2, 3), (3, 4)), "not after"),
    ],
)
def test_what_groups_may_not_be(groups, fault):
    full = [0, 1, 2, 3, 4]
    found = groups_fault(groups, full)
    assert re.search(fault, found)
    assert groups_fault(((2, 3),), full) is None


def test_runs_pass_over_layers_without_full_attention():
    assert runs_of([0, 1, 2, 4, 5], 4).tolist() == [[4, 2]]
    assert runs_of([0, 1, 2], 4).tolist() == []


def test_asking_for_what_was_not_measured():
    scores = make_shared_scores(longest=2)
    with pytest.raises(InputError, match="share_length=3"):
        scores.shared_contributions((2, 3, 4))
    with pytest.raises(InputError, match="share_length=2"):
        make_scores().shared_contributions((2, 3))
    with pytest.raises(InputError, match="at most 4 layers"):
        scores.shared_contributions((2, 3, 4, 5, 6))
