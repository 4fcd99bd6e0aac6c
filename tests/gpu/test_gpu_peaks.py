"""What each mode of eviction promises at its peak, on the kernels of a GPU."""

import pytest
from test_peaks import *  # noqa: F403  its tests

pytestmark = pytest.mark.gpu
