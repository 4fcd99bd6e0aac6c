"""The table of options that exclude each other."""

from __future__ import annotations

import pytest

from kvalloc.errors import InputError, naming_flags
from kvalloc.online import conflicts
from kvalloc.online.conflicts import CONFLICTS, Conflict, check_conflicts


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.given[0])
def test_a_row_refuses_each_of_its_options(
    monkeypatch: pytest.MonkeyPatch, conflict: Conflict
) -> None:
    monkeypatch.setattr(conflicts, "CONFLICTS", (conflict,))
    for first in conflict.given:
        flag = f"--{first.replace('_', '-')}"
        for other in conflict.beside:
            with naming_flags(), pytest.raises(InputError, match=flag):
                check_conflicts([first, other])
        if conflict.without:
            with naming_flags(), pytest.raises(InputError, match=flag):
                check_conflicts([first])
        check_conflicts([first, *conflict.without[:1]])
    check_conflicts([*conflict.beside, *conflict.without])


def test_options_are_named_as_the_reader_writes_them() -> None:
    with pytest.raises(InputError, match="^seed draws an answer, and without temperature none"):
        check_conflicts(["seed"])
    with naming_flags(), pytest.raises(InputError, match="^--seed .* without --temperature none"):
        check_conflicts(["seed"])
    with pytest.raises(InputError, match="^solver says .* such as budget='20%'"):
        check_conflicts(["solver"])


def test_what_goes_together_is_let_through() -> None:
    check_conflicts(["budget", "memory", "fitted", "decode_every"])
    check_conflicts(["profile", "policy", "allow_other_model", "save_cache", "decode_every"])
    check_conflicts(["target_retention", "solver", "level", "scorer", "policy"])
    check_conflicts([])
