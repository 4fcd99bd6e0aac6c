"""``kvalloc diff``: where two budget profiles differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_fields, print_result
from kvalloc.report.terminal import difference_picture, number_text
from kvalloc.units import size

if TYPE_CHECKING:
    from kvalloc.allocation.comparison import ProfileDifference


@takes()
def diff(first: str, second: str) -> None:
    """Show which layers keep more and which keep less in the second of two profiles.

    Parameters
    ----------
    first : str
        A budget profile, or a shipped one's name.
    second : str
        Another one of the same model.

    Examples
    --------
    kvalloc diff uniform.json greedy.json
    kvalloc diff uniform.json greedy.json --json
    """
    from kvalloc.allocation.comparison import compare_profiles

    comparison = compare_profiles(first, second)
    print_result({"same": comparison.same, **vars(comparison)}, lambda: _show(comparison))


def _show(comparison: ProfileDifference) -> None:
    before, after = comparison.retained_bytes
    print_fields(
        {
            "bytes": f"{size(before)} -> {size(after)} ({(after - before) / before:+.1%})",
            "retention": " -> ".join(number_text(value, ".6f") for value in comparison.retention),
            "moved": f"{comparison.moved_entries:,} entries to other layers or heads",
            **{name: f"{a} -> {b}" for name, (a, b) in comparison.fields.items()},
        }
    )
    if comparison.difference.any():
        print("\n".join(difference_picture(comparison.difference.sum(axis=1))))
