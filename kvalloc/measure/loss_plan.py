"""How losses are measured beside retention: by which method, and with which policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, option
from kvalloc.formats.policy import Policy
from kvalloc.problem.registry import SCORERS, names, plugin_options, read_named

if TYPE_CHECKING:
    from kvalloc.scorers import Scorer

LossLevel = Literal["layer", "head"]
LossMethod = Literal["measured", "fast"]

DEFAULT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Shares of the evictable entries that a unit is reduced to, besides keeping all of them."""


@dataclass(frozen=True, kw_only=True)
class LossPlan:
    """How losses are measured.

    Attributes
    ----------
    method : {"measured", "fast"}
        A forward for every unit and level, or the second-order estimate from one backward pass.
    level : {"layer", "head"}
        What is reduced alone.
    shares : tuple of float
        Shares of the evictable entries that each unit is reduced to.
    continuation_tokens : int
        Tokens after the prompt on which the distributions are compared, at most.
    policies : tuple of str
        Policies whose losses are measured beside those of the scorer's best entries, as
        `named_policies` reads them.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    method: LossMethod = "measured"
    level: LossLevel = "layer"
    shares: tuple[float, ...] = DEFAULT_SHARES
    continuation_tokens: int = 24
    policies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("method", LossMethod), ("level", LossLevel)):
            if getattr(self, name) not in get_args(choices):
                raise InputError(
                    f"the loss {name} is {getattr(self, name)!r}, expected "
                    f"{' or '.join(get_args(choices))}"
                )
        if self.continuation_tokens < 1:
            raise InputError("a loss needs a continuation of at least 1 token")
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise InputError(
                f"the loss levels {self.shares} are not shares within 0..1; give some such"
            )

    def levels(self, context_tokens: int, protected_tokens: int) -> IntArray:
        """Return the budgets at which losses are measured.

        Parameters
        ----------
        context_tokens, protected_tokens : int
            Reference context; sinks and window, which every budget includes.

        Returns
        -------
        ndarray of int64, (n_levels,)
            Rising; the last one is the context.
        """
        evictable = context_tokens - protected_tokens
        tokens = [protected_tokens + round(share * evictable) for share in self.shares]
        return np.unique([*tokens, context_tokens]).astype(np.int64)

    def record(self) -> dict[str, Any]:
        """Return what decides the numbers, as plain values."""
        return asdict(self)


FOLLOWED = ("pool", "pooling", "group_reduce")
"""Options that a policy's scorer takes over from the score profile's, unless they are given."""

USUAL = ("critical", "tova", "snapkv:window=1:pool=1")
"""What the word ``usual`` stands for: rankings that differ, and are each the best of many heads
(docs/studies.md has the figures)."""


def named_policies(texts: Sequence[str], scorer: Scorer, *, sinks: int) -> tuple[Policy, ...]:
    """Return the policies that some texts name, all with the same sinks and window.

    A text is the name of a policy, which ranks by the profile's scorer, or of a scorer, whose
    best entries stay; then its options as ``:KEY=VALUE``, such as ``snapkv:window=4:pool=1``. A
    policy's text can name options of the scorer, too (``critical:window=4``). Pooling and window
    are the profile's unless they are given. The text ``usual`` stands for several.

    Parameters
    ----------
    texts : sequence of str
        As typed; they become the policies' labels.
    scorer : Scorer
        The score profile's. A text that asks for its best entries is left out, since those are
        measured in any case.
    sinks : int
        Of the score profile.

    Returns
    -------
    tuple of Policy

    Raises
    ------
    InputError
        If there is no such policy, scorer or option, a text is given twice, or a scorer looks at
        more of the last tokens than the profile's window.
    UnsupportedRequestError
        If a policy does more than choose what is kept.
    """
    main = scorer.policy(sinks)
    policies: list[Policy] = []
    stripped = (text.strip() for text in texts)
    for text in chain.from_iterable(USUAL if name == "usual" else (name,) for name in stripped):
        policy = _named(text, main, scorer)
        if policy.replace(label="") == main:
            continue
        same = next((one for one in policies if one.replace(label=policy.label) == policy), None)
        if same is not None:
            raise InputError(
                f"{policy.label!r} and {same.label!r} are the same policy; name it once"
            )
        policies.append(policy)
    return tuple(policies)


def _named(text: str, main: Policy, scorer: Scorer) -> Policy:
    from kvalloc.runtime.policies import changed_policy, policy_names, policy_of
    from kvalloc.runtime.policies.by_head import check_chooses_only

    name, options = read_named(text)
    if name in policy_names():
        policy = _with_scorer_options(name, options, main, scorer)
    else:
        policy = changed_policy(main, name, {**_followed(name, main), **options})
    policy = policy.replace(label=text)
    if (least := policy.scorer_parameters.get("window", 0)) > main.window:
        raise InputError(
            f"the policy {text!r} looks at the last {least} tokens, but the score profile protects "
            f"a window of {main.window}; profile with "
            f"{option('scorer', f'{scorer.name}:window={least}')}, or give it a smaller one"
        )
    built = policy_of(policy)
    check_chooses_only(built)
    return policy.replace(parameters=dict(built.parameters()))


def _with_scorer_options(
    name: str, options: dict[str, Any], main: Policy, scorer: Scorer
) -> Policy:
    from kvalloc.runtime.policies import changed_policy, policy_class
    from kvalloc.scorers import get_scorer

    mine = plugin_options(policy_class(name))
    of_scorer = {key: value for key, value in options.items() if key not in mine}
    if of_scorer:
        other = get_scorer(scorer.name, **{**main.scorer_parameters, **of_scorer})
        main = main.replace(scorer_parameters=dict(other.parameters()))
    return changed_policy(main, name, {key: options[key] for key in options if key in mine})


def _followed(name: str, main: Policy) -> dict[str, Any]:
    """Return the profile's pooling, as far as a scorer has any."""
    from kvalloc.scorers import scorer_class

    if name not in names(SCORERS):
        return {}  # an unknown scorer is refused where it is looked up
    if not scorer_class(name).follows:
        return {}
    takes = plugin_options(scorer_class(name))
    given = main.scorer_parameters
    return {key: given[key] for key in FOLLOWED if key in given and key in takes}
