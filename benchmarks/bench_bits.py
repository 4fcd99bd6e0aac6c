"""Bits decided head by head with the entries, beside one width for all, at equal bytes.

    python benchmarks/bench_bits.py [--prompts 4] [--samples 16] [--scores FILE]

Losses of SmolLM2-135M are measured on profiling prompts, at each budget and width together, of the
entries that the shipped surrogate scores (`kvalloc profile --loss fast --bits`), unless a score
profile of that is given; it takes some four minutes with one thread. They decide the entries of
each head at one width for all, and entries and widths together, all within a share of a 16-bit
cache's bytes, positions and biases counted. What is decided on one half of the prompts is then
predicted on the other half. Last, unless ``--prompts 0`` asks for none of it, KL(full cache ||
reduced cache) of the tokens after the eviction, on development prompts: of these decisions, with
the values fitted as the default does, of one width whose entries each prompt hands out among the
heads, and of the default itself, which measures nothing.
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
from kvalloc.allocation.curves import RequestCurves
from kvalloc.allocation.request import Request
from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, full_cache
from kvalloc.evaluate.scoring import Outcome, measure
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.online.default import Default
from kvalloc.prompts.calibration import calibration_prompts
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.tasks import TASKS

WIDTHS = (8, 5, 4, 3)
SHARES = (0.2, 0.1)
SETS = {f"{bits} bits for all": (bits,) for bits in WIDTHS} | {"bits by head": WIDTHS}
CELLS: dict[str, tuple[str, dict[str, bool]]] = {
    "text": ("kl", {}),
    "own answer": ("own", {}),
    "four facts, asked after": ("facts", {"after": True}),
}
KINDS = ("kl", "own", "facts", "needle")


def main() -> int:
    asked = parse_arguments()
    print(describe_where(where_it_ran("kvalloc", "torch", "transformers")))
    scores = measured(asked) if asked.scores is None else ScoreProfile.load(asked.scores)
    print(f"losses of {scores.n_samples} prompts: {scores.text_description}")
    for share in SHARES:
        for line in predicted(scores, share, asked):
            print(line, flush=True)
    if not asked.prompts:
        return 0
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


def measured(asked: argparse.Namespace) -> ScoreProfile:
    """Losses of entries and bits together, one head at a time."""
    loaded = load_model("demo")
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
    scores: ScoreProfile, share: float, bits: tuple[int, ...], policy: Policy
) -> BudgetProfile:
    """By losses, with a policy whose biases take bytes, too."""
    wanted = share
    while True:
        found = kvalloc.solve(scores, budget=wanted, level="head", objective="loss", bits=bits)
        found = found.with_policy(policy)
        reached = found.share_at(found.context_tokens)
        if reached <= share:
            return found
        wanted *= 0.999 * share / reached


def policy_of(scores: ScoreProfile, share: float, asked: argparse.Namespace) -> Policy:
    """How the default picks the entries of a share."""
    return Default(share=share).profile(scores.shape, asked.context, "surrogate").policy


def predicted(scores: ScoreProfile, share: float, asked: argparse.Namespace) -> Iterator[str]:
    """Losses of all prompts, and of each half by what was decided on the other one."""
    policy, n = policy_of(scores, share, asked), scores.n_samples
    halves = [half_of(scores, rows) for rows in (slice(n // 2), slice(n // 2, n))]
    yield f"\n{share:.0%} of the bytes; predicted loss, nats per token: decided on all prompts,"
    yield f"  {'or on half of them:':<24}{'all':>10}{'own half':>10}{'other half':>12}"
    for name, bits in SETS.items():
        every = decided(scores, share, bits, policy).predicted_loss
        own, other = [], []
        for mine, rest in (halves, halves[::-1]):
            found = decided(mine, share, bits, policy)
            own.append(found.predicted_loss)
            curves = RequestCurves(scores=rest, request=Request.read(found))
            other.append(curves.predicted_loss(found.budgets, found.bits))
        yield f"  {name:<24}{every:10.5f}{np.mean(own):10.5f}{np.mean(other):12.5f}"
    mixed = decided(scores, share, WIDTHS, policy).bits
    each = {bits: int((mixed == bits).sum()) for bits in np.unique(mixed).tolist()}
    yield "  widths by head: " + ", ".join(f"{each[bits]} heads at {bits}" for bits in each)


def half_of(scores: ScoreProfile, rows: slice) -> ScoreProfile:
    """Some of the samples."""
    names = ("curves", "masses", "sample_tokens", "losses", "loss_stderr")
    names += ("other_losses", "other_loss_stderr", "bit_fidelity")
    return scores.replace(**{name: getattr(scores, name)[rows] for name in names})


def compared(scores: ScoreProfile, share: float, asked: argparse.Namespace) -> list[str]:
    """What each way loses within a share of the bytes, in a process of its own."""
    return [*lines_of(load_model("demo"), scores, share, asked)]


def lines_of(
    loaded: LoadedModel, scores: ScoreProfile, share: float, asked: argparse.Namespace
) -> Iterator[str]:
    policy = policy_of(scores, share, asked)
    made = {name: decided(scores, share, bits, policy) for name, bits in SETS.items()}
    mixed = made.pop("bits by head")
    best = min(made, key=lambda name: made[name].predicted_loss)
    shown = {best: made[best], "bits by head": mixed}
    shown[f"{best}, entries by prompt"] = made[best].replace(by_prompt=True)
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
    yield f"\n{share:.0%} of the bytes, measured: KL on {asked.prompts} development prompts a cell"
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
        middle, ends = np.mean([one.mean() for one in logs]), interval(logs)
        sure = "" if ends is None else f" [{np.exp(ends[0]):.2f}, {np.exp(ends[1]):.2f}]"
        yield f"  {name:<32}{np.exp(middle):6.2f}{sure}"


def _cache(profile: BudgetProfile, model: Any) -> Any:
    return kvalloc.make_cache(model, profile)


def _kls(outcomes: list[Outcome]) -> Any:
    """Mean KL of each prompt after its eviction, (n_prompts,)."""
    return np.array(
        [np.mean([kl for turn in one.kls for kl in turn if kl is not None]) for one in outcomes]
    )


if __name__ == "__main__":
    raise SystemExit(main())
