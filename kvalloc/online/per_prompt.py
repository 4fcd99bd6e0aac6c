"""Budgets decided from each prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import numpy as np
from torch import nn

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import full_bytes
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.errors import InfeasibleError, InputError, UnsupportedRequestError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.measure.profiling import prompt_scores
from kvalloc.models.structure import decoder_of
from kvalloc.online.decision import Decision, PromptSize
from kvalloc.problem.registry import get_solver
from kvalloc.runtime.making import Way
from kvalloc.runtime.options import CacheOptions
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.shape import ModelShape

NOT_OF_A_PROMPT = RequestOptions.__annotations__.keys() - {
    *("target_retention", "target_loss", "budget", "budget_tokens", "memory"),
    *("level", "min_tokens", "max_tokens", "page"),
}
"""Options of a request that have no meaning for one prompt."""


class PromptOptions(RequestOptions, total=False):
    """The target for each prompt, and how it is measured and decided.

    Options of a request: a target other than a loss, `level`, `min_tokens`,
    `max_tokens` and `page`.
    """

    solver: str | None
    """Solver, also with options such as ``"adaptive_head:safeguard=floor"``; ``"auto"`` by
    default."""

    scorer: str | None
    """Scorer that is measured, and that ranks the entries unless another policy is named, also with
    parameters such as ``"snapkv:window=32"``; ``"xkv"`` by default."""

    sinks: int | None
    """First tokens, never evicted; 4 by default."""


@dataclass(frozen=True, kw_only=True)
class PromptTarget(Decision):
    """Budgets decided from each prompt, within its first forward.

    A mini-prefill measures retention curves, the solver decides, and the prompt is prefilled with
    eviction. That takes about another prefill's time, at a reduced one's peak memory. The cache's
    ``profile`` or ``row_profiles`` is the decision, ``decision_seconds`` its time.

    Raises
    ------
    InputError
        For an unknown solver or negative `sinks`.
    UnsupportedRequestError
        If the scorer needs a second read.

    References
    ----------
    XKV, Section IV-A.
    """

    request: Request
    scorer: Scorer
    sinks: int = 4
    solver: str = "auto"

    def __post_init__(self) -> None:
        get_solver(self.solver)
        if self.sinks < 0:
            raise InputError(f"sinks is {self.sinks!r}, expected a number of tokens >= 0")
        self.scorer.check_prompt_only()

    @classmethod
    def parse(
        cls, *, options: CacheOptions | None = None, **keywords: Unpack[PromptOptions]
    ) -> Self:
        """Read `PromptOptions`; refuse other options of a request."""
        options_set: dict[str, Any] = {
            name: value for name, value in keywords.items() if value is not None
        }
        if unknown := sorted(NOT_OF_A_PROMPT & options_set.keys()):
            raise InputError(
                f"{option(unknown[0])} cannot be asked of each prompt; leave it out, or decide "
                "once with 'kvalloc solve' and apply the profile"
            )
        return cls(
            request=Request.parse(**options_set),
            scorer=get_scorer(options_set.get("scorer", "xkv")),
            sinks=options_set.get("sinks", cls.sinks),
            solver=options_set.get("solver", cls.solver),
            options=options or CacheOptions(),
        )

    def ways(self, model: Any, shape: ModelShape, size: PromptSize) -> list[Way]:
        """Return each row's own budgets; equal rows, such as beams, share them.

        Raises
        ------
        UnsupportedRequestError
            If token ids are unknown.
        InfeasibleError
            If the target cannot be reached.
        """
        whole = self.options.with_policy(self._whole(shape))
        options = replace(self.options, policy=None)  # it is the profile's now
        if not size.tokens:  # none has come: checked, and nothing more
            return [Way(profile=whole, options=options)]
        if not size.rows:
            raise UnsupportedRequestError(
                "budgets of a prompt are decided from its token ids, but the decoder got "
                f"embeddings; name {option('budget', '20%')} alone, or use a stored profile"
            )
        request = replace(self.request, batch=len(size.rows))
        columns = max(size.tokens, *(row.size for row in size.rows))
        ways: dict[bytes, Way] = {}
        for row in size.rows:
            if row.tobytes() not in ways:
                profile = self._decided(request, whole, decoder_of(model), row, columns)
                ways[row.tobytes()] = Way(profile=profile, options=options, once=True)
        return [ways[row.tobytes()] for row in size.rows]

    def _whole(self, shape: ModelShape) -> BudgetProfile:
        """Return a too short prompt's profile; it evicts beyond the requested size."""
        target, context = self.request.target, self.sinks + self.scorer.window
        steering = target.steering()
        if target.kind == "budget":
            steering["share_of_16_bits"] = target.value
        elif target.kind == "budget_tokens":
            steering["length_rule"], context = "fixed", max(int(target.value), context)
        return BudgetProfile(
            shape=shape,
            level=self.request.level,
            context_tokens=context,
            budgets=np.full((shape.n_layers, shape.n_kv_heads), context, dtype=np.int64),
            policy=self.scorer.policy(self.sinks),
            requested={"target": target.kind, "value": target.value},
            **steering,
            detail="keeps the prompt whole, which is too short to leave any out",
        )

    def _decided(
        self,
        request: Request,
        whole: BudgetProfile,
        decoder: nn.Module,
        row: IntArray,
        columns: int,
    ) -> BudgetProfile:
        shape, target = whole.shape, request.target
        if row.size <= whole.context_tokens:
            everything = full_bytes(shape, row.size, request.batch)
            if target.kind == "memory" and everything > target.value:
                raise InfeasibleError(
                    f"{target} is below the {everything:,} bytes of a prompt that leaves nothing "
                    "to evict"
                )
            return whole
        scores = prompt_scores(decoder, row, scorer=self.scorer, sinks=self.sinks, shape=shape)
        posed = PosedRequest(scores=scores, request=request, columns=columns)
        try:
            posed.problem.check_feasible()
        except InfeasibleError:
            if target.is_fixed:
                raise
            return whole  # of a longer prompt the same share would hold sinks and window
        return decide(posed, get_solver(self.solver), priced=False).with_policy(whole.policy)
