"""What every error has in common."""

from __future__ import annotations

import copy
import pickle

import pytest

from kvalloc import errors


class OfAPlugin(errors.SolverError):
    """With arguments of its own, as a plug-in's may have."""

    def __init__(self, *, solver: str) -> None:
        super().__init__(f"{solver} has failed")
        self.solver = solver


KINDS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, errors.KVAllocError)
]


@pytest.mark.parametrize("kind", [*KINDS, OfAPlugin], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy])
def test_an_error_comes_back_from_another_process(kind, again):
    """What a worker raises is sent as a pickle; one that cannot be read ends the whole pool."""
    if kind is errors.ProfileFileError:
        error = kind("p.json", field="bits", found=[3], expected="8", way_out="make it again")
    elif kind is errors.InfeasibleError:
        error = kind("too little", nearest=0.5)
    else:
        error = OfAPlugin(solver="mine") if kind is OfAPlugin else kind("what was wrong")
    result = again(error)
    assert type(result) is kind
    assert (str(result), result.args, vars(result)) == (str(error), error.args, vars(error))
