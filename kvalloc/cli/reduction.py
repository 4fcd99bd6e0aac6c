"""What says on the command line how a prompt's cache is reduced, and what was kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.cli.options import MODEL
from kvalloc.cli.output import SLID_OUT, is_verbose, note
from kvalloc.cli.progress import load
from kvalloc.cli.values import typed_options
from kvalloc.errors import InputError, option
from kvalloc.online.conflicts import TARGET, check_conflicts
from kvalloc.units import Option, share_text, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel
    from kvalloc.runtime import CacheOptions
    from kvalloc.shape import ModelShape

BUDGETS, KEPT = "Budgets", "Which entries stay"
"""Headings in the help."""

OF_A_PROMPT = (*(kind.keyword for kind in TARGETS if kind.keyword != "target_loss"), "level")
"""What of a request can be decided from one prompt: it has no loss curves."""

_PICKING = ("policy", "policy_option", "decode_every", "bounded", "surrogate")
_REDUCING = (*OF_A_PROMPT, "profile", "full", "solver", *_PICKING)
"""Options that say how a prompt is reduced: a saved cache was reduced when it was saved."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """How the cache of a model's prompts is reduced, as typed.

    Attributes
    ----------
    profile : str
        A budget profile, or the name of a shipped one.
    solver : str
        Who decides a target for the prompt.
    full : bool
        Use the full cache, to compare with.
    policy : str
        Pick the entries in another way within the same budgets: a policy, or a scorer whose best
        stay; see 'kvalloc list policies'.
    policy_option : sequence of str
        A parameter of `policy`.
    decode_every : int
        Keep the budget while answering, too: go back to it every N tokens. By default the answer
        is never evicted.
    bounded : bool
        Where the policy looks at what follows the prompt: keep twice the budgets until then instead
        of the whole prompt. Where each prompt hands the budgets out and nothing is waited for, each
        layer hands out its own.
    surrogate : str
        With a budget and nothing else: what 'kvalloc fit-scorer' wrote for the model, which spares
        a second read of the prompt. By default the one that ships for the model, if any.
    allow_other_model : bool
        Accept a profile of a model of the same sizes.
    dtype : str
        Of weights and cache: float32, bfloat16 or float16. float32 by default, and with a saved
        cache what it was saved in.
    device : str
        Such as cuda:0; the CPU by default.
    """

    model: str
    typed: Mapping[str, Any]
    """Every option that was typed, also those of a target."""

    profile: Annotated[str | None, Option("P.json", BUDGETS)] = None
    solver: Annotated[str | None, Option("NAME", BUDGETS)] = None
    full: Annotated[bool, Option("", BUDGETS)] = False
    policy: Annotated[str | None, Option("NAME", KEPT)] = None
    policy_option: Annotated[Sequence[str], Option("KEY=VALUE", KEPT)] = ()
    decode_every: Annotated[int | None, Option("N", KEPT, least=1)] = None
    bounded: Annotated[bool, Option("", KEPT)] = False
    surrogate: Annotated[Path | None, Option("FILE", KEPT)] = None
    allow_other_model: Annotated[bool, Option("", MODEL)] = False
    dtype: Annotated[str | None, Option("NAME", MODEL)] = None
    device: Annotated[str | None, Option("NAME", MODEL)] = None

    @classmethod
    def of(cls, model: str, typed: Mapping[str, Any]) -> Self:
        """Make it of everything that was typed."""
        names = {field.name for field in fields(cls)} & {*typed}
        return cls(model=model, typed=typed, **{name: typed[name] for name in names})

    @property
    def target(self) -> RequestOptions:
        """Return what was typed of a request."""
        return {name: self.typed[name] for name in OF_A_PROMPT if name in self.typed}  # type: ignore[return-value]

    @property
    def by_default(self) -> bool:
        """Return whether a budget is all that is typed of how a prompt is reduced."""
        reducing = {*_REDUCING} & {*self.typed}
        of_default = {"budget", "memory", "decode_every", "bounded", "surrogate"}
        return "budget" in reducing and reducing <= of_default

    def given(self, *names: str) -> list[str]:
        """Return those of some options that were typed, as flags."""
        return [option(name) for name in names if name in self.typed]

    def check(self) -> None:
        """Refuse options that exclude each other, and a prompt without budgets.

        Raises
        ------
        InputError
        """
        check_conflicts(self.typed)
        if not self.given(*TARGET, "profile", "full", "cache"):
            raise InputError(
                "say which budgets to use with --profile P.json, decide them for the prompt with "
                "--target-retention 0.9, or take the full cache with --full"
            )


def load_with_caches(reduction: Reduction) -> tuple[LoadedModel, Callable[[int], Any]]:
    """Load the model, after everything that can be refused without it.

    Returns
    -------
    tuple of LoadedModel and callable
        The model, and what makes an empty cache for a prompt of that many tokens, once.

    Raises
    ------
    KVAllocError
        If model and budgets do not fit, or the policy cannot be made.
    """
    from kvalloc.formats.shipped_profiles import load_profile
    from kvalloc.models.loading import require_run_packages

    profile = None if reduction.profile is None else load_profile(reduction.profile)
    if reduction.target and not reduction.by_default:
        Request.parse(**reduction.target)
    require_run_packages()
    from kvalloc.runtime import CacheOptions

    options = CacheOptions(
        policy=reduction.policy,
        policy_options=_policy_options(reduction, profile),
        decode_every=reduction.decode_every,
        bounded=reduction.bounded,
        allow_other_model=reduction.allow_other_model,
        surrogate=reduction.surrogate,
    )
    if reduction.by_default:
        from kvalloc.online.default import Default

        default = Default.parse(**reduction.target, options=options)
        loaded = load(reduction.model, reduction.typed)
        return loaded, lambda tokens: default.cache(loaded.model, tokens)
    loaded = load(reduction.model, reduction.typed)
    cache = _cache(reduction, loaded.model, profile, options)
    return loaded, lambda tokens: cache


def _cache(
    reduction: Reduction, model: Any, profile: BudgetProfile | None, options: CacheOptions
) -> Any:
    """Make a cache that is the same for a prompt of any length."""
    if reduction.full:
        from transformers import DynamicCache

        return DynamicCache(config=model.config)
    if profile is not None:
        from kvalloc.runtime.making import build_cache

        return build_cache(model, profile, options)
    from kvalloc.online.per_prompt import PromptTarget, make_prompt_cache

    target = PromptTarget.parse(**reduction.target, solver=reduction.solver)
    return make_prompt_cache(model, target, options)


def _policy_options(reduction: Reduction, profile: BudgetProfile | None) -> dict[str, Any]:
    """Return the policy's parameters, each of its type.

    Raises
    ------
    InputError
        If the policy cannot be made of them.
    """
    if reduction.policy is None:
        return dict.fromkeys(reduction.policy_option)  # which belong to a policy
    from kvalloc.formats.budget_profile import Policy
    from kvalloc.problem.registry import SCORERS, names, plugin_options
    from kvalloc.runtime.policies import changed_policy, policy_class, policy_names, policy_of
    from kvalloc.scorers import scorer_class

    name, policies, options = reduction.policy, policy_names(), {}
    if name in (*policies, *names(SCORERS)):
        known = plugin_options(policy_class(name) if name in policies else scorer_class(name))
        known.pop("scorer", None)
        options = typed_options("policy", name, known, [*reduction.policy_option], example="seed=1")
    some_policy = Policy(scorer="xkv", scorer_parameters={}, sinks=4, window=8)
    policy = some_policy if profile is None else profile.policy
    policy_of(changed_policy(policy, name, options))
    return options


def model_shape(loaded: LoadedModel) -> ModelShape:
    """Return the shape of a loaded model."""
    from kvalloc.models.loading import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id)


def note_way(cache: Any, reduction: Reduction) -> None:
    """Say which way the default took, unless ``--verbose`` says it already."""
    if reduction.by_default and not is_verbose():
        note(cache.profile.detail)


def note_whole(cache: Any, n_tokens: int) -> None:
    """Say why nothing of a prompt was evicted: it is too short, or too little has followed it."""
    if getattr(cache, "reduced", True):
        return
    if awaited := cache.awaited_tokens:
        note(
            f"note: nothing is evicted yet: these budgets wait until {awaited} more "
            f"token{'s have' if awaited > 1 else ' has'} followed the prompt"
        )
        return
    note(
        f"note: of a prompt of {n_tokens:,} token{'s' if n_tokens > 1 else ''} these budgets "
        "leave nothing out: everything is kept",
    )


def cache_facts(loaded: LoadedModel, cache: Any, prompt_tokens: int) -> dict[str, Any]:
    """Return what a cache holds, and the target that it was decided for, for ``--json``.

    Parameters
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        After the prompt.
    prompt_tokens : int

    Returns
    -------
    dict
        ``policy``, ``scorer``, ``other_policies``: who picks the entries; ``requested``: the
        target of budgets that were decided for this prompt; ``retention``: what they reach of it,
        where that is known; ``granted_bytes``: what the budgets allow a prompt of this length;
        ``share``: what is stored of it, of a cache at 16 bits;
        ``retained_bytes``, ``full_bytes``: what is stored now, and what a full cache would store.
        None where there is none, as of a full cache.
    """
    from kvalloc.evaluate.caches import full_bytes, stored_bytes

    profile: BudgetProfile | None = getattr(cache, "profile", None)
    decided = _decided_profile(cache)
    requested = {} if decided is None else decided.requested
    known = {name: requested[name] for name in ("target", "value") if name in requested}
    return {
        "policy": None if profile is None else profile.policy.name,
        "scorer": None if profile is None else profile.policy.scorer,
        "other_policies": [] if profile is None else [one.title for one in profile.other_policies],
        "requested": None if decided is None else known,
        "retention": None if decided is None else decided.retention,
        "granted_bytes": None if profile is None else profile.retained_bytes_at(prompt_tokens),
        "share": getattr(cache, "share", 1.0),
        "retained_bytes": stored_bytes(cache),
        "full_bytes": full_bytes(cache, model_shape(loaded)),
    }


def kept_text(cache: Any, share: float, retained_bytes: int, full_bytes: int) -> str:
    """Return the target, what is kept of a prompt, and its bytes, in words.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    share : float
        Of a cache at 16 bits; see `kvalloc.runtime.cache.BudgetCache.share`.
    retained_bytes, full_bytes : int
        Of the prompt alone, stored and by a full cache.
    """
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    if profile is None:
        since = f", since {SLID_OUT}" if retained_bytes > full_bytes else ""
        return f"everything, {size(retained_bytes)}{since}"
    target, decided = profile.target_text, _decided_profile(cache)
    if decided is not None and decided.retention is not None:
        target = f"{target} (retention {decided.retention:.4f} reached)"
    elif target and profile.share_of_16_bits is None and decided is None:
        # decided at one length: sinks and window weigh more in a shorter prompt
        target += f" at {profile.context_tokens:,} tokens"
    return f"{share_text(share, target)}, {size(retained_bytes)} instead of {size(full_bytes)}"


def _decided_profile(cache: Any) -> BudgetProfile | None:
    """Return budgets that were decided for this prompt; None of stored ones and a full cache."""
    decided = getattr(cache, "decision_seconds", None) is not None
    return getattr(cache, "profile", None) if decided else None
