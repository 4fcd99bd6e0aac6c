"""The decided half of the interface: budgets with their provenance and bound."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, computed_field, model_validator

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import (
    BIT_WIDTHS,
    bits_fault,
    check_size,
    constant_bytes,
    constant_entries,
    entries_in_share,
    full_bytes,
    head_bytes,
    reading_bytes,
    stored_bytes,
)
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import InputError
from kvalloc.formats.record import IntArray2D, JsonRecord, Record, require, require_shape
from kvalloc.shape import HALF_BYTES, ModelShape
from kvalloc.units import size

BY_SCORE = ("score", "attention_matching")
"""Policies that keep the best by score, and may change kept entries."""


class Policy(Record):
    """How the runtime picks which entries to keep within a budget."""

    NAME: ClassVar[str] = "policy"

    scorer: str
    """Name of the scorer."""

    scorer_parameters: dict[str, Any]
    """Parameters that rebuild the scorer."""

    sinks: int = Field(ge=0)
    """First tokens of the prompt, never evicted and part of every budget."""

    window: int = Field(ge=0)
    """Last tokens of the prompt, likewise."""

    name: str = "score"
    """Name of the policy; ``score`` keeps the scorer's best entries."""

    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters that rebuild the policy, apart from the scorer."""

    @cached_property
    def protected_tokens(self) -> int:
        """Sinks plus window."""
        return self.sinks + self.window

    @property
    def title(self) -> str:
        """Name in tables: the policy's, or the scorer's for ``score``."""
        return self.scorer if self.name == "score" else self.name


Level = Literal["layer", "head"]
LengthRule = Literal["proportional", "fixed"]

_TARGET_TEXTS = {
    **{"budget": "{:.1%}", "budget_tokens": "{:g} entries a head", "memory": ""},
    **{"retention": "retention {:g}", "loss": "a loss of {:g}"},
}
"""Texts of the target of a request, by its kind."""


class MeasuredTry(Record):
    """Measured loss of one of several decisions, nats per token."""

    NAME: ClassVar[str] = "try"

    target: float | None
    """Loss requested of the curves; None if the request was a size or a retention."""

    predicted: float | None
    """Loss predicted from the curves."""

    loss: float
    """Measured loss."""

    retained_bytes: int
    """Bytes kept at the reference context and batch."""


class MeasuredLoss(Record):
    """Loss of the whole reduced cache on prompts that are in no curve."""

    NAME: ClassVar[str] = "measured loss"

    loss: float
    """Mean over tasks of the means over their prompts, nats per token."""

    interval: list[float] | None
    """95% bootstrap interval over the prompts; None where a task has a single one."""

    by_task: dict[str, float]
    """Mean loss of each task's prompts."""

    prompts: int
    """Number of prompts."""

    text: str
    """Description of the prompts, for people."""

    text_digest: str
    """SHA-256 over their token ids."""

    target: float | None
    """Target of the loss, nats per token."""

    tries: tuple[MeasuredTry, ...]
    """All measured decisions, this one among them."""


_Size = Annotated[int, Field(ge=0, lt=2**63)]


class Limit(Record):
    """A limit beside the goal, as the decision uses it."""

    NAME: ClassVar[str] = "limit"

    name: str
    """The capacity, a cap, or the number of different budgets."""

    used: _Size
    """Use by the decision: bytes, or budgets."""

    allowed: _Size
    """Largest use: bytes, or budgets."""

    binds: bool
    """Whether nothing more fits, though more could be had."""

    value_per_mib: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Value of one more MiB of it, in the dual; None if unknown."""


class BudgetProfile(JsonRecord):
    """How many entries each layer and KV head keeps after prefill.

    Raises
    ------
    InputError
        If budgets do not fit the model, level, context, or sinks and window.
    """

    NAME: ClassVar[str] = "budget profile"
    MADE_BY: ClassVar[str] = "kvalloc solve"

    kind: Literal["kvalloc.budget_profile"] = "kvalloc.budget_profile"
    """Kind of the file."""

    schema_version: Literal[1] = 1
    """Version of the file's schema."""

    shape: ModelShape
    """The model."""

    level: Level
    """Whether all KV heads of a layer share one budget."""

    context_tokens: int = Field(ge=1)
    """Reference context of the budgets, tokens."""

    budgets: IntArray2D
    """Entries that each KV head keeps of ``context_tokens``, sinks and window included,
    ``(n_layers, n_kv_heads)``. Rows of other layers hold their constant numbers."""

    length_rule: LengthRule = "proportional"
    """How budgets grow with the prompt: the evictable part in proportion, or not at all."""

    share_of_16_bits: float | None = Field(default=None, gt=0, le=1)
    """Replaces the length rule: every KV head keeps as many entries of a prompt as fit this share
    of a 16-bit cache, scales and positions included. Numbers at 16 bits count two bytes, for any
    type of the model. ``budgets`` hold at ``context_tokens``."""

    target_share: float | None = Field(default=None, gt=0, le=1)
    """Requested share of the bytes of a cache at 16 bits, which a conversation fills again as it
    grows; None for another target."""

    fits_a_peak: bool = False
    """Whether the size is a limit of the peak while prompts are read."""

    plain_if_full: bool = True
    """Whether nothing is evicted or rounded if budgets keep everything. False if a smaller cache
    was requested."""

    page_tokens: int = Field(default=1, ge=1)
    """Tokens of a page, in which memory is accounted."""

    policy: Policy
    """Policy that picks the kept entries."""

    by_prompt: bool = False
    """Whether each prompt shares the sum of the budgets among the KV heads by its own scores
    (`kvalloc.runtime.selection`). ``budgets`` then holds the heads' means."""

    bits: IntArray2D | None = None
    """Bit width at which each KV head stores its entries (`kvalloc.accounting.costs`), 16 being
    half precision; None if all are at 16. Sliding layers are at 16."""

    solver: str = ""
    """Name of the requested solver."""

    solver_options: dict[str, Any] = Field(default_factory=dict)
    """Its options."""

    decided_by: str = ""
    """The solver that decided: the one that ``auto`` picked, else the same."""

    detail: str = ""
    """The solver's line: why it was picked, its back end, its parameters."""

    sense: Literal["max_value", "min_cost"] = "max_value"
    """Optimised side: value, or bytes."""

    objective: float = 0.0
    """Value reached (``max_value``) or bytes needed (``min_cost``)."""

    bound: float | None = None
    """Bound on any choice; None if unknown."""

    bound_source: str = ""
    """Proof of the bound: ``dual`` (recomputed by kvalloc), else the name of the solver that claims
    it."""

    prices: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()
    """Prices of a byte of the capacity (or for the target) and of each cap, in units of value, that
    prove the dual bound. Empty if kvalloc finds its own."""

    termination: Literal["", "optimal", "heuristic", "gap_limit", "time_limit"] = ""
    """Why the solver stopped."""

    value_per_mib: float | None = Field(default=None, ge=0)
    """Shadow price: value of one more MiB, at the margin; None if unknown."""

    price_source: str = ""
    """Source of the price: the next entry, the dual, or a little more of the worst unit; or why it
    is unknown."""

    limits: tuple[Limit, ...] = ()
    """Limits with their use and price; empty if not computed."""

    requested: dict[str, Any] = Field(default_factory=dict)
    """The target of the request: its name and value, and its bytes or value. Provenance: no kept
    entry depends on it."""

    retention: float | None = Field(default=None, ge=0, le=1 + 1e-9)
    """Predicted retention at these budgets: mean over layers of the kept share of score mass, at
    any width."""

    predicted_loss: float | None = None
    """Predicted loss at these budgets, nats per token: the sum of the losses measured with each
    unit reduced alone. None if no losses were measured."""

    model_error: float | None = Field(default=None, gt=0)
    """Measured over predicted loss of whole caches at this share that were decided alike; None if
    it was not measured."""

    measured_loss: MeasuredLoss | None = None
    """Measured loss of all units together (`kvalloc.solve_measured`)."""

    batch: int = Field(default=1, ge=1)
    """Rows that bytes were accounted for."""

    score_digest: str = ""
    """Digest of the score profile of the decision."""

    problem_digest: str = ""
    """Digest of the problem that was solved."""

    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that decided."""

    created: str = ""
    """ISO date, UTC."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def gap(self) -> float | None:
        """Relative distance between objective and bound."""
        return relative_gap(self.objective, self.bound)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def retained_tokens(self) -> int:
        """Entries kept of one row at the reference context."""
        evicted = self.context_tokens - self.budgets[list(self.shape.full_layers)]
        return self.full_tokens - int(evicted.sum())

    @computed_field  # type: ignore[prop-decorator]
    @property
    def full_tokens(self) -> int:
        """Entries that a plain cache stores of one row at the reference context."""
        shape, tokens = self.shape, self.context_tokens
        constant = sum(one.stored_tokens(tokens) * one.kv_heads for one in shape.by_layer)
        return len(shape.full_layers) * shape.n_kv_heads * tokens + constant

    @computed_field  # type: ignore[prop-decorator]
    @property
    def retained_bytes(self) -> int:
        """Bytes stored at the reference context and batch, in whole pages, positions included."""
        return int(self.head_bytes_at(self.context_tokens).sum()) * self.batch

    @computed_field  # type: ignore[prop-decorator]
    @property
    def full_bytes(self) -> int:
        """Bytes of keeping everything at 16 bits, at the reference context and batch."""
        return full_bytes(self.shape, self.context_tokens, self.batch)

    @property
    def share(self) -> float:
        """Share of a 16-bit cache that is stored; see `share_at`."""
        return self.share_at(self.context_tokens)

    @property
    def reduces(self) -> bool:
        """Whether a cache evicts or rounds: less than everything is kept, or was requested."""
        kept = self.budgets[list(self.shape.full_layers)]
        if self._rounds or (kept < self.context_tokens).any():
            return True
        share = self.share_of_16_bits
        return not self.plain_if_full if share is None else share != 1

    @property
    def _rounds(self) -> bool:
        return self.bits is not None and bool((self.bits != 16).any())

    @property
    def widths(self) -> IntArray:
        """Bits of each KV head's entries, ``(n_layers, n_kv_heads)``."""
        return np.full_like(self.budgets, 16) if self.bits is None else self.bits

    @property
    def optimal_by_word(self) -> str:
        """The solver that claims optimality, if no bound shows it."""
        known = self.termination != "optimal" or self.bound_source == "dual"
        return "" if known else self.bound_source or "nobody"

    @property
    def expected_loss(self) -> float | None:
        """The predicted loss times the model error, nats per token."""
        return self.predicted_loss and self.predicted_loss * (self.model_error or 1.0)

    def __repr__(self) -> str:
        share = self.retained_tokens / max(1, self.full_tokens)
        return (
            f"BudgetProfile({self.shape.model_id}, {self.level} level, {share:.1%} of "
            f"{self.context_tokens} tokens, by {self.decided_by or self.solver or 'hand'}, "
            f"{self.digest[:8]})"
        )

    __str__ = __repr__

    def with_policy(self, policy: Policy) -> BudgetProfile:
        """Return the same with another policy."""
        return self.replace(policy=policy, measured_loss=None)

    def budgets_for(self, context_tokens: int) -> IntArray:
        """Return the budgets for a prompt of another length, (n_layers, n_kv_heads).

        ``proportional``: each head keeps its share of the evictable entries, rounded by
        `apportion`; fewer at fewer bits if the share of the bytes would be exceeded. ``fixed``: the
        same number, or all of a shorter prompt.

        Raises
        ------
        InputError
        """
        if context_tokens < 1:
            raise InputError(f"a context of {context_tokens} tokens has no budgets; ask for >= 1")
        budgets, full = constant_entries(self.shape, context_tokens), list(self.shape.full_layers)
        budgets[full] = self.budgets[full]
        if self.share_of_16_bits is not None:
            budgets[full] = entries_in_share(
                self.share_of_16_bits,
                context_tokens,
                self.widths[full],
                self.shape,
                minimum=self.policy.protected_tokens,
            )
        elif context_tokens != self.context_tokens:
            fewer, before = 0, budgets[full] - 1
            while (budgets[full] != before).any():  # until it fits, or sinks and window are left
                before = budgets[full]
                budgets[full] = self._scaled(self.budgets[full], context_tokens, fewer)
                if not (over := self._entries_over(budgets, context_tokens)):
                    break
                fewer += -(-over // self.page_tokens)
        return budgets

    def _entries_over(self, budgets: IntArray, context_tokens: int) -> int:
        reference, full = self.context_tokens, list(self.shape.full_layers)
        if context_tokens < reference or not self._rounds or self.length_rule == "fixed":
            return 0
        kept = int(self._bytes_of(self.budgets, reference)[full].sum())
        limit = kept * context_tokens // reference
        if (share := self.target_share) is not None:
            token = self.shape.n_kv_heads * len(full) * self.shape.bytes_per_entry
            limit = max(limit, int(share * token * context_tokens))
        over = int(self._bytes_of(budgets, context_tokens)[full].sum()) - limit
        return max(over * int(self.budgets[full].sum()) // max(kept, 1), 1) if over > 0 else 0

    def retained_bytes_at(self, context_tokens: int, batch: int = 1) -> int:
        """Return the bytes kept of ``batch`` prompts."""
        return int(self.head_bytes_at(context_tokens).sum()) * batch

    def peak_bytes_at(
        self,
        context_tokens: int,
        batch: int = 1,
        *,
        columns: int | None = None,
        chunked: bool = False,
    ) -> int:
        """Return the bytes of a cache at its peak: kept entries, and one layer in full.

        ``columns`` are tokens with padding; fitted values are float32 meanwhile. If prompts are
        ``chunked``, all entries are at 16 bits before the last forward, or in the model's type if a
        layer keeps all.
        """
        shape, kept = self.shape, self.budgets_for(context_tokens)
        profile = self.model_copy(update={"bits": None}) if chunked else self
        by_layer = profile._bytes_of(kept, context_tokens).sum(axis=1)
        stored = self._held_between_chunks(kept, by_layer) if chunked else int(by_layer.sum())
        if self.policy.name == "attention_matching":
            shape = replace(shape, dtype_bytes=max(shape.dtype_bytes, 4))
        return stored * batch + reading_bytes(shape, columns or context_tokens, batch)

    def _held_between_chunks(self, kept: IntArray, by_layer: IntArray) -> int:
        shape, full = self.shape, list(self.shape.full_layers)
        heads, reduced = kept[full], by_layer[full]
        entries = heads.sum(axis=1) if self.by_prompt else heads.min(axis=1) * shape.n_kv_heads
        read = entries[:, None]  # entries of each layer when the layer of this row evicts
        peaks = np.where(entries >= read, read * shape.plain_bytes_per_entry, reduced).sum(axis=1)
        rise = max(int(peaks.max()) - int(reduced.sum()), 0)
        return int(by_layer.sum()) + rise

    def head_bytes_at(self, context_tokens: int) -> IntArray:
        """Return the bytes that each KV head stores of a prompt, ``(n_layers, n_kv_heads)``."""
        return self._bytes_of(self.budgets_for(context_tokens), context_tokens)

    def _bytes_of(self, kept: IntArray, context_tokens: int) -> IntArray:
        """Return the bytes of budgets for a prompt, ``(n_layers, n_kv_heads)``."""
        shape, constant = self.shape, constant_bytes(self.shape, context_tokens)
        rounds = self._rounds or (self.reduces and shape.dtype_bytes > HALF_BYTES)
        if rounds or (kept[list(shape.full_layers)] < context_tokens).any():
            kept = -(-kept // self.page_tokens) * self.page_tokens
            stored = head_bytes(kept, 16 if self.bits is None else self.bits, shape)
        else:
            stored = stored_bytes(kept, 16, shape)
        for layer in shape.constant_layers:  # columns are KV heads of layers with budgets
            each, rest = divmod(int(constant[layer]), shape.n_kv_heads)
            stored[layer] = each + (np.arange(shape.n_kv_heads) < rest)
        return stored

    def share_at(self, context_tokens: int) -> float:
        """Return the share of a 16-bit cache that layers with budgets take of a prompt."""
        stored = self.head_bytes_at(context_tokens)[list(self.shape.full_layers)]
        return float(stored.mean()) / (context_tokens * self.shape.bytes_per_entry)

    def filled_bytes_at(self, context_tokens: int) -> int:
        """Return the bytes of full attention that a conversation may fill.

        It is their share at the reference context if entries are rounded for a requested share,
        else 0.
        """
        if self.target_share is None or self.length_rule == "fixed":
            return 0
        if self.bits is None or self.share_of_16_bits is not None:
            return 0
        entries = context_tokens * len(self.shape.full_layers) * self.shape.n_kv_heads
        return int(self.share_at(self.context_tokens) * entries * self.shape.bytes_per_entry)

    @property
    def target_text(self) -> str:
        """The target of the request, in a few words."""
        kind, value = self.requested.get("target"), self.requested.get("value")
        is_number = isinstance(value, int | float) and 0 <= value < 2**63
        if kind not in _TARGET_TEXTS or not is_number:
            return ""  # a file may state anything
        memory = value if kind == "memory" else self.requested.get("memory")
        return size(memory) if isinstance(memory, int) else _TARGET_TEXTS[kind].format(value)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_size(self.shape, self.context_tokens, self.page_tokens, self.batch)
        shape, table = self.shape, (self.shape.n_layers, self.shape.n_kv_heads)
        full, constant = list(shape.full_layers), list(shape.constant_layers)
        require_shape("budgets", self.budgets, table)
        self._require_budgets(self.budgets[full])
        if self.bits is not None:
            require_shape("bits", self.bits, table)
            expected = "16 there: nothing is decided"
            right = (self.bits[constant] == 16).all()
            require(right, "bits", "another number in a layer without a budget", expected)
            widths, known = np.unique(self.bits).tolist(), ", ".join(map(str, BIT_WIDTHS))
            require({*widths} <= {*BIT_WIDTHS}, "bits", widths, f"one of {known} each")
            for width in widths:
                if fault := bits_fault(width, shape.dims[1]):
                    raise InputError(f"budget profile: bits: {fault}")
        if self.by_prompt:
            self._require_by_prompt()
        if self.share_of_16_bits is not None:
            budgets = self.budgets_for(self.context_tokens)[full]
            name, expected = "share_of_16_bits", f"budgets of {budgets[0, 0]} in every head"
            alike = (budgets == self.budgets[full]).all()
            require(alike and self.page_tokens == 1, name, "given beside other budgets", expected)
        return self

    def _require_budgets(self, decided: IntArray) -> None:
        protected, context = self.policy.protected_tokens, self.context_tokens
        low, high = int(decided.min()), int(decided.max())
        layer = self.shape.full_layers[int(decided.argmin()) // decided.shape[1]]
        value = f"{low} in full-attention layer {layer}"
        expected = f"at least the {protected} tokens of sinks and window"
        require(low >= min(protected, context), "budgets", value, expected)
        require(high <= context, "budgets", high, f"at most the context of {context} tokens")
        if self.level == "layer":
            for name, array, one in (("budgets", decided, "budget"), ("bits", self.bits, "width")):
                alike = array is None or (array == array[:, :1]).all()
                expected = f"one {one} for all KV heads of a layer"
                require(alike, name, "different within a layer", expected)

    def _require_by_prompt(self) -> None:
        fixed = {
            "layer level": self.level != "head",
            "another policy than scores": self.policy.name not in BY_SCORE,
            "bits that differ between heads": self.bits is not None
            and len(np.unique(self.bits[list(self.shape.full_layers)])) > 1,
            "pages": self.page_tokens > 1,
        }
        fault = next((name for name, holds in fixed.items() if holds), None)
        require(fault is None, "by_prompt", f"true with {fault}", "false, or without")

    def _scaled(self, budgets: IntArray, context_tokens: int, fewer: int = 0) -> IntArray:
        protected = self.policy.protected_tokens
        if context_tokens <= protected:
            return np.full_like(budgets, context_tokens)
        if self.length_rule == "fixed":
            return np.minimum(budgets, context_tokens)
        # Whole pages are handed out, as the solver did. Floors stay at sinks and window.
        page = self.page_tokens
        before = max(1, self.context_tokens - protected)  # nothing evictable: all is kept whole
        after = context_tokens - protected
        real_valued = protected + (budgets - protected) * (after / before)
        floor = -(-protected // page)
        ceiling = max(floor, context_tokens // page) if page > 1 else context_tokens
        # Heads of a layer share their budget at layer level: one number stands for the layer.
        columns = 1 if self.level == "layer" else budgets.shape[1]
        scaled = np.full((len(budgets), columns), context_tokens, dtype=np.int64)
        # Units that keep all tokens keep all here, too, down to a last page that is not full. They
        # give entries up only where the others have too few.
        shared = budgets[:, :columns] < self.context_tokens
        if fewer > max(0, (real_valued[:, :columns][shared] / page - floor).sum()):
            shared[:] = True
        exact = real_valued[:, :columns][shared] / page
        total = int(np.floor(exact.sum() + 1e-6)) - fewer
        total = min(max(total, floor * exact.size), ceiling * exact.size)
        pages = apportion(exact, total, minimum=floor, maximum=ceiling)
        scaled[shared] = np.minimum(pages * page, context_tokens)
        return np.broadcast_to(scaled, budgets.shape).copy()


def relative_gap(objective: float, bound: float | None) -> float | None:
    """Return the distance between objective and bound over the larger of the two.

    It is 0..1 if both have one sign.

    Examples
    --------
    >>> relative_gap(0.75, 1.0), relative_gap(-0.02, 0.0)
    (0.25, 1.0)
    """
    if bound is None:
        return None
    return abs(bound - objective) / max(abs(bound), abs(objective), 1e-300)
