"""Any way in which tokens can arrive, on a GPU."""

import pytest
from test_arrivals import *  # noqa: F403  its tests

pytestmark = pytest.mark.gpu
