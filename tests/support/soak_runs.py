"""Long soak: `generate()` thousands of times over one model; nothing stays behind, nothing changes.

    python tests/support/soak_runs.py [--calls 2000] [--seed 0]

Every way to reduce a cache (policies, scorers, widths, early and late eviction, budgets
for each prompt, the default) with every shape of a call (a batch, padding, chunks, beams, one that
breaks half-way): first each once, which is the warm-up and must answer as a process that has done
nothing else, then so many drawn at random, in one thread and in four. A tiny model of random
weights has them all, the demo's model a sample and a fortieth as many calls. After each tenth of
the calls: memory that is resident, tensors that are alive. It is met
where memory ends within 2% of what the warm-up left, no tensor and no hook is left over, and every
answer is the first one to the bit.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import hashlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import runtime_oracle as oracle
import torch
from scorer_oracle import SCORERS
from transformers import AttentionInterface
from transformers.utils import logging

import kvalloc
from kvalloc.errors import KVAllocError
from kvalloc.models.loading import load_model, shape_of
from kvalloc.prompts.texts import Prompt
from kvalloc.runtime.policies import policy_names

ROUNDS, FLAT, NEW = 10, 0.02, 20
CONTEXT = {"tiny": 60, "demo": 128}
SAMPLE = 16
"""Of the demo's model, so many combinations of a way and a shape."""


class BrokenOffError(Exception):
    """What the caller's own code raises amid an answer."""


def break_off(ids: torch.Tensor, scores: object) -> bool:
    raise BrokenOffError("half-way")


SHAPES: dict[str, dict[str, Any]] = {
    "one row": {},
    "two rows": {"rows": 2},
    "padded rows": {"rows": 3, "padded": True},
    "longer": {"times": 2},
    "chunks": {"prefill_chunk_size": 25},
    "beams": {"num_beams": 2},
    "broken off": {"stopping_criteria": [break_off]},
}
"""Of a prompt and of `generate`."""


@dataclass(frozen=True)
class Soak:
    """Calls over one model, each of which is known by a way and a shape.

    Attributes
    ----------
    model : transformers.PreTrainedModel
    context : int
        Tokens of a usual prompt.
    ways : dict
        Name to the arguments of `kvalloc.apply`; None is the model without kvalloc.
    """

    model: Any
    context: int
    ways: dict[str, dict[str, Any] | None]

    @classmethod
    def of(cls, name: str, folder: Path) -> Soak:
        """The tiny model or the demo's; what is fitted to it is in a folder, or comes there."""
        logging.set_verbosity_error()
        model = oracle.tiny_model() if name == "tiny" else load_model(name).model
        return cls(model, CONTEXT[name], ways_of(model, CONTEXT[name], folder / "s.safetensors"))

    def answer(self, way: str, shape: str) -> str:
        """Return the digest of an answer's tokens, logits and bytes, or why there are none."""
        options: dict[str, Any] = {"num_beams": 1, **SHAPES[shape]}
        rows, tokens = options.pop("rows", 1), self.context * options.pop("times", 1)
        ids, mask = prompt(self.model, tokens, rows, seed=len(shape)), torch.ones(rows, tokens)
        if options.pop("padded", False):
            for row in range(1, rows):
                mask[row, : 11 * row] = 0
        # A model for each thread that shares all modules: `apply` changes its attribute `generate`.
        model, reduced = copy.copy(self.model), self.ways[way]
        try:
            with nullcontext() if reduced is None else kvalloc.apply(model, **reduced) as applied:
                output = model.generate(
                    ids,
                    attention_mask=mask.long(),
                    max_new_tokens=NEW,
                    min_new_tokens=NEW,
                    pad_token_id=0,
                    do_sample=False,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **options,
                )
        except (KVAllocError, BrokenOffError) as error:
            return f"{type(error).__name__}: {error}"
        cache = getattr(applied, "last_cache", None)
        digest = hashlib.sha256(b"" if cache is None else b"%d" % cache.retained_bytes)
        for tensor in (output.sequences, *output.logits):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def left_behind(self) -> dict[str, object]:
        """Return all that a call may change and has to put back."""
        gc.collect()  # an error holds the frames that it came through, and they the cache
        modules = dict(self.model.named_modules())
        return {
            "hooks": {
                (name, kind): list(getattr(module, kind))
                for name, module in modules.items()
                for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
                if getattr(module, kind)
            },
            "attributes": {(name, key) for name, module in modules.items() for key in vars(module)},
            "views": [
                name for name, module in modules.items() if has_view(module, self.model.config)
            ],
            "config": self.model.config.to_dict(),
            "attention": self.model.config._attn_implementation,
            "generation": self.model.generation_config.to_dict(),
            "registered": sorted(AttentionInterface._global_mapping),
            "settings": (torch.get_default_dtype(), torch.is_grad_enabled()),
            "threads": threading.active_count(),
            "open files": len(os.listdir("/proc/self/fd")),
        }


def has_view(module: torch.nn.Module, config: object) -> bool:
    view = vars(module).get("config")
    return view is not None and type(view) is not type(config)


def prompt(model: Any, tokens: int, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, model.config.vocab_size, (rows, tokens), generator=generator)


def ways_of(model: Any, context: int, fitted: Path) -> dict[str, dict[str, Any] | None]:
    """Every way to reduce a cache that needs no other package."""
    layer = oracle.make_profile(model, context, 0.4, shape=shape_of(model))
    head = oracle.by_head(layer)
    if not fitted.exists():
        prompts = [
            Prompt(token_ids=tuple(prompt(model, context, 1, seed)[0].tolist()))
            for seed in range(4)
        ]
        kvalloc.fit(model, None, prompts, output=fitted, context=context, samples=4)
    looking = head.policy.replace(
        scorer="lookahead", scorer_parameters={"window": oracle.WINDOW, "tokens": 4, "votes": 0}
    )
    among = head.replace(policy=looking, by_prompt=True)
    late: dict[str, Any] = {"profile": head, "policy": "lookahead"}
    packed = {bits: np.full_like(head.budgets, bits) for bits in (8, 5, 4, 3)}
    return {
        "no kvalloc": None,
        "layer": {"profile": layer},
        "head": {"profile": head},
        **{f"{n} bits": {"profile": head.replace(bits=bits)} for n, bits in packed.items()},
        **{f"policy {name}": {"profile": layer, "policy": name} for name in policy_names()},
        **{f"scorer {name}": {"profile": head, "policy": name} for name in SCORERS},
        "scorer surrogate": {"profile": head, "policy": f"surrogate:file={fitted}"},
        "late": late,
        "every 3": {"profile": head, "decode_every": 3},
        "every 3, late": {**late, "decode_every": 3},
        "every 3, 4 bits": {"profile": head.replace(bits=packed[4]), "decode_every": 3},
        "by prompt": {"profile": among},
        "by prompt, every 3": {"profile": among, "decode_every": 3},
        "each prompt": {"target_retention": 0.8, "level": "head"},
        "each prompt, a solver": {"budget": "40%", "solver": "uniform", "scorer": "h2o"},
        **{f"default {share}": {"budget": share} for share in ("15%", "20%", "30%", "60%")},
        "default, fitted": {"budget": "40%", "fitted": fitted},
        "default, every 3": {"budget": "40%", "decode_every": 3},
    }


def fresh(soak: Soak, call: tuple[str, str]) -> str:
    """Return what a call answers in a process that is forked before any other call."""
    context = multiprocessing.get_context("fork")
    ours, its = context.Pipe(duplex=False)
    process = context.Process(target=lambda: its.send(soak.answer(*call)))
    process.start()
    its.close()  # so that the end of a process that says nothing is noticed
    answer: str = ours.recv()
    process.join()
    return answer


class Memory:
    """What is resident and which tensors are alive, once what is free has been given back."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/statm", encoding="ascii") as pages:
            self.resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        alive = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        self.tensors = len(alive)

    def line(self, done: int, calls: str = "calls") -> str:
        resident = f"{self.resident / 2**20:8.1f} MiB resident"
        return f"{done:>7} {calls}  {resident}  {self.tensors:,} tensors"


def wrong_answers(
    soak: Soak, calls: list[tuple[str, str]], expected: dict[tuple[str, str], str], threads: int
) -> list[str]:
    """Calls that do not answer as expected, in words; made by so many threads at once."""
    with ThreadPoolExecutor(threads) as pool:
        answers = pool.map(lambda call: soak.answer(*call), calls)
        return [
            f"{', '.join(call)}: {expected[call][:60]} became {one[:60]}"
            for call, one in zip(calls, answers, strict=True)
            if one != expected[call]
        ]


def run(name: str, calls: int, threads: int, seed: int) -> bool:
    torch.set_num_threads(1)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvalloc-soak-") as made:
        soak = Soak.of(name, Path(made))
        known = list(itertools.product(soak.ways, SHAPES))
        if name != "tiny":
            known = draw.sample(known, SAMPLE)
        expected = {call: fresh(soak, call) for call in known}
        refused = sum(": " in one for (_, shape), one in expected.items() if shape != "broken off")
        print(
            f"{name}, {threads} thread{'s' * (threads > 1)}, seed {seed}: {len(known)} ways and "
            f"shapes, of which {refused} are refused, each in a process of its own"
        )
        soak.answer("layer", "one row")  # attention is registered once for a process
        before, wrong = soak.left_behind(), wrong_answers(soak, known, expected, threads)
        first = now = Memory()
        print(first.line(len(known), "calls of the warm-up"))
        tensors = set()
        for part in range(1, ROUNDS + 1):
            drawn = draw.choices(known, k=calls * part // ROUNDS - calls * (part - 1) // ROUNDS)
            wrong += wrong_answers(soak, drawn, expected, threads)
            now = Memory()
            tensors.add(now.tensors)
            print(now.line(calls * part // ROUNDS), flush=True)
        after = soak.left_behind()
    left = [key for key, value in before.items() if after[key] != value]
    growth = now.resident / first.resident - 1
    print(f"resident memory {growth:+.2%} since the warm-up")
    print(f"answers that differ from a fresh process's: {len(wrong)}")
    print(f"left behind: {', '.join(left) or 'nothing'}; tensors {tensors - {first.tensors} or 0}")
    for line in wrong[:10]:
        print(f"  {line}")
    for key in left:
        print(f"  {key}: {before[key]} became {after[key]}")
    return growth <= FLAT and not wrong and not left and tensors == {first.tensors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=CONTEXT, help="this one alone")
    parser.add_argument("--threads", type=int, help="so many alone")
    arguments = parser.parse_args()
    if arguments.model and arguments.threads:
        return int(not run(arguments.model, arguments.calls, arguments.threads, arguments.seed))
    codes = []
    for model, part in {"tiny": 1, "demo": 40}.items():
        for threads in (1, 4):  # each part in a process of its own: memory is counted
            if arguments.model in (None, model) and arguments.threads in (None, threads):
                calls = ("--calls", str(arguments.calls // part), "--seed", str(arguments.seed))
                one = ("--model", model, "--threads", str(threads))
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-u", __file__, *calls, *one]
                codes.append(subprocess.run(command, env=environment).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
