"""Groups of layers: how they are read, what they may be, and what a profile must hold of them."""

import numpy as np
import pytest
from factories import make_scores, make_shared_scores

from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.sharing_groups import (
    groups_fault,
    groups_text,
    parse_groups,
    runs_of,
    segments_of,
)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("14", 14),
        (14, 14),
        ("2-3", ((2, 3),)),
        (" 2-3 , 4-7 ", ((2, 3), (4, 5, 6, 7))),
        ([(2, 3), [4, 5]], ((2, 3), (4, 5))),
        ((), ()),
    ],
)
def test_how_groups_are_read(given, read):
    assert parse_groups(given) == read


@pytest.mark.parametrize("given", ["", "2", "a-b", "2-3;4-5", [2, 3], 1.5, True, "0", None])
def test_what_cannot_be_read(given):
    if given == "2":
        assert parse_groups(given) == 2
        return
    with pytest.raises(InputError):
        parse_groups(given)


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
    assert found is not None
    import re

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


def changed(scores, change):
    curves = scores.shared_curves.copy()
    change(curves)
    return {"shared_curves": curves}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda s: {"shared_runs": None}, "only one of them"),
        (lambda s: {"shared_runs": s.shared_runs.astype(np.int32)}, "int32"),
        (lambda s: {"shared_runs": s.shared_runs + [[-1, 0]]}, "runs of 2 to 4"),
        (lambda s: {"shared_runs": s.shared_runs[:1].repeat(7, axis=0)}, "twice"),
        (lambda s: {"shared_curves": s.shared_curves[:, :-1].copy()}, "shared_curves"),
        (lambda s: changed(s, lambda c: c.fill(np.nan)), "not finite"),
        (lambda s: changed(s, lambda c: c.__imul__(1.2)), "no more than the layers keep apart"),
        (lambda s: changed(s, lambda c: c.__imul__(0.9)), "not whole"),
        (lambda s: changed(s, lambda c: c[0, 0, 0].__setitem__(5, 0.0)), "not rising and concave"),
    ],
)
def test_shared_curves_that_cannot_be_are_refused(changes, message):
    scores = make_shared_scores()
    with pytest.raises(InputError, match=message):
        scores.replace(**changes(scores))


def test_the_file_holds_them_and_notices_edits(tmp_path):
    scores = make_shared_scores()
    scores.save(tmp_path / "s.safetensors")
    again = ScoreProfile.load(tmp_path / "s.safetensors")
    assert np.array_equal(again.shared_curves, scores.shared_curves)
    with pytest.raises(ValueError, match="read-only"):
        again.shared_curves[0, 0, 0, 0] = 1.0
    data = bytearray((tmp_path / "s.safetensors").read_bytes())
    data[-9] ^= 1
    (tmp_path / "t.safetensors").write_bytes(bytes(data))
    with pytest.raises(ProfileFileError):
        ScoreProfile.load(tmp_path / "t.safetensors")
    without = scores.replace(shared_runs=None, shared_curves=None)
    assert without.digest != scores.digest
