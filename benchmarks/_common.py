"""What the benchmarks share: calls timed in turns, medians with spread, and where it ran."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any


def timed_in_turns(
    calls: Mapping[str, Callable[[], object]], *, repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of every call, all of them in each round and in another order every time.

    A machine slows down and speeds up over minutes: what is compared runs side by side.
    """
    for _ in range(warm_up):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, quartiles and extremes, in seconds."""
    low, _, high = quartiles(seconds)
    return {
        "median_seconds": statistics.median(seconds),
        "quartile_1_seconds": low,
        "quartile_3_seconds": high,
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
    }


def ratios(seconds: Mapping[str, list[float]], name: str, reference: str) -> dict[str, float]:
    """Median and spread of the ratios of each round: what ran side by side is compared."""
    pairs = [a / b for a, b in zip(seconds[name], seconds[reference], strict=True)]
    low, middle, high = quartiles(pairs)
    return {
        "ratio": middle,
        "ratio_quartile_1": low,
        "ratio_quartile_3": high,
        "ratio_min": min(pairs),
        "ratio_max": max(pairs),
    }


def quartiles(numbers: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; the number itself where there is only one."""
    if len(numbers) < 2:
        return numbers[0], numbers[0], numbers[0]
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def where_it_ran(*packages: str) -> dict[str, Any]:
    """The machine in words, versions, date and load: what a figure means nothing without."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def describe_where(where: Mapping[str, Any]) -> str:
    """`where_it_ran` in one line."""
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


def guarded(name: str, section: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The rows of a section; where it fails, one that says so, and the next section goes on."""
    try:
        yield from section()
    except Exception as error:  # a benchmark must report whatever can go wrong
        traceback.print_exc()
        reason = " ".join(str(error).split())
        yield {"name": name, "met": False, "error": f"{type(error).__name__}: {reason}"}


def peak_bytes() -> int:
    """Most memory that this process ever had resident, bytes.

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
