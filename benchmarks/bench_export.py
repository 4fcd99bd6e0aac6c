"""What other engines' restrictions cost: one budget profile as each of them can say it.

    python benchmarks/bench_export.py [--profile NAME] [--samples 3] [--openvino FOLDER]

The profile, and what is left of it for each target that evicts (everything accepted), at no more
bytes, on the same held-out prompts: KL(full cache || reduced cache) and scores. The restrictions
run in kvalloc, with its nearest policy to the engine's. With --openvino, a folder that `optimum-cli
export openvino --task text-generation-with-past --weight-format fp32` made of the same model,
OpenVINO GenAI itself answers the prompts with and without the exported config: the only engine of
these that runs on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import kvalloc
from kvalloc.cli.main import main as command
from kvalloc.interop.exporting import TARGETS, export
from kvalloc.interop.target import RESTRICTIONS, lost

EVICTING = ("lu-kv", "duo-attention", "tensorrt-llm", "openvino")
TASKS = ("needle", "pairs", "kl")
SEED, NEW_TOKENS = 9, 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", default="smollm2-135m-instruct-bits-20")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--skip-kl", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = restricted(kvalloc.load_profile(asked.profile), Path(folder))
        if not asked.skip_kl:
            print_losses(asked, files)
        if asked.openvino is not None:
            run_openvino(asked, files["openvino"].with_suffix(".config"))
    return 0


def restricted(profile: Any, folder: Path) -> dict[str, Path]:
    """The profile as each target can say it, beside what was written for the target."""
    files = {}
    for name in EVICTING:
        files[name] = folder / f"{name}.json"
        accept = [one.name for one in RESTRICTIONS]
        left = export(profile, name, files[name].with_suffix(".config"), accept=accept)
        left.save(files[name])
        print(f"{name}: loses {', '.join(lost(profile, TARGETS[name]))}")
    return files


def print_losses(asked: argparse.Namespace, files: dict[str, Path]) -> None:
    flags = ["--tasks", ",".join(TASKS), "--samples", asked.samples, "--context", asked.context]
    flags += ["--split", "held-out", "--seed", SEED, "--json"]
    for file in (asked.profile, *files.values()):
        flags += ["--profile", file]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = command(["eval", asked.model, *map(str, flags)])
    assert code == 0
    rows = json.loads(printed.getvalue())
    names = {
        asked.profile: "the profile itself",
        **{path.stem: name for name, path in files.items()},
    }
    print(f"\n{asked.profile}, {asked.samples} prompts a task of {asked.context} tokens, held out")
    print(
        f"{'':<20}{'of 16 bits':>11}" + "".join(f"{f'{task} KL':>12}{'score':>7}" for task in TASKS)
    )
    for name, title in names.items():
        own = {row["task"]: row for row in rows if row["name"] == name}
        cells = "".join(
            f"{own[task]['kl']:>12.4f}"
            + (f"{'-':>7}" if own[task]["score"] is None else f"{own[task]['score']:>7.0%}")
            for task in TASKS
        )
        print(f"{title:<20}{own[TASKS[0]]['share_of_16_bits']:>11.1%}{cells}")


def run_openvino(asked: argparse.Namespace, config: Path) -> None:
    import numpy as np
    import openvino
    import openvino_genai
    from transformers import AutoTokenizer

    from kvalloc.interop.openvino import scheduler_config
    from kvalloc.prompts.tasks import find_tasks

    tokenizer = AutoTokenizer.from_pretrained(asked.openvino)
    standing = {"split": "held-out", "turns": 1, "answer_tokens": NEW_TOKENS}
    cases = [
        (task.name, case)
        for task in find_tasks(TASKS)
        for case in task.make(
            tokenizer, asked.samples, asked.context, SEED, after=False, opened=False, **standing
        )
    ]
    greedy = openvino_genai.GenerationConfig()
    greedy.max_new_tokens, greedy.do_sample = NEW_TOKENS, False
    answers: dict[str, list[list[int]]] = {}
    reduced, said = scheduler_config(config), json.loads(config.read_text())
    for name, scheduler in (("full", openvino_genai.SchedulerConfig()), ("reduced", reduced)):
        scheduler.max_num_batched_tokens, scheduler.cache_size = 4096, 1
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(asked.openvino), scheduler, "CPU", said["ov_config"]
        )
        answers[name] = []
        for _, case in cases:
            ids = np.array([[*case.input_ids, *case.turns[0].question_ids]], dtype=np.int64)
            found = pipeline.generate([openvino.Tensor(ids)], [greedy])[0]
            answers[name].append(list(found.m_generation_ids[0]))
    size = said["cache_eviction_config"]["max_cache_size"]
    where = f"on the CPU, {size} entries in every head, {said['ov_config']}"
    print(f"\nOpenVINO GenAI {openvino_genai.__version__} {where}")
    for task in TASKS:
        rows = [place for place, (name, _) in enumerate(cases) if name == task]
        pairs = [zip(*(answers[name][row] for name in answers), strict=False) for row in rows]
        same = [np.mean([a == b for a, b in pair]) for pair in pairs]
        scores = {
            name: [
                cases[row][1].turns[0].score(tokenizer.decode(answers[name][row])) for row in rows
            ]
            for name in answers
        }
        told = (
            ""
            if scores["full"][0] is None
            else "".join(f", score {name} {np.mean(scores[name]):.0%}" for name in answers)
        )
        print(f"{task}: {np.mean(same):.0%} of the tokens as with the full cache{told}")


if __name__ == "__main__":
    sys.exit(main())
