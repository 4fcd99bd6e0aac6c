"""The ten failures of other runtimes, on a GPU."""

import pytest
from test_failures_of_peers import *  # noqa: F403  its tests and fixtures

pytestmark = pytest.mark.gpu
