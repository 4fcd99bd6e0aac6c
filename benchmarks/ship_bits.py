"""Decide the budget profiles that ship by measured losses: entries and bits of each head, together.

    python benchmarks/ship_bits.py FOLDER [--scores FILE | --policies]

Writes ``NAME-bits-20.json`` and ``NAME-bits-10.json``, decided from losses of entries and bits
together, one head at a time. The shares are a little smaller than their names say, so that sinks
and window fit into them from 400 tokens on. With ``--policies`` the budgets and bits that ship
stay, and entries are chosen in them as the default chooses now. After it: ``make bench-quality``,
and ``python benchmarks/quality/ship.py FILE=NAME ...``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kvalloc
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import pose
from kvalloc.allocation.request import Request
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_profile
from kvalloc.models.loading import load_model, shape_of
from kvalloc.online.default import Default
from kvalloc.problem.registry import get_solver
from kvalloc.prompts.calibration import calibration_prompts

WIDTHS = (8, 5, 4, 3)
KINDS = ("kl", "own", "facts", "needle")
SHARES = {20: 0.197, 10: 0.0965}
NAME = "smollm2-135m-instruct-bits"


def main() -> int:
    parser = argparse.ArgumentParser(description="entries and bits by measured losses")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scores", type=Path, help="losses that were measured before")
    parser.add_argument("--policies", action="store_true", help="decide nothing anew")
    parser.add_argument("--samples", type=int, default=16, help="prompts to measure losses on")
    parser.add_argument("--context", type=int, default=600)
    args = parser.parse_args()
    if args.policies:
        for percent in SHARES:
            shipped = load_profile(f"{NAME}-{percent}")
            policy = policy_of(shipped, percent / 100)
            shipped.with_policy(policy).save(args.folder / f"{NAME}-{percent}.json")
        return 0
    if args.scores is None:
        scores = measure_losses(args.samples, args.context)
    else:
        scores = ScoreProfile.load(args.scores)
    for percent, share in SHARES.items():
        profile = decide_share(scores, share, policy_of(scores, percent / 100))
        profile.save(args.folder / f"{NAME}-{percent}.json")
    return 0


def measure_losses(samples: int, context: int) -> ScoreProfile:
    """Measure the losses of entries and bits together, one head at a time."""
    loaded = load_model("demo")
    prompts = calibration_prompts(loaded.tokenizer, samples, context, kinds=KINDS, question="both")
    surrogate = Default(share=0.2).fitted_file(shape_of(loaded.model))
    return kvalloc.profile(
        loaded.model,
        loaded.tokenizer,
        prompts,
        samples=len(prompts),
        context=context,
        scorer=f"surrogate:file={surrogate}:window=8",
        loss="fast",
        loss_level="head",
        bits=(16, *WIDTHS),
        model_id=loaded.model_id,
    )


def decide_share(scores: ScoreProfile, share: float, policy: Policy) -> BudgetProfile:
    """Return the budgets and widths with the least loss within a share.

    The bytes of logit biases count where the policy has them.
    """
    request = Request.parse(budget=share, level="head", objective="loss", bits=WIDTHS)
    posed = pose(scores, request, biased=policy.biased)
    return decide(posed, get_solver("auto")).with_policy(policy)


def policy_of(scores: ScoreProfile | BudgetProfile, share: float) -> Policy:
    """Return the policy by which the default picks the entries of a share, without logit biases.

    Below 15% the default has them. Here heads are stored at fewer bits, so that the bytes of a
    bias buy more entries: without biases 10% loses 0.91 times as much (docs/studies.md).
    """
    policy = Default(share=share).profile(scores.shape, scores.context_tokens, "surrogate").policy
    return policy.replace(parameters={**policy.parameters, "biases": False})


if __name__ == "__main__":
    sys.exit(main())
