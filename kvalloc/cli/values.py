"""Names that the shell completes, and the folder of ``--output-dir``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from kvalloc.errors import InputError


def _shipped(*kinds: str) -> list[str]:
    from kvalloc.formats import shipped_profiles as shipped

    return [name for kind in kinds for name in getattr(shipped, f"shipped_{kind}")()]


def _plugins(*groups: str) -> list[str]:
    from kvalloc.problem import registry

    return [name for group in groups for name in registry.names(f"kvalloc.{group}")]


def _keys(table: str) -> list[str]:
    return [*resolve_name(table)]


_PICKING = partial(_plugins, "policies", "scorers")
NAMES: dict[str, Callable[[], Sequence[str]]] = {
    "model": lambda: ["demo"],
    **dict.fromkeys(("profile", "first", "second"), partial(_shipped, "profiles")),
    "scores": partial(_shipped, "scores"),
    **dict.fromkeys(("file", "files"), partial(_shipped, "scores", "profiles")),
    "fitted": partial(_shipped, "surrogates"),
    "solver": partial(_plugins, "solvers"),
    "scorer": partial(_plugins, "scorers"),
    **dict.fromkeys(("policy", "policies", "loss_policies"), _PICKING),
    "tasks": partial(_keys, "kvalloc.prompts.tasks:TASKS"),
    "metric": partial(_keys, "kvalloc.prompts.metrics:METRICS"),
    "to": partial(_keys, "kvalloc.interop.exporting:TARGETS"),
    "dtype": lambda: ["float32", "bfloat16", "float16"],
}
"""What there is of each kind, by the parameter that takes its name; nothing loads torch."""


def make_folder(folder: Path) -> None:
    """Make the folder of an output where there is none.

    Raises
    ------
    InputError
        If it is a file, or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder} is a file; name a folder") from None
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error
