"""``--peer`` of ``kvalloc eval``: which presses, at which share of the entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.evaluate.methods import Method
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.interop.kvpress import PeerName


def read_peers(texts: Sequence[str], profiles: Iterable[BudgetProfile]) -> list[PeerName]:
    """Read what was typed, and refuse it before a model is loaded.

    Parameters
    ----------
    texts : sequence of str
        Such as ``kvpress:SnapKV`` or ``kvpress:TOVA@20%``.
    profiles : iterable of BudgetProfile
        What they are compared to: a peer without a share keeps what these keep, once for each
        share that differs by a thousandth of the entries.

    Returns
    -------
    list of PeerName
        Each with its share, none twice.

    Raises
    ------
    InputError
        If a name is none, or there is neither a share nor a profile.
    MissingDependencyError
        If kvpress is not installed here.
    """
    from kvalloc.interop.kvpress import make_press, read_peer_name

    shares = sorted({_share(profile) for profile in profiles}, reverse=True)
    names: list[PeerName] = []
    for text in texts:
        name = read_peer_name(text)
        if name.share is None and not shares:
            raise InputError(
                f"{name} has nothing to be compared to at equal entries; give a --profile, or a "
                f"share: {name}@20%"
            )
        make_press(name)
        wanted = shares if name.share is None else [name.share]
        names += [replace(name, share=share) for share in wanted]
    return list(dict.fromkeys(names))


def peer_methods(names: Sequence[PeerName], tokenizer: Any) -> dict[str, Method]:
    """The peers, by what they are called in the table; each prompt is read once for all."""
    from kvalloc.interop.kvpress import KvpressMethod, PromptReader

    reader = PromptReader()
    path = getattr(tokenizer, "name_or_path", None)
    return {
        str(name): KvpressMethod(name=name, reader=reader, tokenizer_path=path) for name in names
    }


def _share(profile: BudgetProfile) -> float:
    """Share of all entries that a profile keeps, in thousandths."""
    return round(profile.retained_tokens / (profile.budgets.size * profile.context_tokens), 3)
