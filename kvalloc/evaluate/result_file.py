"""Record of an evaluation for its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvalloc.evaluate.pairing import rows
from kvalloc.evaluate.scoring import Score
from kvalloc.files import provenance
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.record import digest_of
from kvalloc.prompts.cases import Case
from kvalloc.shape import ModelShape


def evaluation_of(
    shape: ModelShape,
    scores: Sequence[Score],
    *,
    settings: Mapping[str, Any],
    profiles: Mapping[str, BudgetProfile],
    cases: Mapping[str, Sequence[Case]],
) -> Evaluation:
    """Put an evaluation into one record.

    Parameters
    ----------
    scores : sequence of Score
        See `kvalloc.evaluate.scoring.evaluate`.
    settings : mapping
        Tasks, split, question_at, turns, samples, context, seed, dtype.
    profiles : mapping of str to BudgetProfile
        By the name of their rows.
    cases : mapping of str to sequence of Case
        By task.
    """
    plain: Any = rows(scores)
    return Evaluation(
        shape=shape,
        settings={**settings, "text_digest": text_digest(cases)},
        profiles={name: one.digest for name, one in profiles.items()},
        rows=tuple(plain),
        prompts=tuple(
            {
                "task": score.task,
                "name": score.name,
                "source": case.source,
                "prompt_tokens": case.n_tokens,
                "kl": outcome.kl,
                "kls": [list(turn) for turn in outcome.kls],
                "top1_agreement": outcome.top1_agreement,
                "score": outcome.score,
                "answers": list(outcome.answers),
                "right": [list(turn.answers) for turn in case.turns],
            }
            for score in scores
            for case, outcome in zip(cases[score.task], score.outcomes, strict=True)
        ),
        **provenance(),
    )


def text_digest(cases: Mapping[str, Sequence[Case]]) -> str:
    """Return the SHA-256 of all prompts' and questions' token ids, by task."""
    return digest_of(
        {
            task: [[one.input_ids, *(turn.question_ids for turn in one.turns)] for one in of_task]
            for task, of_task in cases.items()
        }
    )
