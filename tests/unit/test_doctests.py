"""If it is shown, it runs: the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvalloc

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(kvalloc.__path__, "kvalloc.")
    if not module.ispkg and not module.name.endswith(("__main__", "._cpu"))  # C, for ctypes
)

NEEDS = {"kvalloc.runtime.attention.triton": "triton", "kvalloc.interop.lm_eval": "lm_eval"}
"""Modules of an extra that the test environment may lack."""


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = doctest.testmod(
        importlib.import_module(name),
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples in {name} fail"
