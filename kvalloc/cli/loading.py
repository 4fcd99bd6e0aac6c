"""Loading the model of a command, with a note where it takes a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.cli.output import note

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

__all__ = ["load"]


def load(model: str, *, dtype: str, device: str | None, quiet: bool) -> LoadedModel:
    """The model that the user named.

    Raises
    ------
    KVAllocError
        If it cannot be had, or not in this dtype or on this device.
    """
    from kvalloc.cli.progress import slow
    from kvalloc.models.loading import load_model

    with slow(f"loading {model}", quiet=quiet):
        return load_model(
            model, dtype=dtype, device=device, notify=lambda line: note(line, quiet=quiet)
        )
