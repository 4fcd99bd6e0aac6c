"""Which cache a run is asked for: full, of stored budgets, or of budgets for each prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError, nearest

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel

_TARGETS = ("target_retention", "budget", "budget_tokens", "memory")


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """What was asked for, as typed.

    Attributes
    ----------
    profile : str or None
        A budget profile's file or name.
    full : bool
        Take the full cache.
    target : dict
        What each prompt is to reach: at most one of target_retention, budget, budget_tokens,
        memory, and level and solver where they were given.
    adapt, measured_tokens, hold
        How a prompt counts; see `kvalloc.online.per_prompt`.
    policy : str or None
    policy_option : list of str
        Parameters of the policy, ``KEY=VALUE``.
    decode_every : int or None
    allow_other_model : bool

    Raises
    ------
    InputError
        If they contradict each other.
    """

    profile: str | None = None
    full: bool = False
    target: dict[str, Any] = field(default_factory=dict)
    adapt: float | None = None
    measured_tokens: int | None = None
    hold: bool = False
    policy: str | None = None
    policy_option: list[str] = field(default_factory=list)
    decode_every: int | None = None
    allow_other_model: bool = False

    def __post_init__(self) -> None:
        asked = [_flag(name) for name in _TARGETS if name in self.target]
        if not asked and self.target:
            raise InputError(
                f"{_flag(next(iter(self.target)))} says how a target for each prompt is decided; "
                "give one, such as --target-retention 0.9"
            )
        ways = [*asked[:1], *(["--profile"] if self.profile is not None else [])]
        if len(ways) > 1:
            raise InputError(
                f"{ways[0]} decides for each prompt and --profile was decided before; give one of "
                "them (--adapt moves a profile by the prompt)"
            )
        if not ways and not self.full:
            raise InputError(
                "say which budgets to use with --profile P.json, decide them for the prompt with "
                "--target-retention 0.9, or take the full cache with --full"
            )
        if asked and self.full:
            raise InputError(f"{asked[0]} reduces the cache and --full does not; give one of them")
        if self.policy_option and self.policy is None:
            raise InputError("--policy-option belongs to a policy; name it with --policy")
        if self.full and (self.policy is not None or self.decode_every is not None):
            raise InputError(
                "--policy and --decode-every keep to budgets; they do not go with --full"
            )
        if self.adapt is not None and (self.profile is None or self.full):
            raise InputError("--adapt moves the budgets of a --profile; give one")
        given = "--hold" if self.hold else "--measured-tokens"
        if (self.hold or self.measured_tokens is not None) and self.adapt is None and not asked:
            raise InputError(
                f"{given} is about budgets for each prompt; give it with --adapt or a target"
            )

    def budgets(self) -> BudgetProfile | None:
        """The stored budgets, if there are any.

        Raises
        ------
        KVAllocError
            If there is no such profile, or it cannot be used in this way.
        """
        if self.profile is None:
            return None
        from kvalloc.formats.shipped_profiles import load_profile

        found = load_profile(self.profile)
        if self.adapt is not None:
            from kvalloc.online.adaptation import check_adapt

            check_adapt(found, self.adapt)
        return None if self.full else found

    def check_target(self) -> None:
        """Refuse a target that cannot be, before any model is loaded."""
        if self.target:
            from kvalloc.allocation.request import Request

            values = {name: value for name, value in self.target.items() if name != "solver"}
            Request.parse(**values)

    def cache(self, loaded: LoadedModel, budgets: BudgetProfile | None) -> Any:
        """An empty cache for the model.

        Parameters
        ----------
        loaded : LoadedModel
        budgets : BudgetProfile or None
            What `budgets` gave.

        Raises
        ------
        KVAllocError
            If model and budgets do not fit, or the policy cannot be made.
        """
        if self.full:
            from transformers import DynamicCache

            return DynamicCache(config=loaded.model.config)
        picked: dict[str, Any] = {
            "policy": self.policy,
            "policy_options": self.policy_options(),
            "decode_every": self.decode_every,
        }
        if budgets is not None:
            return budgets.cache(
                loaded.model,
                allow_other_model=self.allow_other_model,
                adapt=self.adapt,
                measured_tokens=self.measured_tokens,
                hold=self.hold,
                **picked,
            )
        from kvalloc.online.per_prompt import PromptTarget, make_prompt_cache

        measured = self.measured_tokens
        target = PromptTarget.parse(**self.target, measured_tokens=measured, hold=self.hold)
        return make_prompt_cache(loaded.model, target, **picked)

    def policy_options(self) -> dict[str, Any]:
        """The policy's parameters, each of its type.

        Raises
        ------
        InputError
            If there is no such policy or parameter.
        """
        if self.policy is None:
            return {}
        from kvalloc.cli.targets import plugin_options, typed_options
        from kvalloc.problem.registry import SCORERS, names
        from kvalloc.runtime.policies import policy_class, policy_names
        from kvalloc.scorers import scorer_class

        name = self.policy
        if name not in policy_names() and name not in names(SCORERS):
            near = nearest(name, [*policy_names(), *names(SCORERS)])
            if near:
                raise InputError(
                    f"there is no policy or scorer {name!r}; {near}'kvalloc policies' and "
                    "'kvalloc scorers' list them"
                )
            return {}  # making it lists those there are
        owner = policy_class(name) if name in policy_names() else scorer_class(name)
        known = dict(plugin_options(owner))
        known.pop("scorer", None)
        return typed_options("policy", name, known, self.policy_option, example="seed=1")

    def check_policy(self, budgets: BudgetProfile | None) -> None:
        """Refuse a policy that cannot be made, before the model is loaded."""
        if self.policy is None:
            return
        from kvalloc.formats.budget_profile import Policy
        from kvalloc.runtime.policies import changed_policy, policy_of

        own = Policy(scorer="xkv", scorer_parameters={}, sinks=4, window=8)
        given = own if budgets is None else budgets.policy
        policy_of(changed_policy(given, self.policy, self.policy_options()))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
