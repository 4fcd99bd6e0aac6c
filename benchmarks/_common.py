"""Shared code of the benchmarks: interleaved timing, ratios with their spread, machine facts."""

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

from results import Cells

from kvalloc.shape import ModelShape

Row: TypeAlias = dict[str, Any]
InTurns: TypeAlias = Mapping[str, tuple[list[float], list[float]]]
"""Of each thing compared, seconds on the clock and of the processor in each round."""


def in_turns(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1
) -> InTurns:
    """Return the seconds of every call, all of them in each round and in another order every time.

    Compared calls run side by side, as a machine's speed drifts over minutes.
    """
    for _ in range(warm_up):
        for call in calls.values():
            call()
    result: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            wall, processor = time.perf_counter(), time.process_time()
            calls[name]()
            result[name][0].append(time.perf_counter() - wall)
            result[name][1].append(time.process_time() - processor)
    return result


def ratio_of(result: InTurns, name: str, reference: str) -> Row:
    """Return median and quartiles of the ratios of each round; the median in processor time too."""
    clock, processor = (
        [a / b for a, b in zip(result[name][kind], result[reference][kind], strict=True)]
        for kind in range(2)
    )
    return spread_of(clock) | {"processor_ratio": statistics.median(processor)}


def spread_of(ratios: list[float]) -> Row:
    """Return the median and the quartiles of the rounds' ratios."""
    low, middle, high = quartiles(ratios)
    return {"figure": middle, "low": low, "high": high, "rounds": len(ratios)}


def median_of(result: InTurns, name: str) -> float:
    """Return the median of a call's seconds on the clock."""
    return statistics.median(result[name][0])


def quartiles(figures: list[float]) -> tuple[float, float, float]:
    """Return lower quartile, median, upper quartile; the number itself where there is only one."""
    if len(figures) < 2:
        return figures[0], figures[0], figures[0]
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return low, middle, high


def where_it_ran(*packages: str, load: float = 0.0) -> dict[str, Any]:
    """Return date, machine and versions; the load is that of now or one given, if larger."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    load = max(load, os.getloadavg()[0])
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{_processor()}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}",
        "versions": versions,
    }


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
    except Exception as error:  # a benchmark reports every failure
        traceback.print_exc()
        reason = " ".join(str(error).split())
        yield {"name": name, "error": f"{type(error).__name__}: {reason}"}


def row_met(row: Mapping[str, Any]) -> bool:
    """Return whether the figure is within its limits; True without one."""
    return bool(row.get("at_least", -math.inf) <= row["figure"] <= row.get("at_most", math.inf))


def cells_of(row: Mapping[str, Any]) -> Cells:
    """Return the cells of a row: figure, spread, limit, whether it was met, and a note."""
    if "error" in row:
        failed = {"figure": "FAILED", "wanted": "a figure", "verdict": "MISSED"}
        return {"what": row["name"], **failed, "note": row["error"]}
    cells = {"what": row["name"], "figure": f"{row['figure']:.4g}"}
    if "unit" in row:
        cells["unit"] = row["unit"]
    if "low" in row:
        cells |= {"low": f"{row['low']:.4g}", "high": f"{row['high']:.4g}"}
    for name, sign in {"at_most": "<=", "at_least": ">="}.items():
        if name in row:
            met = row.get("met", row_met(row))
            wanted = ", ".join(filter(None, (f"{sign} {row[name]:g}", row.get("where"))))
            cells |= {"wanted": wanted, "verdict": "met" if met else "MISSED"}
    processor = row.get("processor_ratio")
    phrase = "" if processor is None else f"processor time {processor:.4g}; "
    return {**cells, "note": phrase + row["note"]}


def print_row(cells: Cells) -> None:
    """Print a row as the line of JSON that record.py keeps."""
    print(json.dumps(cells, ensure_ascii=False), flush=True)


def print_rows(rows: Iterable[Row], arguments: argparse.Namespace, *packages: str) -> int:
    """Print each row as it comes; return 1 where a target was missed.

    A row is numbers for `cells_of`, cells under ``"what"``, or lines under ``"text"``.
    """
    print(where_it_ran(*packages), flush=True)
    missed = False
    for row in rows:
        if "text" in row:
            print(row["text"], flush=True)
            missed |= not row["met"]
            continue
        cells = row if "what" in row else cells_of(row)
        print_row(cells)
        missed |= cells.get("verdict") == "MISSED"
    return int(missed and not arguments.quick)


def parser_of(description: str, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Return a parser that takes parts of a benchmark and ``--quick``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if parts:
        parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; targets do not count")
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
