"""What the benchmarks share: calls timed in turns, ratios with their spread, and where it ran."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from kvalloc.shape import ModelShape

Row: TypeAlias = dict[str, Any]
InTurns: TypeAlias = Mapping[str, tuple[list[float], list[float]]]
"""Of each thing compared, seconds on the clock and of the processor in each round."""


def in_turns(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1
) -> InTurns:
    """Return the seconds of every call, all of them in each round and in another order every time.

    A machine slows down and speeds up over minutes: what is compared runs side by side.
    """
    for _ in range(warm_up):
        for call in calls.values():
            call()
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            wall, processor = time.perf_counter(), time.process_time()
            calls[name]()
            found[name][0].append(time.perf_counter() - wall)
            found[name][1].append(time.process_time() - processor)
    return found


def ratio_of(found: InTurns, name: str, reference: str) -> Row:
    """Return median and quartiles of the ratios of each round; the median in processor time too."""
    clock, processor = (
        [a / b for a, b in zip(found[name][kind], found[reference][kind], strict=True)]
        for kind in range(2)
    )
    return spread_of(clock) | {"processor_ratio": statistics.median(processor)}


def spread_of(ratios: list[float]) -> Row:
    """Return the median and the quartiles of the rounds' ratios."""
    low, middle, high = quartiles(ratios)
    return {"figure": middle, "low": low, "high": high, "rounds": len(ratios)}


def median_of(found: InTurns, name: str) -> float:
    """Return the median of a call's seconds on the clock."""
    return statistics.median(found[name][0])


def quartiles(numbers: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median, upper quartile; the number itself where there is only one."""
    if len(numbers) < 2:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def where_it_ran(*packages: str) -> dict[str, Any]:
    """Return the machine in words, versions, date and load."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def describe_where(where: Mapping[str, Any]) -> str:
    """Return `where_it_ran` in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    machine = f"{where['processor']}, {where['cores']} cores, load {where['load_average']:.1f}"
    return f"{where['date']}: {machine}; {versions}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def guarded(name: str, section: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Give the rows of a section; where it fails, one that says so. The next section goes on."""
    try:
        yield from section()
    except Exception as error:  # a benchmark must report whatever can go wrong
        traceback.print_exc()
        reason = " ".join(str(error).split())
        yield {"name": name, "met": False, "error": f"{type(error).__name__}: {reason}"}


def row_met(row: Mapping[str, Any]) -> bool:
    """Return whether the figure is within its limits; True without one."""
    return bool(row.get("at_least", -math.inf) <= row["figure"] <= row.get("at_most", math.inf))


def describe(row: Mapping[str, Any]) -> str:
    """Return one line: figure, spread, limit, whether it was met, and what it was made of."""
    if "error" in row:
        return f"{row['name']}: FAILED: {row['error']}"
    if "text" in row:
        return str(row["text"])
    unit = f" {row['unit']}" if "unit" in row else ""
    spread = f" [{row['low']:.4g}, {row['high']:.4g}]" if "low" in row else ""
    wanted = processor = ""
    for name, sign in {"at_most": "<=", "at_least": ">="}.items():
        if name in row:
            wanted = f" (wanted {sign} {row[name]:g}) {'met' if row['met'] else 'MISSED'}"
    if "processor_ratio" in row:
        processor = f"; processor time {row['processor_ratio']:.4g}"
    return f"{row['name']}: {row['figure']:.4g}{unit}{spread}{wanted}{processor}; {row['note']}"


def print_rows(rows: Iterable[Row], arguments: argparse.Namespace, *packages: str) -> int:
    """Print each row as it comes, or all of them as JSON; return 1 where a target was missed."""
    where, found = where_it_ran(*packages), []
    if not arguments.json:
        print(describe_where(where), flush=True)
    for row in rows:
        if "met" not in row:  # lines of text and failures have no figure
            row["met"] = row_met(row)
        found.append(row)
        if not arguments.json:
            print(describe(row), flush=True)
    if arguments.json:
        print(json.dumps({"rows": found, "where": where}, indent=1))
    return int(not arguments.quick and not all(row["met"] for row in found))


def parser_of(description: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser that takes parts of a benchmark, ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if parts:
        parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; targets do not count")
    parser.add_argument("--json", action="store_true")
    return parser


def in_fresh_process(*words: str, **environment: str) -> Any:
    """Return what another Python prints as JSON."""
    command = [sys.executable, *words]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    return json.loads(done.stdout)


def memory_bytes(field: str) -> int:
    """Return the resident memory of this process: ``VmRSS`` now, ``VmHWM`` at most (Linux).

    `resource` also counts what the parent had before it became this process.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Begin to count the peak of the resident memory here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def made_up_shape(n_layers: int, n_kv_heads: int, dtype_bytes: int = 2) -> ModelShape:
    """Return a shape of full-attention layers with 64 numbers a head."""
    return ModelShape(
        model_id="made-up",
        n_layers=n_layers,
        n_query_heads=3 * n_kv_heads,
        n_kv_heads=n_kv_heads,
        head_dim=64,
        dtype_bytes=dtype_bytes,
        layer_types=("full",) * n_layers,
    )
