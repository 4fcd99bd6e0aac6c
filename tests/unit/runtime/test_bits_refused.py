"""The runtime stores entries as the model made them: fewer bits are refused by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from factories import make_budget_profile

from kvalloc.errors import UnsupportedRequestError
from kvalloc.runtime.refusals import check_profile


def test_fewer_bits_than_16_are_refused() -> None:
    profile = make_budget_profile(np.full((3, 2), 20), level="layer", bits=np.full((3, 2), 8))
    with pytest.raises(UnsupportedRequestError, match="entries at 8 bits.*without --bits"):
        check_profile(profile)
    check_profile(dataclasses.replace(profile, bits=np.full((3, 2), 16)))
    check_profile(dataclasses.replace(profile, bits=None))
