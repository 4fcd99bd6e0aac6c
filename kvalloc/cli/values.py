"""Names that the shell completes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name


def _shipped(*kinds: str) -> list[str]:
    from kvalloc.formats import shipped_profiles as shipped

    return [name for kind in kinds for name in getattr(shipped, f"shipped_{kind}")()]


def _plugins(*groups: str) -> list[str]:
    from kvalloc.problem import registry

    return [name for group in groups for name in registry.names(f"kvalloc.{group}")]


def _keys(table: str) -> list[str]:
    return [*resolve_name(table)]


NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "model": lambda: ["demo"],
    **dict.fromkeys(("profile", "first", "second"), partial(_shipped, "profiles")),
    "scores": partial(_shipped, "scores"),
    **dict.fromkeys(("file", "files"), partial(_shipped, "scores", "profiles")),
    "fitted": partial(_shipped, "fitted"),
    "solver": partial(_plugins, "solvers"),
    "scorer": partial(_plugins, "scorers"),
    "policy": partial(_plugins, "policies", "scorers"),
    "tasks": partial(_keys, "kvalloc.prompts.tasks:TASKS"),
    "metric": partial(_keys, "kvalloc.prompts.metrics:METRICS"),
    "to": partial(_keys, "kvalloc.interop.exporting:TARGETS"),
    "dtype": lambda: ["float32", "bfloat16", "float16"],
}
"""What there is of each kind, by the parameter that takes its name; nothing loads torch."""
