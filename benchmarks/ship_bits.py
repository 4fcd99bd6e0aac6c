"""The budget profiles that ship by measured losses: entries and bits of each head, together.

    python benchmarks/ship_bits.py FOLDER [--scores FILE]

Writes ``NAME-bits-20.json`` and ``NAME-bits-10.json``, decided from losses of
entries and bits together, one head at a time. The shares are
a little smaller than their names say, so that sinks and window fit into them from 400 tokens on.
After them: ``make bench-quality``, and ``python benchmarks/quality/ship.py FILE=NAME ...``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kvalloc
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.models.loading import load_model, shape_of
from kvalloc.online.default import Default
from kvalloc.prompts.calibration import calibration_prompts

WIDTHS = (8, 5, 4, 3)
KINDS = ("kl", "own", "facts", "needle")
SHARES = {20: 0.197, 10: 0.0965}
NAME = "smollm2-135m-instruct-bits"


def main() -> int:
    parser = argparse.ArgumentParser(description="entries and bits by measured losses")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scores", type=Path, help="measured already")
    parser.add_argument("--samples", type=int, default=16, help="prompts that losses are of")
    parser.add_argument("--context", type=int, default=600)
    asked = parser.parse_args()
    scores = measured(asked) if asked.scores is None else ScoreProfile.load(asked.scores)
    for percent, share in SHARES.items():
        policy = policy_of(scores, percent / 100, asked)
        decided(scores, share, WIDTHS, policy).save(asked.folder / f"{NAME}-{percent}.json")
    return 0


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
        scorer=f"surrogate:file={surrogate}:window=8",
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


if __name__ == "__main__":
    sys.exit(main())
