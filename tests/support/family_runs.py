"""All families of models, each checked in a process of its own: what kvalloc serves, as a table.

    python tests/support/family_runs.py [NAME ...]

Checks all names of transformers' mappings, or some. Their rows are written to
`kvalloc/models/families.json`, and `docs/models.md` is made of it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # a process is copied while it has one thread
    os.environ["HF_HUB_OFFLINE"] = "1"

import transformers
from family_checks import FIELDS, check
from named_models import CAUSAL, WITH_IMAGES

ROOT = Path(__file__).resolve().parents[2]
RECORD, PAGE = ROOT / "kvalloc" / "models" / "families.json", ROOT / "docs" / "models.md"
MAX_SECONDS, MAX_BYTES, WORKERS = 120, 16 << 30, 2
TITLES = {"causal": "Language models", "wrappers": "Models that read images, too"}

MAPPINGS = {"causal": CAUSAL, "wrappers": WITH_IMAGES}

Job: TypeAlias = tuple[str, str]
"""A mapping, and a name in it."""

Row: TypeAlias = dict[str, str]

TRAINED = {
    "llama": "SmolLM2-135M",
    "gemma3_text": "Gemma-3-270M",
    "qwen2": "Qwen2.5-Coder-0.5B, 1.5B",
}
"""Models whose trained weights have run, by name."""

HEADING = """# Which models are served

`make families` makes a tiny random model of every name in transformers' mappings of causal language
models and of vision-language models, and checks each:

- A budget of 100% answers as the plain model, within 1e-4.
- The default at 30% runs, and the cache is that small.
- A prompt reduced to 30% at 16 bits, tokens after it, a second turn and a padded batch answer as an
  oracle: the plain model with a full cache, in which a mask hides the evicted entries. Within 1e-4.
- `kvalloc fit` can fit values to it, or says why not.

A model that is not served is refused before anything runs, in a line that names a way out. Models
that need a package, an image, or another model are not tried. All prompts are texts, also for
vision-language models. All rows come from random weights. The last column names the models that ran
with trained weights, too. Weights of norms are random, between 0.75 and 1.25.

`kvalloc list models` prints the table.
"""


def main(names: Sequence[str]) -> int:
    """Check models; return 1 if one is wrong, or crashes."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    check("llama")  # loads what all need
    jobs = [("causal", name) for name in CAUSAL]
    wrappers = [name for name, kind in WITH_IMAGES.items() if kind != CAUSAL.get(name)]
    jobs += [("wrappers", name) for name in wrappers]
    record = {"date": f"{date.today()}", "transformers": transformers.__version__}
    record |= {"causal": dict.fromkeys(CAUSAL), "wrappers": dict.fromkeys(wrappers)}
    if names:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    found = set()
    for (mapping, name), row in _checked([job for job in jobs if not names or job[1] in names]):
        record[mapping][name] = row
        found.add(row["outcome"])
        print(f"{name}: {row['outcome']}. {row['note']}", flush=True)
    RECORD.write_text(_text(record), encoding="utf-8")
    PAGE.write_text(page(record), encoding="utf-8")
    return int(not found.isdisjoint(("wrong", "crashes")))


def _checked(jobs: list[Job]) -> Iterator[tuple[Job, Row]]:
    """Yield jobs and rows as they are done; a process that dies is a crash."""
    fork, running = multiprocessing.get_context("fork"), {}
    while jobs or running:
        while jobs and len(running) < WORKERS:
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_send, args=(theirs, *jobs[0]))
            process.start()
            theirs.close()
            running[ours] = process, jobs.pop(0)
        for end in wait(running):
            process, job = running.pop(end)
            try:
                row = end.recv()
            except EOFError:
                process.join()
                note = f"the process ends with {process.exitcode}"
                row = dict.fromkeys(FIELDS, "") | {"outcome": "crashes", "note": note}
            process.join()
            yield job, row


def _send(end: Any, mapping: str, name: str) -> None:
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    end.send(check(name, MAPPINGS[mapping]))


def _text(record: Mapping[str, Any]) -> str:
    """Return JSON with a line for each name."""
    parts = []
    for key, value in record.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            lines = (f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            text = "{\n" + ",\n".join(lines) + "\n  }"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def page(record: Mapping[str, Any]) -> str:
    """Return docs/models.md."""
    parts = [HEADING]
    for key, title in TITLES.items():
        rows = record[key]
        counts = Counter(row["outcome"] for row in rows.values())
        summary = ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common())
        made = f"transformers {record['transformers']}, {record['date']}"
        parts.append(f"## {title}\n\nOf {len(rows)} names: {summary} ({made}).\n")
        lines = ["| name | class | layers | `kvalloc fit` | trained weights |"]
        lines.append("|---|---|---|---|---|")
        others: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, row in rows.items():
            if row["outcome"] == "served":
                fit = "yes" if row["fit"] == "yes" else "no"
                cells = (name, row["class"], row["layers"], fit, TRAINED.get(name, ""))
                lines.append(f"| {' | '.join(cells)} |")
            else:
                note = row["note"].replace(row["class"] or "\n", "the model")
                others[row["outcome"], note].append(name)
        parts += ["\n".join(lines) + "\n", "| not served | in words |\n|---|---|"]
        for (outcome, note), names in sorted(others.items()):
            words = note.replace("|", "\\|").replace("<", "&lt;")
            parts[-1] += f"\n| {', '.join(names)} | {outcome}: {words} |"
        parts[-1] += "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
