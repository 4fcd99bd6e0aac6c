"""What profile and fit share: the texts that are measured, and the measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvalloc.cli.options import EngineOptions, ModelArgument
from kvalloc.cli.output import note
from kvalloc.cli.progress import ProgressBar, running
from kvalloc.errors import InputError, option
from kvalloc.online.conflicts import given_names
from kvalloc.units import Option, duration, parse_numbers, size

if TYPE_CHECKING:
    from kvalloc.measure import Document, Prompt

PROMPTS = "On which text or prompts"


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(EngineOptions, ModelArgument):
    """Which texts or prompts are measured on which model, and where the file goes."""

    output: Path | None
    """The file to write; None for the cache folder."""

    resume: Annotated[bool, Option()] = False
    """Resume the unfinished work of a killed command."""

    text: Annotated[Sequence[str] | None, Option("FILE|DIR", PROMPTS)] = None
    """Running text, files or folders, cut into samples."""

    prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", PROMPTS)] = None
    """Prompts of the kinds that are to come, one JSON object a line with 'prompt', 'text',
    'messages', or 'context' and 'input'."""

    tasks: Annotated[str | None, Option("NAME,NAME", PROMPTS)] = None
    """Prompts with answers instead of text, made by the rules of these tasks of 'kvalloc eval' from
    texts and words that no evaluation uses."""

    question_at: Annotated[Literal["inside", "after", "both"] | None, Option("", PROMPTS)] = None
    """With `tasks`: whether the prompt that is reduced ends with the question, or is the context
    alone, and the question is read after the reduction; inside by default."""

    lengths: Annotated[str | None, Option("N,N", PROMPTS)] = None
    """With `tasks`: prompts of each of these lengths, tokens; `context` by default."""

    context: Annotated[int, Option("N", PROMPTS, least=1)] = 1024
    """Longest prompt, tokens."""

    seed: Annotated[int, Option("N", PROMPTS, least=0)] = 0
    """Seed of the choice of samples or prompts."""


Prompts = Callable[[Any], "list[Document | Prompt] | None"]
"""Gives the prompts, for a tokenizer; None leaves them to the library."""


def measure(
    function: Callable[..., Any],
    options: MeasuringOptions,
    keywords: Mapping[str, Any],
    *,
    per_kind: int,
    by_tasks: bool | None = True,
    unit: str = "layers",
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Measure a model on the texts or prompts that the user names.

    Parameters
    ----------
    function : callable
        `kvalloc.profile` or `kvalloc.fit`.
    options : MeasuringOptions
    keywords : mapping
        What was typed of the function's own options.
    per_kind : int
        Prompts of every kind and form that are made by default.
    by_tasks : bool
        Make prompts by tasks where the user names no text; otherwise take texts that ship. None
        leaves it to `function`.
    unit : str
        What `function` counts.

    Returns
    -------
    tuple of object, dict and dict
        What was measured; file and time, for ``--json`` and for people.

    Raises
    ------
    KVAllocError
        If anything cannot be read, written, made or measured. What can be refused without the model
        is refused before it is loaded.
    """
    from kvalloc.formats.shipped_profiles import fitted_file
    from kvalloc.measure.checkpoint import check_output

    if options.output is not None:
        check_output(options.output, resume=options.resume)
    arguments = {**keywords, "context": options.context, "seed": options.seed}
    prompts, made = read_prompt_options(
        options, keywords.get("samples"), per_kind=per_kind, by_tasks=by_tasks
    )
    start = time.perf_counter()
    with running(options.model, options) as loaded:
        texts = prompts(loaded.tokenizer)
        if made:
            arguments["samples"] = len(texts or ())
        with ProgressBar("measuring", unit=unit) as progress:
            measured = function(
                loaded.model,
                loaded.tokenizer,
                texts,
                output=options.output,
                resume=options.resume,
                progress=progress,
                model_id=loaded.model_id,
                **arguments,
            )
    for reason in measured.set_aside.values():
        note(f"set aside, and named in the file: {reason}")
    output = options.output or fitted_file(measured.shape)
    seconds, count = time.perf_counter() - start, output.stat().st_size
    facts = {"output": output, "seconds": seconds, "file_bytes": count}
    shown = {
        "time": f"{duration(seconds)}, loading included",
        "written": f"{output} ({size(count)})",
    }
    return measured, facts, shown


def read_prompt_options(
    options: MeasuringOptions, samples: int | None, *, per_kind: int, by_tasks: bool | None
) -> tuple[Prompts, bool]:
    """Return the texts and prompts that the user names, or how to make some.

    Parameters
    ----------
    options : MeasuringOptions
    samples : int or None
        How many prompts to make.
    per_kind : int
        Prompts of every kind and form by default.
    by_tasks : bool
        As for `measure`.

    Returns
    -------
    tuple of callable and bool
        The prompts; and whether they are made by tasks.

    Raises
    ------
    InputError
        If options contradict each other, a file cannot be read, there is no such task, place or
        length; from the callable, if prompts cannot be made.
    """
    has_texts, tasks = bool(options.text or options.prompts), options.tasks
    if tasks is not None and has_texts:
        raise InputError("--tasks makes prompts, and text or prompts are given; give one of them")
    if tasks is None and (has_texts or not by_tasks):
        if about := {"question_at", "lengths"} & given_names(vars(options)):
            raise InputError(
                f"{option(max(about))} is about prompts that --tasks makes; add --tasks"
            )
        texts = _read(options) if has_texts or by_tasks is not None else None
        return lambda tokenizer: texts, False
    from kvalloc.prompts.calibration import KINDS, STANDINGS, calibration_prompts
    from kvalloc.prompts.tasks import find_tasks

    names = KINDS if tasks is None else [name.strip() for name in tasks.split(",")]
    kinds = tuple(task.name for task in find_tasks(names))
    question = options.question_at or "inside"
    lengths = _lengths(options.lengths, options.context)
    forms = len(kinds) * len(lengths) * len(STANDINGS[question])

    def make(tokenizer: Any) -> list[Document | Prompt]:
        try:
            return [
                *calibration_prompts(
                    tokenizer,
                    per_kind * forms if samples is None else samples,
                    lengths,
                    kinds=kinds,
                    question=question,
                    seed=options.seed,
                )
            ]
        except InputError as error:
            raise InputError(f"{error}; or bring your own with --prompts or --text") from error

    return make, True


def _read(options: MeasuringOptions) -> list[Document | Prompt]:
    from kvalloc.measure import default_texts, read_prompts, read_texts

    texts: list[Document | Prompt] = [*read_texts(options.text or ())]
    texts += [prompt for file in options.prompts or () for prompt in read_prompts(file)]
    return texts or [*default_texts()]


def _lengths(text: str | None, context: int) -> tuple[int, ...]:
    lengths = (context,) if text is None else tuple(dict.fromkeys(parse_numbers(text, "lengths")))
    for length in lengths:
        if not 0 < length <= context:
            raise InputError(
                f"--lengths {length}: a prompt has at least one token and at most the {context} "
                "of --context"
            )
    return lengths
