"""Families and precisions against the oracle, on a GPU."""

import pytest
from test_against_oracle import *  # noqa: F403  its tests

pytestmark = pytest.mark.gpu
