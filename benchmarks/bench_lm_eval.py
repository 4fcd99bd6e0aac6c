"""Our generators of RULER's tasks beside those of lm-evaluation-harness: ours are not easier.

    python benchmarks/bench_lm_eval.py [niah_single fwe] [--samples 16] [--shares 12.5]

The harness makes its prompts without a download, and checks the answers itself. Ours are held-out
prompts of as many tokens, with our own checkers. SmolLM2-135M answers both through the harness's
model ``kvalloc``, with the full cache and with the default at shares of the bytes; the question is
read after the compression.

A row is our score minus the harness's, with its interval over prompts. Ours is easier where the
whole interval is above `MARGIN`. Runs in the environment that ``make bench-lm-eval`` makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from _common import Row, parser_of, print_rows

from kvalloc.accounting import FloatArray
from kvalloc.models.loading import DEMO, ModelSource
from kvalloc.prompts.chat import encode
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.tasks import TASKS

PYTHON = Path(__file__).resolve().parents[1] / ".venv-lm-eval" / "bin" / "python"
COMPARED = ("niah_single", "fwe")
HARNESS = {"niah_single": "niah_single_1", "fwe": "ruler_fwe", "vt": "ruler_vt"}
"""The harness's name of each of our tasks; SmolLM2-135M solves next to nothing of ``vt``."""
IN_CHAT = ("niah_single",)
"""Tasks that we ask in the chat form; the harness then does, too."""
AFTER_TOKENS = 64
"""Last tokens, read after the compression: more than any question has."""
MARGIN = 0.05


def main() -> int:
    parser = parser_of(__doc__, HARNESS)
    parser.add_argument("--samples", type=int, default=16, help="prompts of each task and maker")
    parser.add_argument(
        "--tokens", type=int, default=2048, help="of prompt and answer, as in RULER"
    )
    parser.add_argument("--shares", nargs="*", type=float, default=[12.5], help="percent")
    request = parser.parse_args()
    if find_spec("lm_eval") is None:
        if not PYTHON.exists():
            print(f"there is no {PYTHON}: 'make bench-lm-eval' makes it", file=sys.stderr)
            return 2
        return subprocess.run([PYTHON, *sys.argv], check=False).returncode
    if request.quick:
        request.samples, request.tokens = 2, 1024
    return print_rows(rows(request), request, "lm_eval", "kvalloc", "transformers", "torch")


def rows(request: argparse.Namespace) -> Iterator[Row]:
    """Give the rows of each task, the full cache's first."""
    from kvalloc.interop.lm_eval import KVAllocLM

    for task in request.parts or COMPARED:
        for share in (None, *request.shares):
            budget = None if share is None else f"{share:g}%"
            model = KVAllocLM(DEMO, budget=budget, after_tokens=AFTER_TOKENS)
            theirs, n_tokens = harness_scores(model, task, request)
            ours = our_scores(model, task, request.samples, n_tokens)
            what = "full cache" if share is None else f"default at {budget}"
            yield compared(f"{task}, {what}", ours, theirs, n_tokens)


def harness_scores(model: Any, task: str, request: argparse.Namespace) -> tuple[FloatArray, int]:
    """Return the harness's score of each prompt, (n_prompts,), and their mean number of tokens."""
    from lm_eval import simple_evaluate

    name, manager = HARNESS[task], manager_of(task, request.tokens)
    with redirect_stdout(sys.stderr):  # it prints while it makes prompts
        samples = simple_evaluate(
            model,
            tasks=[name],
            task_manager=manager,
            limit=request.samples,
            apply_chat_template=task in IN_CHAT,
            bootstrap_iters=0,
        )["samples"][name]
    contexts = [sample["arguments"][0][0] for sample in samples]
    n_tokens = np.mean([len(encode(demo_tokenizer(), context)) for context in contexts])
    return np.array([sample[str(request.tokens)] for sample in samples]), round(n_tokens)


def our_scores(model: Any, task: str, n_prompts: int, n_tokens: int) -> FloatArray:
    """Return the score of each of our prompts of as many tokens, (n_prompts,)."""
    tokenizer = demo_tokenizer()
    cases = TASKS[task].make(tokenizer, n_prompts, n_tokens, split="held-out")
    contexts = [tokenizer.decode(case.input_ids) for case in cases]
    assert [encode(tokenizer, one) for one in contexts] == [case.input_ids for case in cases]
    turns = [case.turns[0] for case in cases]
    pairs = zip(contexts, turns, strict=True)
    requests = [
        SimpleNamespace(args=(context, {"max_gen_toks": turn.max_new_tokens}))
        for context, turn in pairs
    ]
    answers = model.generate_until(requests)
    return np.array([turn.score(answer) for turn, answer in zip(turns, answers, strict=True)])


@cache
def manager_of(task: str, tokens: int) -> Any:
    """Return the harness's manager of a task, which makes the same prompts each time."""
    from lm_eval.tasks import TaskManager

    folder = demo_tokenizer().name_or_path
    manager = TaskManager(metadata={"pretrained": folder, "max_seq_lengths": [tokens]})
    with redirect_stdout(sys.stderr):
        manager.load([HARNESS[task]])  # imports draw random numbers after the harness's seed
    return manager


@cache
def demo_tokenizer() -> Any:
    return ModelSource(source=DEMO).tokenizer()[0]


def compared(what: str, ours: FloatArray, theirs: FloatArray, n_tokens: int) -> Row:
    """Return the row of two makers' scores, each (n_prompts,)."""
    low, high = interval([ours, -theirs], lambda means: 2 * means) or (-1.0, 1.0)
    return {
        "what": what,
        "figure": f"{ours.mean() - theirs.mean():+.2f}",
        "low": f"{low:+.2f}",
        "high": f"{high:+.2f}",
        "wanted": f"not surely above {MARGIN:g}",
        "verdict": "MISSED" if low > MARGIN else "met",
        "ours": f"{ours.mean():.2f}",
        "lm-eval": f"{theirs.mean():.2f}",
        "prompts": f"{len(ours)} each",
        "note": f"{n_tokens:,} tokens",
    }


if __name__ == "__main__":
    sys.exit(main())
