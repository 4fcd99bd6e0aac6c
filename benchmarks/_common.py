"""What the benchmarks share: calls timed in turns, ratios with their spread, and where it ran."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

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
    return {
        "ratio": middle,
        "ratio_quartile_1": low,
        "ratio_quartile_3": high,
        "rounds": len(ratios),
    }


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
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def describe_where(where: Mapping[str, Any]) -> str:
    """Return `where_it_ran` in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    load = where["load_average"]
    busy = "" if load is None else f", load {load:.1f}"
    return f"{where['date']}: {where['processor']}, {where['cores']} cores{busy}; {versions}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def guarded(name: str, section: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Give the rows of a section; where it fails, one that says so. The next section goes on."""
    try:
        yield from section()
    except Exception as error:  # a benchmark must report whatever can go wrong
        traceback.print_exc()
        reason = " ".join(str(error).split())
        yield {"name": name, "met": False, "error": f"{type(error).__name__}: {reason}"}


def row_met(row: Mapping[str, Any]) -> bool:
    """Return whether the ratio is on the right side of its target; True without one."""
    if row.get("target") is None:
        return True
    least, most = (0.0, row["target"]) if row["at_most"] else (row["target"], float("inf"))
    return bool(least <= row["ratio"] <= most)


def describe(row: Mapping[str, Any]) -> str:
    """Return one line: ratio, spread, target, whether it was met, and what it was made of."""
    if "error" in row:
        return f"{row['name']}: FAILED: {row['error']}"
    if "text" in row:
        return str(row["text"])
    spread = processor = wanted = ""
    if "ratio_quartile_1" in row:
        spread = f" [{row['ratio_quartile_1']:.4g}, {row['ratio_quartile_3']:.4g}]"
    if "processor_ratio" in row:
        processor = f"; processor time {row['processor_ratio']:.4g}"
    if row.get("target") is not None:
        sign, verdict = "<=" if row["at_most"] else ">=", "met" if row["met"] else "MISSED"
        wanted = f" (wanted {sign} {row['target']:g}) {verdict}"
    return f"{row['name']}: {row['ratio']:.4g}{spread}{wanted}{processor}; {row['note']}"


def print_rows(rows: Iterable[Row], arguments: argparse.Namespace, *packages: str) -> int:
    """Print each row as it comes, or all of them as JSON; return 1 where a target was missed."""
    where, found = where_it_ran(*packages), []
    if not arguments.json:
        print(describe_where(where), flush=True)
    for row in rows:
        row.setdefault("met", row_met(row))
        found.append(row)
        if not arguments.json:
            print(describe(row), flush=True)
    if arguments.json:
        print(json.dumps({"rows": found, "where": where}, indent=1))
    return int(not arguments.quick and not all(row["met"] for row in found))


def parser_of(description: str, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser that takes parts of a benchmark, ``--quick`` and ``--json``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="small sizes; targets do not count")
    parser.add_argument("--json", action="store_true")
    return parser


def peak_bytes() -> int:
    """Return the most memory that this process ever had resident, bytes.

    From VmHWM where there is one: `resource` also counts what the parent had before it became
    this process.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
