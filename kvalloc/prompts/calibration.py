"""Prompts for measuring losses, made by the rules of the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from kvalloc.errors import InputError
from kvalloc.prompts.cases import Case
from kvalloc.prompts.chat import encode
from kvalloc.prompts.tasks import find_tasks
from kvalloc.prompts.texts import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("needle", "pairs", "kl", "code")
"""Tasks that ask for different things: retrieval from prose and from lists, prose, and code."""

MEASURED_TOKENS = 24
"""Tokens of the continuation of running text, and of free answers. They are measured once for
every unit and level, so they must be few."""

FORM_SEEDS = 1_000_003
"""Distance between the seeds of two forms: of a length and a place of the question."""

STANDINGS: dict[str, tuple[str, ...]] = {
    "inside": ("inside",),
    "after": ("after",),
    "both": ("inside", "after"),
}
"""Where the question stands: in the prompt that is compressed, or after it."""


def calibration_prompts(
    tokenizer: PreTrainedTokenizerBase,
    n_prompts: int,
    n_tokens: int | Sequence[int],
    *,
    kinds: Sequence[str] = KINDS,
    question: str = "inside",
    seed: int = 0,
) -> list[Prompt]:
    """Make prompts with answers, from texts and words that no evaluation uses.

    Parameters
    ----------
    n_prompts : int
        Kinds, lengths and places of the question alternate.
    n_tokens : int or sequence of int
        Longest prompt, question included, tokens.
    kinds : sequence of str
        Tasks of `kvalloc eval`.
    question : str
        See `STANDINGS`.
    seed : int

    Raises
    ------
    InputError
        If there is no such task, or no prompt of this length.
    """
    lengths = [n_tokens] if isinstance(n_tokens, int) else list(dict.fromkeys(n_tokens))
    if n_prompts < 1 or not kinds or not lengths:
        raise InputError(
            f"{n_prompts} prompts of {len(kinds)} kinds and {len(lengths)} lengths were asked for; "
            "ask for at least one of one"
        )
    if question not in STANDINGS:
        raise InputError(f"the question stands {question!r}; choose from: {', '.join(STANDINGS)}")
    forms = [(length, standing) for length in lengths for standing in STANDINGS[question]]
    series = [
        # another seed for each form: the same text twice teaches less than two
        (task, length, standing == "after", seed + number * FORM_SEEDS)
        for number, (length, standing) in enumerate(forms)
        for task in find_tasks(kinds)
    ]
    made = []
    for place, (task, length, after, own_seed) in enumerate(series[:n_prompts]):
        n_cases = len(range(place, n_prompts, len(series)))
        how = {"split": "profiling", "after": after, "answer_tokens": MEASURED_TOKENS}
        cases = task.make(tokenizer, n_cases, length, own_seed, **how)
        made.append([_prompt(tokenizer, case, task.name) for case in cases])
    return [prompt for prompts in zip_longest(*made) for prompt in prompts if prompt is not None]


def _prompt(tokenizer: PreTrainedTokenizerBase, case: Case, task: str) -> Prompt:
    """Return a case as a prompt with its whole answer, the given start included.

    So the loss has entries by which the model finds its place.
    """
    turn = case.turns[0]
    answer: Sequence[int] = turn.continuation_ids
    ids = turn.question_ids or case.input_ids
    end = len(ids) - turn.begun_tokens
    if turn.answers:
        answer = (*ids[end:], *encode(tokenizer, f" {turn.answers[0]}"))
    after = bool(turn.question_ids)
    return Prompt(
        token_ids=case.input_ids if after else ids[:end],
        question_ids=ids[:end] if after else (),
        answer_ids=tuple(answer),
        task=task,
        name=f"{task} in {case.source}{', question after' if after else ''}",
    )
