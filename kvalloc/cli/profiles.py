"""``kvalloc profiles``: budget profiles that are at hand, shipped and fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvalloc.cli.options import takes
from kvalloc.cli.output import note, print_result, print_table
from kvalloc.errors import KVAllocError

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile

EXAMPLES = """\
  kvalloc profiles
  kvalloc inspect smollm2-135m-instruct-bits-20
  kvalloc inspect hf://owner/repo/p.json
"""


@takes()
def profiles() -> None:
    """List the budget profiles that ship with kvalloc, and those in the hub's local cache.

    Bytes are a share of a cache at 16 bits. KL is what was measured with exactly these budgets,
    nats per token: the median of the tasks, and the task that a profile is worst at.
    """
    from kvalloc.formats.hub import cached_profiles
    from kvalloc.formats.shipped_profiles import (
        load_profile,
        shipped_profiles,
        shipped_scores,
        shipped_surrogates,
    )

    rows = []
    for name in [*shipped_profiles(), *cached_profiles()]:
        try:
            rows.append(_row(name, load_profile(name)))
        except KVAllocError as error:  # a damaged one in the cache hides no other
            note(str(error))
    print_result(rows, lambda: _show(rows))
    named = {"score profiles": shipped_scores(), "surrogates": shipped_surrogates()}
    shipped = "; ".join(f"{what}: {', '.join(names)}" for what, names in named.items() if names)
    note(f"also shipped, by name: {shipped}", beside_json=False)


def _row(name: str, profile: BudgetProfile) -> dict[str, Any]:
    share = profile.share_at(profile.context_tokens)
    measured = [
        (float(row["kl"]), str(row.get("task", "")))
        for row in (profile.evaluation or {}).get("rows", ())
        if isinstance(row, dict) and isinstance(row.get("kl"), int | float)
    ]
    losses = sorted(measured)
    return {
        "name": name,
        "model": profile.shape.model_id,
        "context_tokens": profile.context_tokens,
        "share_of_16_bits": share,
        "median_kl": losses[len(losses) // 2][0] if losses else None,
        "worst_kl": losses[-1][0] if losses else None,
        "worst_task": losses[-1][1] if losses else None,
        "digest": profile.digest,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    print_table(
        ("profile", "bytes", "KL", "worst at", "model"),
        [
            (
                row["name"],
                f"{row['share_of_16_bits']:.1%}",
                "-" if row["median_kl"] is None else f"{row['median_kl']:.4f}",
                "-" if row["worst_kl"] is None else f"{row['worst_task']} {row['worst_kl']:.4f}",
                row["model"].rsplit("/", 1)[-1],
            )
            for row in rows
        ],
        optional=("model",),
    )
