"""Options of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.runtime.policies import changed_policy


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Options that `kvalloc.apply` and the command line pass to the cache.

    Attributes
    ----------
    policy : str or Policy, optional
        Replaces the profile's: a policy, or the name of a policy or scorer, also with parameters,
        ``"nacl:seed=1"``; see `kvalloc.runtime.policies.changed_policy`.
    decode_every : int, optional
        Tokens after which kept and new entries are ranked together, within the budget of all tokens
        seen; by default 64, or a sixteenth of these. 1 keeps the budget at every token.
    by_layer : bool
        For budgets by prompt: share them among each layer's heads as it is read. Otherwise all
        layers share them, and the whole prompt stays in memory until its end.
    allow_other_model : bool
        Accept the profile of another model of the same sizes, such as a fine-tune.
    memory : int, optional
        Bytes that the cache never exceeds, in conversations of any length.
    fitted : str or Path, optional
        For the default: a file of ``kvalloc fit``, instead of the cache folder's.
    across : {"rows"}, optional
        For the default: a batch's rows share all bytes by predicted losses.
    """

    policy: str | Policy | None = None
    decode_every: int | None = None
    by_layer: bool = False
    allow_other_model: bool = False
    memory: int | None = None
    fitted: str | Path | None = None
    across: Literal["rows"] | None = None

    def with_policy(self, profile: BudgetProfile) -> BudgetProfile:
        """Return the profile with the named policy, if any."""
        policy = self.policy
        if isinstance(policy, str):
            return profile.with_policy(changed_policy(profile.policy, policy))
        if not isinstance(policy, Policy | None):
            raise InputError(
                f"policy is {policy!r}; name a policy or a scorer, or give a Policy, as of a "
                "profile"
            )
        return profile if policy is None else profile.with_policy(policy)
