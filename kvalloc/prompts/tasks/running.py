"""Running text: its continuation, without a question."""

from __future__ import annotations

from kvalloc.errors import InputError, option
from kvalloc.prompts.cases import Case, Turn
from kvalloc.prompts.chat import encode
from kvalloc.prompts.splits import split_texts, stream
from kvalloc.prompts.tasks.task import PromptRequest, Task

SPEED_TOKENS = 8
"""A text asks nothing, but a few tokens decoded one by one show the speed."""
QUESTION_TOKENS = 32
"""Last tokens of a piece, which are read after the compression if questions are."""


def _pieces(request: PromptRequest) -> list[Case]:
    if request.opened:
        raise InputError(
            "the task kl asks no question, so none can come in a second turn; ask for "
            f"{option('question', 'inside')} or after"
        )
    draw = stream(request.split, "kl", request.seed)
    whole = [
        (source, encode(request.tokenizer, text))
        for source, text in split_texts(request.split).items()
    ]
    needed = request.n_tokens + request.answer_tokens
    long_enough = [(source, ids) for source, ids in whole if len(ids) >= needed]
    if not long_enough:
        raise InputError(
            f"no text for {request.split} has {needed} tokens; ask for a shorter "
            f"{option('context')}"
        )
    held_back = QUESTION_TOKENS if request.after else 0
    if request.n_tokens <= held_back:
        raise InputError(
            f"a prompt of {request.n_tokens} tokens leaves nothing to compress before the "
            f"{held_back} that follow the compression; ask for a longer "
            f"{option('context')}"
        )
    cases = []
    for index in range(request.n_cases):
        source, ids = long_enough[index % len(long_enough)]
        begin = draw.randrange(len(ids) - needed + 1)
        end = begin + request.n_tokens
        turn = Turn(
            question_ids=ids[end - held_back : end],
            continuation_ids=ids[end : begin + needed],
            max_new_tokens=SPEED_TOKENS,
        )
        cases.append(Case(input_ids=ids[begin : end - held_back], turns=(turn,), source=source))
    return cases


TASKS = (Task(name="kl", build=_pieces),)
