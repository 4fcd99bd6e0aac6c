"""Prompts that losses are measured on, made by the rules of the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.evaluate.cases import Case
from kvalloc.evaluate.examples import encode
from kvalloc.evaluate.tasks import find_tasks
from kvalloc.measure import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("needle", "pairs", "kl", "code")
"""Tasks that ask for different things: retrieval from prose and from lists, prose, and code."""


N_PROMPTS = 8
"""Two of each kind."""


def calibration_prompts(
    tokenizer: PreTrainedTokenizerBase,
    n_prompts: int,
    n_tokens: int,
    *,
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts with their answers, from texts and words that no evaluation uses.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        The model's own.
    n_prompts : int
        The kinds take turns.
    n_tokens : int
        Longest prompt, tokens.
    kinds : sequence of str
        Tasks of `kvalloc eval`.
    seed : int

    Returns
    -------
    list of Prompt
        The same for the same arguments.

    Raises
    ------
    InputError
        If there is no such task, or a prompt of this length cannot be made.
    """
    if n_prompts < 1 or not kinds:
        raise InputError(
            f"{n_prompts} prompts of {len(kinds)} kinds were asked for; ask for at least one of one"
        )
    made = []
    for place, task in enumerate(find_tasks(kinds)):
        n_cases = len(range(place, n_prompts, len(kinds)))
        if n_cases:
            cases = task.make(tokenizer, n_cases, n_tokens, seed, split="profiling")
            made.append([_prompt(tokenizer, case, task.name) for case in cases])
    rounds = max(map(len, made))
    return [prompts[index] for index in range(rounds) for prompts in made if index < len(prompts)]


def _prompt(tokenizer: PreTrainedTokenizerBase, case: Case, task: str) -> Prompt:
    """The case with the whole answer after it, also what an evaluation begins for the model.

    To begin the answer by itself the model has to find its place in the prompt, and what that
    needs is then part of the loss.
    """
    turn = case.turns[0]
    answer = turn.continuation_ids
    end = len(case.input_ids) - turn.begun_tokens
    if turn.answers:
        answer = (*case.input_ids[end:], *encode(tokenizer, f" {turn.answers[0]}"))
    return Prompt(
        token_ids=case.input_ids[:end],
        answer_ids=answer,
        task=task,
        name=f"{task} in {case.source}",
    )
