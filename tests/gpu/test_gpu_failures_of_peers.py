"""Test what other runtimes get wrong, on a GPU."""

import pytest
from test_failures_of_peers import *  # noqa: F403  its tests and fixtures

pytestmark = pytest.mark.gpu
