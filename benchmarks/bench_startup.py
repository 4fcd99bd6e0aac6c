"""How long `import kvalloc` and a whole `kvalloc solve` take, against importing what they need.

The reference is `python -c "import numpy, pydantic, typer"`: a command that is not much slower
than that is as fast as it can be made. All commands run in turn, round after round, so that a
busy moment of the machine hits them alike; a ratio is the median of the rounds' own ratios.

    python benchmarks/bench_startup.py [--rounds 15] [--json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.shape import ModelShape

REFERENCE = "import numpy, pydantic, typer"
LIMIT = 3.0
"""`kvalloc solve` with greedy starts and ends within this many times the reference."""

N_LAYERS, N_KV_HEADS, CONTEXT_TOKENS, N_SAMPLES = 30, 3, 1024, 4
SINKS, WINDOW = 4, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "s.safetensors"
        made_up_scores().save(scores)
        result = measure(commands(scores, Path(folder) / "p.json"), options.rounds)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 0


def commands(scores: Path, output: Path) -> dict[str, list[str]]:
    python = sys.executable
    run = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    solve = ["solve", str(scores), "--target-retention", "0.9", "--solver", "greedy"]
    return {
        "reference": [python, "-c", REFERENCE],
        "python alone": [python, "-c", "pass"],
        "import kvalloc": [python, "-c", "import kvalloc"],
        "kvalloc --help": [python, "-c", run, "--help"],
        "kvalloc solve": [python, "-c", run, *solve, "-o", str(output)],
    }


def measure(named: dict[str, list[str]], rounds: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for number in range(rounds + 1):
        for name, command in named.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if number:  # the first round fills the disk's cache and the .pyc files
                seconds[name].append(time.perf_counter() - start)
    reference = seconds["reference"]
    rows = {
        name: {
            "median_seconds": statistics.median(times),
            "min_seconds": min(times),
            "max_seconds": max(times),
            "ratio": statistics.median(t / r for t, r in zip(times, reference, strict=True)),
        }
        for name, times in seconds.items()
    }
    return {
        "benchmark": "startup",
        "reference": REFERENCE,
        "rounds": rounds,
        "python": platform.python_version(),
        "rows": rows,
        "limit": LIMIT,
        "met": rows["kvalloc solve"]["ratio"] <= LIMIT,
    }


def show(result: dict[str, object]) -> None:
    rows = result["rows"]
    assert isinstance(rows, dict)
    print(f"{'':<16}{'median':>9}{'min':>9}{'max':>9}{'ratio':>8}   ({result['rounds']} rounds)")
    for name, row in rows.items():
        times = "".join(f"{row[f'{key}_seconds']:>8.3f}s" for key in ("median", "min", "max"))
        print(f"{name:<16}{times}{row['ratio']:>8.2f}")
    print(f"kvalloc solve within {result['limit']}x: {'yes' if result['met'] else 'NO'}")


def made_up_scores(n_layers: int = N_LAYERS, n_kv_heads: int = N_KV_HEADS) -> ScoreProfile:
    """Curves of the demo model's size or another one, concave as real ones are."""
    random = np.random.default_rng(0)
    evictable = CONTEXT_TOKENS - SINKS - WINDOW
    steepness = random.uniform(0.7, 2.2, (1, n_layers, 1, 1))
    scores = random.pareto(steepness, (N_SAMPLES, n_layers, n_kv_heads, evictable))
    scores = np.sort(scores, axis=-1)[..., ::-1]
    masses = scores.sum(axis=-1)
    curves = np.zeros((*scores.shape[:3], evictable + 1))
    curves[..., 1:] = np.cumsum(scores, axis=-1) / masses[..., None]
    curves[..., -1] = 1.0
    return ScoreProfile(
        shape=ModelShape(
            model_id="made-up",
            n_layers=n_layers,
            n_query_heads=3 * n_kv_heads,
            n_kv_heads=n_kv_heads,
            head_dim=64,
            dtype_bytes=2,
            layer_types=("full",) * n_layers,
            max_context_tokens=8192,
        ),
        scorer="xkv",
        scorer_parameters={"window": WINDOW, "pool": 7, "group_reduce": "mean"},
        context_tokens=CONTEXT_TOKENS,
        sinks=SINKS,
        window=WINDOW,
        ranks=np.arange(evictable + 1),
        curves=curves,
        masses=masses,
        sample_tokens=np.full(N_SAMPLES, CONTEXT_TOKENS),
    )


if __name__ == "__main__":
    sys.exit(main())
