"""Bits decided head by head with the entries, beside one width for all, at equal bytes.

    python benchmarks/bench_bits.py [--prompts 4] [--samples 16] [--scores FILE]

Losses of SmolLM2-135M are measured on profiling prompts, at each budget and width together, of the
entries that the shipped surrogate scores (`kvalloc profile --loss fast --bits`), unless a score
profile of that is given; it takes some six minutes with one thread. They decide the entries of
each head at one width for all, and entries and widths together, all within a share of a 16-bit
cache's bytes, positions and biases counted. Then KL(full cache || reduced cache) of the tokens
after the eviction, on development prompts: of these decisions, with the values fitted as the
default does, of the one width whose entries each prompt hands out among the heads, and of the
default itself, which measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from _common import describe_where, where_it_ran

import kvalloc
from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, full_cache
from kvalloc.evaluate.scoring import Outcome, measure
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.online.default import Default
from kvalloc.prompts.calibration import calibration_prompts
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.tasks import TASKS

WIDTHS = (8, 5, 4, 3)
SHARES = (0.2, 0.1)
ALONE = 2
"""Widths for all that are measured: those with the least predicted losses."""
CELLS: dict[str, tuple[str, dict[str, bool]]] = {
    "text": ("kl", {}),
    "own answer": ("own", {}),
    "four facts, asked after": ("facts", {"after": True}),
}
KINDS = ("kl", "own", "facts", "needle")


def main() -> int:
    asked = parse_arguments()
    loaded = load_model("demo")
    print(describe_where(where_it_ran("kvalloc", "torch", "transformers")))
    scores = measured(loaded, asked) if asked.scores is None else ScoreProfile.load(asked.scores)
    print(f"losses of {scores.n_samples} prompts: {scores.text_description}")
    with ProcessPoolExecutor(len(SHARES), mp_context=get_context("spawn")) as processes:
        for lines in processes.map(compared, [scores] * len(SHARES), SHARES, [asked] * len(SHARES)):
            print("\n".join(lines), flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="bits by head beside one width for all")
    parser.add_argument("--scores", type=Path, help="measured already")
    parser.add_argument("--samples", type=int, default=16, help="prompts that losses are of")
    parser.add_argument("--prompts", type=int, default=4, help="of each cell")
    parser.add_argument("--context", type=int, default=600)
    return parser.parse_args()


def measured(loaded: LoadedModel, asked: argparse.Namespace) -> ScoreProfile:
    """Losses of entries and bits together, one head at a time."""
    prompts = calibration_prompts(
        loaded.tokenizer, asked.samples, asked.context, kinds=KINDS, question="both"
    )
    surrogate = Default(share=0.2).surrogate_of(shape_of(loaded.model))
    return kvalloc.profile(
        loaded.model,
        loaded.tokenizer,
        prompts,
        samples=len(prompts),
        context=asked.context,
        scorer=f"surrogate:file={surrogate}",
        window=8,
        loss="fast",
        loss_level="head",
        bits=(16, *WIDTHS),
        model_id=loaded.model_id,
    )


def decided(
    scores: ScoreProfile, share: float, bits: tuple[int, ...], like: BudgetProfile
) -> BudgetProfile:
    """By losses, with the policy of another profile, whose biases take bytes, too."""
    wanted = share
    while True:
        found = kvalloc.solve(
            scores, budget=wanted, level="head", objective="loss", bits=bits, solver="auto"
        )
        found = found.with_policy(like.policy)
        reached = found.of_16_bits(found.retained_bytes, found.context_tokens)
        if reached <= share:
            return found
        wanted *= 0.999 * share / reached


def compared(scores: ScoreProfile, share: float, asked: argparse.Namespace) -> list[str]:
    """What each way loses within a share of the bytes, in a process of its own."""
    return [*lines_of(load_model("demo"), scores, share, asked)]


def lines_of(
    loaded: LoadedModel, scores: ScoreProfile, share: float, asked: argparse.Namespace
) -> Iterator[str]:
    like = Default(share=share).profile(scores.shape, asked.context, "surrogate")
    sets = {f"{bits} bits for all": (bits,) for bits in WIDTHS} | {"bits by head": WIDTHS}
    made = {name: decided(scores, share, bits, like) for name, bits in sets.items()}
    losses = (f"{name} {one.predicted_loss:.5f}" for name, one in made.items())
    yield f"\n{share:.0%} of the bytes; predicted loss, nats per token: {', '.join(losses)}"
    mixed = made["bits by head"]
    each = {bits: int((mixed.bits == bits).sum()) for bits in np.unique(mixed.bits).tolist()}
    yield "widths by head: " + ", ".join(f"{each[bits]} heads at {bits}" for bits in each)
    alone = sorted(sets.keys() - {"bits by head"}, key=lambda name: made[name].predicted_loss)
    shown, best = {name: made[name] for name in alone[:ALONE]}, alone[0]
    shown["bits by head"] = mixed
    shown[f"{best}, entries by prompt"] = shown[best].replace(by_prompt=True)
    methods: dict[str, Any] = {
        name: CacheMethod(make_cache=partial(_cache, profile, loaded.model))
        for name, profile in shown.items()
    }
    methods["default"] = AppliedMethod(options={"budget": f"{share:.0%}"})
    found: dict[str, list[list[Outcome]]] = {name: [] for name in methods}
    for task, where in CELLS.values():
        cases = TASKS[task].make(
            loaded.tokenizer, asked.prompts, asked.context, seed=5, split="development", **where
        )
        for own in found.values():
            own.append([])
        for case in cases:
            full = measure(loaded.model, loaded.tokenizer, full_cache(loaded.model), case)
            for name, method in methods.items():
                reduced = measure(loaded.model, loaded.tokenizer, method, case, full, answers=False)
                found[name][-1].append(reduced.outcome)
    yield f"  {'':<32}{'bytes':>7}" + "".join(f"{cell:>26}" for cell in CELLS)
    for name, cells in found.items():
        every = [outcome for own in cells for outcome in own]
        of_16 = np.mean([one.bytes_at_16_bits / one.full_bytes_at_16_bits for one in every])
        kls = "".join(f"{np.mean(_kls(own)):26.4f}" for own in cells)
        yield f"  {name:<32}{of_16:7.1%}{kls}"
    yield "KL of bits by head over that of another way, mean of the logs over prompts, 95%:"
    mine = [_kls(own) for own in found["bits by head"]]
    for name in [name for name in found if name != "bits by head"]:
        logs = [
            np.log(own) - np.log(_kls(other)) for own, other in zip(mine, found[name], strict=True)
        ]
        low, high = interval(logs) or (np.nan, np.nan)
        middle = np.mean([one.mean() for one in logs])
        yield f"  {name:<32}{np.exp(middle):6.2f} [{np.exp(low):.2f}, {np.exp(high):.2f}]"


def _cache(profile: BudgetProfile, model: Any) -> Any:
    return profile.cache(model)


def _kls(outcomes: list[Outcome]) -> Any:
    """Mean KL of each prompt after its eviction, (n_prompts,)."""
    return np.array(
        [np.mean([kl for turn in one.kls for kl in turn if kl is not None]) for one in outcomes]
    )


if __name__ == "__main__":
    raise SystemExit(main())
