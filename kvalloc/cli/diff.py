"""``kvalloc diff``: where two budget profiles differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_fields, print_result
from kvalloc.report.terminal import number_text
from kvalloc.units import size

if TYPE_CHECKING:
    from kvalloc.accounting import IntArray
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
            "moved": f"{comparison.moved_entries:,} entries stand elsewhere",
            **{name: f"{a} -> {b}" for name, (a, b) in comparison.fields.items()},
        }
    )
    if comparison.difference.any():
        _print_picture(comparison.difference.sum(axis=1))


def _print_picture(layers: IntArray) -> None:
    """Print a line a layer: entries gained or lost over its heads, as a bar to one side."""
    from kvalloc.report.terminal import can_print_bars, terminal_width

    block = "█" if can_print_bars() else "#"
    half = (terminal_width() - 18) // 2
    largest = int(abs(layers).max())
    print(f"layer  {'entries':>9}  fewer{'more':>{half + 1}}")
    for layer, change in enumerate(layers.tolist()):
        drawn = block * round(abs(change) / largest * half)
        side = f"{drawn:>{half}}|" if change < 0 else f"{'':>{half}}|{drawn}"
        print(f"{layer:>5}  {change:>+9,}  {side}".rstrip())
