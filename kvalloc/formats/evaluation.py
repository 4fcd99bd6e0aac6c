"""Results of an evaluation: a model's answers with reduced caches."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import ConfigDict, FailFast, Field
from typing_extensions import TypedDict

from kvalloc.formats.record import JsonRecord
from kvalloc.shape import ModelShape

Ends = list[float] | None
"""Low and high end of a 95% bootstrap interval, or None."""


class Distance(TypedDict):
    """Distance of predictions from the full cache's: means, and percentiles of the KL over tokens.

    See `kvalloc.prompts.intervals.tails`; None for too few tokens.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    kl: float | None
    p99: float | None
    p999: float | None
    n_tokens: int
    top1_agreement: float | None


class EvaluationRow(Distance):
    """One method on one task, or on all of them: means over prompts, then over tasks.

    Bytes are of one prompt, KL in nats per token, times in seconds, shares, scores and agreement
    0..1; None is unknown. See `kvalloc.evaluate.scoring.Outcome`,
    `kvalloc.evaluate.pairing.compare` (``paired``), and `kvalloc.prompts.cases.POSITIONS`
    (``by_position``).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    name: str
    task: str
    context: int
    retained_bytes: int
    full_bytes: int
    kept_bytes: int
    bytes_at_16_bits: NotRequired[int]
    share_of_16_bits: float | None
    ci95: Ends
    by_position: dict[str, Distance]
    exact_tokens: float | None
    exact_match: float | None
    score: float | None
    score_ci95: Ends
    perplexity: float | None
    n: int
    prefill_seconds: float | None
    decode_tokens_per_second: float | None
    paired: list[dict[str, Any]]


class Evaluation(JsonRecord):
    """Rows of an evaluation, their settings, and the values of every prompt."""

    NAME: ClassVar[str] = "evaluation"
    MADE_BY: ClassVar[str] = "kvalloc eval"

    kind: Literal["kvalloc.evaluation"] = "kvalloc.evaluation"
    """What the file is."""

    schema_version: Literal[4] = 4
    """How the file is to be read."""

    shape: ModelShape
    """The model."""

    settings: dict[str, Any]
    """The request: tasks, split, question_at, turns, samples, context, seed, dtype; and
    ``text_digest``, SHA-256 over the token ids of all prompts and questions."""

    profiles: dict[str, str]
    """Digest of each budget profile by the name of its rows."""

    rows: Annotated[tuple[EvaluationRow, ...], FailFast()]
    """For each task the full cache first, then the methods."""

    prompts: Annotated[tuple[dict[str, Any], ...], FailFast()] = ()
    """Every method's values and answers, prompt by prompt."""

    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the libraries that measured."""

    created: str = ""
    """ISO date, UTC."""

    def __repr__(self) -> str:
        methods, tasks = ({row[key]: None for row in self.rows} for key in ("name", "task"))
        return (
            f"Evaluation({self.shape.model_id}, {', '.join(methods) or 'no rows'} on "
            f"{', '.join(tasks) or 'nothing'}, {self.digest[:8]})"
        )

    __str__ = __repr__
