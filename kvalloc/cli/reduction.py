"""How a prompt's cache is reduced, as typed, and what was kept of the prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from kvalloc.allocation.request import TARGETS, RequestOptions
from kvalloc.cli.options import FittedOptions, LoadOptions, ModelArgument
from kvalloc.cli.output import is_verbose, note
from kvalloc.cli.progress import load
from kvalloc.errors import InputError
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel

BUDGETS, KEPT = "Budgets", "Which entries stay"
"""Headings in the help."""

OF_A_PROMPT: dict[type, Collection[str]] = {RequestOptions: (*TARGETS, "level")}
"""What of a request can be decided from one prompt."""


@dataclass(frozen=True, kw_only=True)
class Reduction(FittedOptions, LoadOptions, ModelArgument):
    """How the cache of a model's prompts is reduced, beside the target of each prompt."""

    profile: Annotated[str | None, Option("P.json", BUDGETS)] = None
    """A budget profile, or a shipped one's name."""

    solver: Annotated[str | None, Option("NAME", BUDGETS)] = None
    """Solver, or module:Class, with its options after colons, such as ilp:gap=0.001; see 'kvalloc
    list solvers'."""

    policy: Annotated[str | None, Option("NAME", KEPT)] = None
    """Pick the entries in another way within the same budgets: a policy, or a scorer whose best
    stay; see 'kvalloc list policies'. Its parameters after colons, such as nacl:seed=1."""

    decode_every: Annotated[int | None, Option("N", KEPT, least=1)] = None
    """Evict again every N tokens that follow the prompt; every 64 or more by default."""

    lossless: Annotated[bool, Option("", KEPT)] = False
    """Answer as the full cache does: it verifies what the reduced cache drafts."""

    def check(self, target: Mapping[str, Any]) -> None:
        """Refuse options that exclude each other, or do not say how a prompt is reduced.

        Raises
        ------
        InputError
        """
        names = given_names({**vars(self), **target})
        check_conflicts(names)
        if not {*TARGETS, "profile", "cache", "document"} & names:
            raise InputError(
                "say how much to keep with --budget 20%, of which 100% is the full cache, or which "
                "budgets to use with --profile P.json"
            )

    def load(self, target: Mapping[str, Any]) -> tuple[LoadedModel, Callable[[Sequence[int]], Any]]:
        """Load the model, after everything that can be refused without it.

        Parameters
        ----------
        target : mapping
            What was typed of the target of each prompt.

        Returns
        -------
        tuple of LoadedModel and callable
            The model, and what makes an empty cache for a prompt of these tokens.

        Raises
        ------
        KVAllocError
            If model and budgets do not fit, or the policy cannot be made.
        """
        from kvalloc.models.loading import require_run_packages

        require_run_packages()
        import numpy as np

        from kvalloc.extensions.lossless import verify_with
        from kvalloc.online.application import cache_maker
        from kvalloc.online.prompt_size import UNKNOWN, PromptSize
        from kvalloc.runtime.options import CacheOptions

        names = ("policy", "decode_every", "allow_other_model", "fitted")
        options = CacheOptions(**{name: getattr(self, name) for name in names})
        make = cache_maker(self.profile, options, **target, solver=self.solver)
        loaded = load(self.model, self)
        if self.profile is not None:
            make(loaded.model, UNKNOWN)  # of another model it is refused before all reading

        def made(ids: Sequence[int]) -> Any:
            size = PromptSize(tokens=len(ids), rows=(np.array(ids, dtype=np.int64),))
            cache = make(loaded.model, size)
            if self.lossless:
                verify_with(cache, loaded.model)
            return cache

        return loaded, made


def note_way(cache: Any, reduction: Reduction, target: Mapping[str, Any], n_tokens: int) -> None:
    """Say which way the default took for these tokens, unless ``--verbose`` says it already."""
    from kvalloc.online.default import Default

    how = {name: getattr(reduction, name) for name in ("profile", "policy", "solver")}
    if Default.applies(**how, **target) and not is_verbose():
        note(f"{n_tokens:,} tokens: {cache.profile.detail}")


def note_whole(cache: Any, n_tokens: int) -> None:
    """Say so if nothing of a prompt was evicted."""
    kept = cache.kept_tokens[list(cache.profile.shape.full_layers)]
    if (kept >= cache.get_seq_length()).all():
        note(f"note: these budgets leave nothing out of {n_tokens:,} tokens: everything is kept")


def cache_facts(cache: Any) -> dict[str, Any]:
    """Return what a cache stores, and the target that it was decided for, for ``--json``.

    Parameters
    ----------
    cache : BudgetCache
        After the prompt.

    Returns
    -------
    dict
        ``policy``, ``scorer``: who picks the entries; ``requested``: the target of budgets that
        were decided for this prompt, ``retention``: what they reach of it,
        ``decision_seconds``: how long that took; ``granted_bytes``: what the budgets allow of all
        that was read, or the memory where that is the target; ``share``: what is stored of it, of a
        cache at 16 bits; ``retained_bytes``, ``full_bytes``: what is stored now, and what a full
        cache would store; ``lossless``: what verifying took, None where nothing is
        verified.
    """
    profile: BudgetProfile = cache.profile
    is_decided = cache.decision_seconds is not None
    requested = {name: profile.requested.get(name) for name in ("target", "value")}
    granted = profile.retained_bytes_at(cache.get_seq_length())
    return {
        "policy": profile.policy.name,
        "scorer": profile.policy.scorer,
        "requested": requested if is_decided else None,
        "retention": profile.retention if is_decided else None,
        "decision_seconds": cache.decision_seconds,
        "granted_bytes": requested["value"] if is_decided and profile.fits_a_peak else granted,
        "share": cache.share,
        "retained_bytes": cache.retained_bytes,
        "full_bytes": cache.full_bytes,
        "lossless": None if cache.verifier is None else cache.verifier.facts,
    }
