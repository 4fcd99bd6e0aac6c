"""What caches are evaluated on: prompts made by rule from texts that no profile was made from."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError
from kvalloc.evaluate.cases import Case, Turn
from kvalloc.evaluate.needle import haystack_texts, make_needle_cases

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KL_TOKENS = 24
PERPLEXITY_TOKENS = 64
SPEED_TOKENS = 8
"""A text asks nothing, but a few tokens decoded one by one show the speed."""
PAIRS_FRAME = "Here are keys and their values.\n\n{pairs}\n\nWhat is the value of the key {key}?"
PAIRS_PREFIX = "The value of the key {key} is"


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompts.

    Attributes
    ----------
    name : str
        What ``--tasks`` takes.
    summary : str
        One line.
    make : callable
        ``make(tokenizer, n_cases, n_tokens, seed)`` gives a list of `Case`.
    """

    name: str
    summary: str
    make: Callable[[Any, int, int, int], Sequence[Case]]


def text_cases(
    tokenizer: PreTrainedTokenizerBase,
    n_cases: int,
    n_tokens: int,
    seed: int,
    *,
    continuation_tokens: int,
    texts: Mapping[str, str] | None = None,
) -> list[Case]:
    """Pieces of running text with what follows them.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_cases : int
        Pieces, in turn from each text, drawn without regard to what they say.
    n_tokens : int
        Length of a piece, tokens.
    seed : int
        Of where they begin.
    continuation_tokens : int
        Tokens that follow.
    texts : mapping of str to str, optional
        By name; the shipped ones for evaluation by default.

    Returns
    -------
    list of Case

    Raises
    ------
    InputError
        If a text is too short.
    """
    if n_cases < 1:
        raise InputError(f"{n_cases} samples evaluate nothing; ask for at least 1")
    draw = random.Random(seed)
    whole = [
        (name, _encode(tokenizer, text))
        for name, text in (haystack_texts() if texts is None else texts).items()
    ]
    needed = n_tokens + continuation_tokens
    long_enough = [(name, ids) for name, ids in whole if len(ids) >= needed]
    if not long_enough:
        raise InputError(f"no text for evaluation has {needed} tokens; ask for a shorter --context")
    cases = []
    for index in range(n_cases):
        name, ids = long_enough[index % len(long_enough)]
        begin = draw.randrange(len(ids) - needed + 1)
        middle = begin + n_tokens
        cases.append(
            Case(
                input_ids=tuple(ids[begin:middle]),
                turns=(
                    Turn(
                        continuation_ids=tuple(ids[middle : begin + needed]),
                        max_new_tokens=SPEED_TOKENS,
                    ),
                ),
                source=name,
            )
        )
    return cases


def pair_cases(
    tokenizer: PreTrainedTokenizerBase, n_cases: int, n_tokens: int, seed: int
) -> list[Case]:
    """Key-value retrieval: random keys with random values, and a question for one of them.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_cases : int
    n_tokens : int
        Longest prompt, tokens; as many pairs as fit.
    seed : int

    Returns
    -------
    list of Case

    Raises
    ------
    InputError
        If not even two pairs fit.

    References
    ----------
    N. F. Liu et al., Lost in the Middle (2023), Sec. 3.
    """
    draw = random.Random(seed)
    return [
        _pair_case(tokenizer, (index + 0.5) / n_cases, n_tokens, draw) for index in range(n_cases)
    ]


def prompt_cases(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Any]) -> list[Case]:
    """The user's own prompts, each with an answer.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    prompts : sequence of Prompt
        As `kvalloc.measure.read_prompts` gives them.

    Raises
    ------
    InputError
        If one has no answer; names file and line.
    """
    check_answers(prompts)
    cases = []
    for prompt in prompts:
        if prompt.messages:
            text = tokenizer.apply_chat_template(
                list(prompt.messages), tokenize=False, add_generation_prompt=True
            )
            ids = _encode(tokenizer, str(text))
        else:
            ids = [int(token) for token in tokenizer(prompt.text)["input_ids"]]
        turn = Turn(answers=(prompt.answer,))
        cases.append(Case(input_ids=tuple(ids), turns=(turn,), source=prompt.where))
    return cases


def check_answers(prompts: Sequence[Any]) -> None:
    """Refuse the first prompt without an answer.

    Parameters
    ----------
    prompts : sequence of Prompt

    Raises
    ------
    InputError
        Names file and line.
    """
    for prompt in prompts:
        if not prompt.answer:
            raise InputError(f"{prompt.where} has no 'answer' or 'answers'; give it one")


def _needles(tokenizer: Any, n_cases: int, n_tokens: int, seed: int) -> list[Case]:
    return [
        Case(
            input_ids=needle.input_ids,
            turns=(Turn(answers=(needle.number,)),),
            source=needle.source,
        )
        for needle in make_needle_cases(tokenizer, n_cases, n_tokens, seed=seed)
    ]


def _texts(continuation_tokens: int) -> Callable[[Any, int, int, int], list[Case]]:
    def make(tokenizer: Any, n_cases: int, n_tokens: int, seed: int) -> list[Case]:
        return text_cases(
            tokenizer, n_cases, n_tokens, seed, continuation_tokens=continuation_tokens
        )

    return make


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="needle",
            summary="a number hidden in real text, the question at its end",
            make=_needles,
        ),
        Task(
            name="pairs",
            summary="the value of one key among many (key-value retrieval)",
            make=pair_cases,
        ),
        Task(
            name="kl",
            summary=f"the next {KL_TOKENS} tokens of running text",
            make=_texts(KL_TOKENS),
        ),
        Task(
            name="perplexity",
            summary=f"the next {PERPLEXITY_TOKENS} tokens of running text",
            make=_texts(PERPLEXITY_TOKENS),
        ),
    )
}
"""What ``kvalloc eval --tasks`` offers."""


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of these names.

    Raises
    ------
    InputError
        If there is none of a name; lists them.
    """
    for name in names:
        if name not in TASKS:
            raise InputError(f"there is no task {name!r}; choose from: {', '.join(TASKS)}")
    return [TASKS[name] for name in dict.fromkeys(names)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _pair_case(tokenizer: Any, depth: float, n_tokens: int, draw: random.Random) -> Case:
    pairs: list[tuple[str, str]] = []
    seen: set[str] = set()
    while len(pairs) < n_tokens:  # more than can fit: a pair takes many tokens
        key = f"{draw.randrange(16**6):06x}"
        if key not in seen:
            seen.add(key)
            pairs.append((key, str(draw.randrange(10_000, 100_000))))

    def prompt(count: int) -> tuple[list[int], str]:
        key, value = pairs[int(depth * count)]
        lines = "\n".join(f"{name}: {number}" for name, number in pairs[:count])
        content = PAIRS_FRAME.format(pairs=lines, key=key)
        start = PAIRS_PREFIX.format(key=key)
        if getattr(tokenizer, "chat_template", None):
            chat = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            return _encode(tokenizer, f"{text}{start}"), value
        return [int(token) for token in tokenizer(f"{content}\n{start}")["input_ids"]], value

    low, high = 0, len(pairs)
    while low < high:
        middle = (low + high + 1) // 2
        if len(prompt(middle)[0]) <= n_tokens:
            low = middle
        else:
            high = middle - 1
    if low < 2:
        raise InputError(f"no two pairs fit into {n_tokens} tokens; ask for a longer --context")
    ids, value = prompt(low)
    return Case(input_ids=tuple(ids), turns=(Turn(answers=(value,)),))
