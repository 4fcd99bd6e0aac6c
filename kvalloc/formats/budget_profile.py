"""The decided half of the interface: budgets with their provenance, objective and bound."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.rounding import apportion
from kvalloc.accounting.stored_bytes import stored_bytes
from kvalloc.errors import InputError, ProfileFileError
from kvalloc.files import atomic_write
from kvalloc.formats.budget_checks import budget_fault
from kvalloc.formats.policy import Policy
from kvalloc.formats.sharing_groups import Groups
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

__all__ = ["SCHEMA_VERSION", "BudgetProfile", "LengthRule", "Level", "Policy", "relative_gap"]

SCHEMA_VERSION = 1

Level = Literal["layer", "head"]
LengthRule = Literal["proportional", "fixed"]


@dataclass(frozen=True, kw_only=True)
class BudgetProfile:
    """How many entries each layer and KV head keeps after prefill.

    Attributes
    ----------
    shape : ModelShape
        The model.
    level : {"layer", "head"}
        Whether all KV heads of a layer share one budget.
    context_tokens : int
        Reference context of the budgets, tokens.
    budgets : ndarray of int64, (n_layers, n_kv_heads)
        Entries each KV head keeps of ``context_tokens``, sinks and window included. Rows of
        sliding layers hold what those layers store anyway.
    ranks : ndarray of int64, (n_layers, n_kv_heads), or None
        Tensor-parallel rank of each KV head, where a placement was asked for; -1 in sliding
        layers, whose heads all store the same.
    bits : ndarray of int64, (n_layers, n_kv_heads), or None
        Bit width at which each KV head stores its entries (`kvalloc.accounting.stored_bytes`), 16
        being the model's own dtype; None where all are at 16. Sliding layers are at 16.
    length_rule : {"proportional", "fixed"}
        How budgets follow the prompt's length: the evictable part in proportion, or the same
        number of entries at any length.
    page_tokens : int
        Memory is accounted in pages of so many tokens.
    policy : Policy
        Which entries are kept.
    other_policies : tuple of Policy
        Policies of single units beside that one, with the same sinks and window.
    unit_policies : ndarray of int64, (n_layers, n_kv_heads), or None
        Which policy each KV head has: 0 for ``policy``, k for ``other_policies[k - 1]``; 0 in
        sliding layers. None where all have ``policy``.
    unit_weights : ndarray of float64, (n_layers, n_kv_heads, n_policies), or None
        Instead of ``unit_policies``: what each policy's scores count in a unit's score, their sum
        weighted by these numbers >= 0; 0 in sliding layers.
    by_prompt : bool
        The budgets say how many entries are kept in all, and each prompt hands them out among the
        KV heads by its own scores (`kvalloc.runtime.selection`); what stands in ``budgets`` is
        then what the heads had in the mean.
    solver : str
        Who was asked to decide.
    solver_options : dict
        With which options.
    decided_by : str
        Who really decided: the solver that ``auto`` picked, else the same.
    detail : str
        The solver's own line: why it was picked, its back end, its parameters.
    sense : {"max_value", "min_cost"}
        What was optimised.
    objective : float
        Value reached (``max_value``) or bytes needed (``min_cost``).
    bound : float or None
        Nothing can be better than this; None if unknown.
    bound_source : str
        What proves the bound: ``"dual"`` (recomputed by kvalloc) or the solver's name.
    termination : str
        Why the solver stopped.
    value_per_mib : float or None
        Shadow price: what one more MiB would add to the value, at the margin; None if unknown.
    price_source : str
        Where that comes from: the next entry, the dual, or solving again with a little more.
    requested : dict
        The target as asked: its name and value, and the bytes or the value it stands for.
    retention : float or None
        Predicted retention at these budgets: mean over layers of the kept share of score mass.
        With fewer bits than 16, times the fidelity that was measured.
    predicted_loss : float or None
        Predicted loss at these budgets, nats per token: the sum of the losses that were measured
        with each unit reduced alone; with a refinement, what was measured of all units together
        on the prompts that it learnt from; of a descent, that of the whole reduced cache on the
        prompts held out of it. None where no losses were measured.
    refinement : dict or None
        What refining measured: predicted and measured loss with their intervals, on which prompts,
        and every round (`kvalloc.refine`).
    cost_bytes, full_cost_bytes : int or None
        Cost of the decided layers, and of keeping everything in them, where another cost than
        stored bytes was asked for (``requested["cost"]``, `kvalloc.accounting.costs`).
    share_groups : tuple of tuple of int
        Groups of adjacent layers that keep the same entries, at one budget for each KV head.
    grouping_bound : float or None
        Where the groups were chosen: no budgets of any grouping are better than this.
    worst_sample_retention : float or None
        The same of the sample that loses most, where more than the mean of the samples counted.
    batch : int
        Rows that bytes were accounted for.
    score_digest, problem_digest : str
        What the decision was made from.
    versions : dict of str
        Versions of the libraries that decided.
    created : str
        ISO date.

    Raises
    ------
    InputError
        If budgets do not fit the model, are below sinks and window, above the context, or differ
        within a layer at layer level.
    evaluation : dict or None
        What ``kvalloc eval --into-profile`` measured with exactly these budgets: settings and rows.
    """

    shape: ModelShape
    level: Level
    context_tokens: int
    budgets: IntArray
    length_rule: LengthRule = "proportional"
    page_tokens: int = 1
    policy: Policy
    other_policies: tuple[Policy, ...] = ()
    unit_policies: IntArray | None = None
    unit_weights: FloatArray | None = None
    by_prompt: bool = False
    solver: str = ""
    solver_options: dict[str, Any] = field(default_factory=dict)
    decided_by: str = ""
    detail: str = ""
    sense: str = "max_value"
    objective: float = 0.0
    bound: float | None = None
    bound_source: str = ""
    termination: str = ""
    requested: dict[str, Any] = field(default_factory=dict)
    retention: float | None = None
    predicted_loss: float | None = None
    refinement: dict[str, Any] | None = None
    cost_bytes: int | None = None
    full_cost_bytes: int | None = None
    share_groups: Groups = ()
    grouping_bound: float | None = None
    worst_sample_retention: float | None = None
    batch: int = 1
    score_digest: str = ""
    problem_digest: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    ranks: IntArray | None = None
    value_per_mib: float | None = None
    price_source: str = ""
    bits: IntArray | None = None
    evaluation: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        fault = budget_fault(self)
        if fault is not None:
            name, found, expected = fault
            raise InputError(f"budget profile: {name} is {found}, expected {expected}")
        self.budgets.flags.writeable = False
        for array in (self.ranks, self.bits, self.unit_policies, self.unit_weights):
            if array is not None:
                array.flags.writeable = False

    @property
    def gap(self) -> float | None:
        """Relative distance between objective and bound; None without a bound."""
        return relative_gap(self.objective, self.bound)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies: the profile's own, then the others."""
        return (self.policy, *self.other_policies)

    def with_policy(self, policy: Policy) -> BudgetProfile:
        """The same budgets with one policy for all units."""
        return replace(
            self,
            policy=policy,
            other_policies=(),
            unit_policies=None,
            unit_weights=None,
            evaluation=None,
        )

    @property
    def retained_tokens(self) -> int:
        """Entries kept in all layers and KV heads of one row at the reference context."""
        return int(self.budgets.sum())

    @property
    def full_tokens(self) -> int:
        """Entries a plain cache stores for one row at the reference context."""
        return self.shape.full_bytes(self.context_tokens) // self.shape.bytes_per_entry

    @property
    def retained_bytes(self) -> int:
        """Bytes kept at the reference context and batch, in whole pages."""
        return self.retained_bytes_at(self.context_tokens, self.batch)

    @property
    def full_bytes(self) -> int:
        """Bytes a plain cache stores at the reference context and batch."""
        return self.full_bytes_at(self.context_tokens, self.batch)

    def budgets_for(self, context_tokens: int) -> IntArray:
        """Budgets for a prompt of another length.

        ``proportional``: each head keeps its share of the evictable entries; the sum over all
        heads is the sum of the real-valued shares rounded down, and the one rounding rule
        (`kvalloc.accounting.rounding.apportion`) hands it out, so no entry is lost and none is
        made up; but layers that share entries all get the smallest budget among them.
        ``fixed``: the same number of entries, or everything where the prompt is shorter.

        Parameters
        ----------
        context_tokens : int
            Length of the prompt, tokens.

        Returns
        -------
        ndarray of int64, (n_layers, n_kv_heads)

        Raises
        ------
        InputError
            If the length is not positive.
        """
        if context_tokens < 1:
            raise InputError(f"a context of {context_tokens} tokens has no budgets; ask for >= 1")
        budgets = self.budgets.copy()
        full = list(self.shape.full_layers)
        sliding = [i for i in range(self.shape.n_layers) if i not in full]
        budgets[sliding] = self.shape.sliding_entries(context_tokens)
        if context_tokens != self.context_tokens:
            budgets[full] = self._scaled(self.budgets[full], context_tokens)
            for group in self.share_groups:  # the same entries: never more than was granted
                budgets[list(group)] = budgets[list(group)].min(axis=0)
        return budgets

    def retained_bytes_at(self, context_tokens: int, batch: int = 1) -> int:
        """Bytes that these budgets keep of ``batch`` prompts of ``context_tokens`` tokens."""
        return sum(self.head_bytes_at(context_tokens).ravel().tolist()) * batch

    def head_bytes_at(self, context_tokens: int) -> IntArray:
        """Bytes that each KV head keeps of one prompt, ``(n_layers, n_kv_heads)``."""
        budgets = self.budgets_for(context_tokens)
        pages = -(-budgets // self.page_tokens) * self.page_tokens
        return stored_bytes(pages, 16 if self.bits is None else self.bits, self.shape)

    def full_bytes_at(self, context_tokens: int, batch: int = 1) -> int:
        """Bytes that a plain cache stores for the same prompts."""
        return self.shape.full_bytes(context_tokens, batch)

    def cache(
        self,
        model: PreTrainedModel,
        *,
        allow_other_model: bool = False,
        policy: str | Policy | None = None,
        policy_options: dict[str, Any] | None = None,
        decode_every: int | None = None,
        adapt: float | None = None,
        measured_tokens: int | None = None,
        hold: bool = False,
    ) -> Cache:
        """A transformers cache that keeps these budgets.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The model that will use it.
        allow_other_model : bool
            Accept a model of another name with the same sizes.
        policy : str or Policy, optional
            Another way to pick the entries within these budgets: the name of a policy, or that
            of a scorer whose best entries stay; the profile's own by default.
        policy_options : dict, optional
            Parameters of the policy or scorer that is named.
        decode_every : int, optional
            Keep the budget while decoding, too: go back to it whenever so many tokens have
            followed the prompt. By default they are never evicted.
        adapt : float, optional
            Let the prompt move the budgets: each unit's by at most this share of it, 0..1, with
            the total as it was; see `kvalloc.online.adaptation.adapt_budgets`. 0 is the stored
            profile.
        measured_tokens : int, optional
            With adapt: of a longer prompt, measure only so many tokens.
        hold : bool
            With adapt: measure nothing beforehand, but hold the prompt's full cache and decide
            from it, then evict.

        Returns
        -------
        kvalloc.runtime.BudgetCache
            Pass it as ``past_key_values``; the budgets belong to it, not to the model.

        Raises
        ------
        ModelMismatchError
            If the profile was made for another model.
        UnsupportedRequestError
            If the profile asks for what the runtime cannot do.
        InputError
            If there is no such policy, or it has no such option.
        """
        options: dict[str, Any] = {
            "allow_other_model": allow_other_model,
            "policy": policy,
            "policy_options": policy_options,
            "decode_every": decode_every,
        }
        # The core must not depend on torch: the runtime is looked up by name when it is wanted.
        where, name = "kvalloc.runtime", "make_cache"
        if adapt is not None or measured_tokens is not None or hold:
            where, name = "kvalloc.online.per_prompt", "make_adapting_cache"
            options |= {"adapt": adapt, "measured_tokens": measured_tokens, "hold": hold}
        cache: Cache = getattr(importlib.import_module(where), name)(self, model, **options)
        return cache

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically.

        Raises
        ------
        InputError
            If the folder does not exist or is read-only.
        """
        from kvalloc.formats.schema import budget_profile_json

        text = budget_profile_json(self)
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> BudgetProfile:
        """Read and check a budget profile.

        Raises
        ------
        ProfileFileError
            If the file is missing, not JSON, of another schema version, edited, or holds values
            that cannot be.
        """
        from kvalloc.formats.schema import budget_profile_from_json

        source = Path(path)
        if not source.is_file():
            raise ProfileFileError(
                path,
                field="file",
                found="a folder" if source.is_dir() else "missing",
                expected="a budget profile written by 'kvalloc solve'",
                way_out="check the path",
            )
        try:
            data = json.loads(source.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise ProfileFileError(
                path,
                field="file",
                found=f"not readable as JSON ({error})",
                expected="a budget profile written by 'kvalloc solve'",
                way_out="make it again with 'kvalloc solve'",
            ) from error
        return budget_profile_from_json(path, data)

    def _scaled(self, budgets: IntArray, context_tokens: int) -> IntArray:
        protected = self.policy.protected_tokens
        if context_tokens <= protected:
            return np.full_like(budgets, context_tokens)
        if self.length_rule == "fixed":
            return np.minimum(budgets, context_tokens)
        # Whole pages are handed out, as the solver did. Floors stay at sinks and window.
        page = self.page_tokens
        before = max(1, self.context_tokens - protected)  # nothing evictable: all is kept whole
        after = context_tokens - protected
        wanted = protected + (budgets - protected) * (after / before)
        floor = -(-protected // page)
        most = max(floor, context_tokens // page) if page > 1 else context_tokens
        # Heads of a layer share their budget at layer level: one number stands for the layer.
        columns = 1 if self.level == "layer" else budgets.shape[1]
        scaled = np.full((len(budgets), columns), context_tokens, dtype=np.int64)
        # What is kept whole stays whole, down to a last page that is not full.
        shared = budgets[:, :columns] < self.context_tokens
        exact = wanted[:, :columns][shared] / page
        total = int(np.floor(exact.sum() + 1e-6))
        total = min(max(total, floor * exact.size), most * exact.size)
        pages = apportion(exact, total, minimum=floor, maximum=most)
        scaled[shared] = np.minimum(pages * page, context_tokens)
        return np.broadcast_to(scaled, budgets.shape).copy()


def relative_gap(objective: float, bound: float | None) -> float | None:
    """Distance between objective and bound over the larger of the two, 0..1 if of one sign.

    A loss can come with a bound of 0, of which no distance is a share; of the loss itself it is.

    Examples
    --------
    >>> relative_gap(0.75, 1.0), relative_gap(-0.02, 0.0), relative_gap(0.5, None)
    (0.25, 1.0, None)
    """
    if bound is None:
        return None
    return abs(bound - objective) / max(abs(bound), abs(objective), 1e-300)
