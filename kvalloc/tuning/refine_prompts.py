"""The prompts of a refinement, their tasks, and what is said about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.sampling import SampleSet, choose_samples
from kvalloc.prompts.texts import Document, Prompt, default_texts, read_prompts

DEFAULT_PROMPTS = 12
"""Three of each kind, one of which is held out."""
SEED = 1_000
"""Other prompts than those that losses are measured on by default."""
DEFAULT_PIECES = 12
"""Pieces of the shipped texts that are measured on where no prompts are given."""

TEXT_TASK, ANSWER_TASK = "text", "answers"


def refinement_prompts(
    files: Sequence[str | Path] = (), *, tokenizer: Any = None, context_tokens: int | None = None
) -> list[Document | Prompt]:
    """The prompts in some JSONL files; where none is named, prompts of every kind, or texts.

    Budgets that are refined on prose alone let go of what finds needles, so the default is what
    ``kvalloc profile --loss`` measures on, with other seeds.

    Parameters
    ----------
    files : sequence of str or Path
    tokenizer : PreTrainedTokenizerBase, optional
        Makes `DEFAULT_PROMPTS` prompts of every kind; without it the shipped texts are taken.
    context_tokens : int, optional
        Of the score profile. Where prompts of some kind do not fit into it, the shipped texts are
        taken, too.

    Returns
    -------
    list of Document or Prompt

    Raises
    ------
    InputError
        If a file cannot be read or holds no prompts.
    """
    if files:
        return [prompt for file in files for prompt in read_prompts(file)]
    if tokenizer is not None and context_tokens is not None:
        from kvalloc.prompts.calibration import calibration_prompts

        with contextlib.suppress(InputError):
            made = calibration_prompts(tokenizer, DEFAULT_PROMPTS, context_tokens, seed=SEED)
            return [*made]
    return [*default_texts()]


def chosen_prompts(
    texts: Iterable[str | Document | Prompt], tokenizer: Any, scores: ScoreProfile
) -> tuple[SampleSet, list[str]]:
    """All prompts as samples, running text as `DEFAULT_PIECES` pieces, and the task of each.

    Parameters
    ----------
    texts : iterable of str, Document or Prompt
    tokenizer : transformers.PreTrainedTokenizerBase
    scores : ScoreProfile
        Reference context, sinks and window.

    Returns
    -------
    samples : SampleSet
    tasks : list of str
        A prompt's own, else ``"answers"`` where it comes with an answer, and ``"text"`` where the
        model's own continuation is measured.

    Raises
    ------
    InputError
        If a prompt is too short, or there is none.
    """
    given = [texts] if isinstance(texts, str) else list(texts)
    prompts = [text for text in given if isinstance(text, Prompt)]
    if prompts and len(prompts) < len(given):
        raise InputError(
            "prompts and running text are mixed; refine on one of them, or write the text as "
            "prompts, one JSON object a line"
        )
    samples = choose_samples(
        given,
        tokenizer,
        context_tokens=scores.context_tokens,
        least_tokens=scores.protected_tokens + 1,
        samples=None if prompts else DEFAULT_PIECES,
        sampling_ratio=1.0,
    )
    if not prompts:
        return samples, [TEXT_TASK] * len(samples.token_ids)
    return samples, [
        prompt.task or (ANSWER_TASK if prompt.answer else TEXT_TASK) for prompt in prompts
    ]
