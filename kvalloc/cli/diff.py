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

EXAMPLES = """\
  kvalloc diff uniform.json greedy.json
  kvalloc diff uniform.json greedy.json --json
"""


@takes()
def diff(first: str, second: str) -> None:
    """Show which layers keep more and which keep less in the second of two budget profiles.

    Parameters
    ----------
    first : str
        A budget profile, or a shipped one's name.
    second : str
        Another one of the same model.
    """
    from kvalloc.allocation.comparison import compare_profiles

    found = compare_profiles(first, second)
    print_result({"same": found.same, **vars(found)}, lambda: _show(found))


def _show(found: ProfileDifference) -> None:
    before, after = found.retained_bytes
    print_fields(
        {
            "bytes": f"{size(before)} -> {size(after)} ({(after - before) / before:+.1%})",
            "retention": " -> ".join(number_text(value, ".6f") for value in found.retention),
            "moved": f"{found.moved_entries:,} entries stand elsewhere",
            **{name: f"{a} -> {b}" for name, (a, b) in found.fields.items()},
        }
    )
    if found.difference.any():
        _print_picture(found.difference.sum(axis=1))


def _print_picture(layers: IntArray) -> None:
    """One line a layer: entries gained or lost over its heads, as a bar to one side or other."""
    from kvalloc.report.terminal import can_print_bars, terminal_width

    block = "█" if can_print_bars() else "#"
    half = (terminal_width() - 18) // 2
    largest = int(abs(layers).max())
    print(f"layer  {'entries':>9}  fewer{'more':>{half + 1}}")
    for layer, change in enumerate(layers.tolist()):
        drawn = block * round(abs(change) / largest * half)
        side = f"{drawn:>{half}}|" if change < 0 else f"{'':>{half}}|{drawn}"
        print(f"{layer:>5}  {change:>+9,}  {side}".rstrip())
