"""Policies: which entries stay within the budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvalloc.errors import InputError, no_such
from kvalloc.formats.budget_profile import Policy
from kvalloc.problem.registry import (
    POLICIES,
    SCORERS,
    build,
    load,
    names,
    read_named,
    typed_options,
)
from kvalloc.runtime.policies.base import EvictionPolicy
from kvalloc.scorers import Scorer, get_scorer


def policy_names() -> list[str]:
    """Return the sorted names of all registered policies, without importing them."""
    return names(POLICIES)


def policy_class(name: str) -> type[EvictionPolicy]:
    """Return the class of a registered policy.

    Raises
    ------
    InputError
        If there is no such policy.
    SolverError
        If the plug-in cannot be imported or is not a policy.
    """
    return load(POLICIES, name, EvictionPolicy)


def get_policy(name: str, *, scorer: Scorer, **parameters: Any) -> EvictionPolicy:
    """Return a policy by name; see `policy_class`.

    Raises
    ------
    InputError
        If a name or value is wrong; lists the choices.
    """
    return build(policy_class(name), parameters, what=f"policy {name}", scorer=scorer)


def policy_of(policy: Policy) -> EvictionPolicy:
    """Return the policy that a budget profile names, with its scorer.

    Raises
    ------
    InputError
        If it cannot be built, or its scorer reads beyond its window.
    """
    scorer = get_scorer(policy.scorer, **policy.scorer_parameters)
    if scorer.window > policy.window:
        raise InputError(
            f"the scorer {policy.scorer} looks at the last {scorer.window} tokens, but the "
            f"profile's policy protects a window of {policy.window}; they must agree"
        )
    return get_policy(policy.name, scorer=scorer, **policy.parameters)


def changed_policy(policy: Policy, name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Return another policy with the same sinks and window, so budgets still fit.

    Parameters
    ----------
    name : str
        A policy, which keeps the profile's scorer, or a scorer, for the policy ``score``.
        Parameters may follow: ``"critical:alpha=0.25"``.
    options : mapping, optional
        More parameters; a scorer's default window is the profile's.

    Raises
    ------
    InputError
        If nothing has that name; lists all.
    """
    name, named = read_named(name)
    parameters = {**named, **(options or {})}
    if name in policy_names():
        typed = typed_options(policy_class(name), parameters, what=f"policy {name}")
        return policy.replace(name=name, parameters=typed)
    if name not in names(SCORERS):
        known = (*policy_names(), *names(SCORERS))
        raise InputError(no_such("policy or scorer", name, known))
    scorer = get_scorer(name, **{"window": max(policy.window, 1), **parameters})
    return policy.replace(
        scorer=name,
        scorer_parameters=dict(scorer.parameters()),
        name="score",
        parameters={},
    )
