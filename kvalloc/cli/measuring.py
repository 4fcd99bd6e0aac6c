"""Measurement on texts, for profile and fit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from kvalloc.cli.options import EngineOptions, ModelArgument
from kvalloc.cli.output import ProgressBar, note
from kvalloc.errors import InputError, option
from kvalloc.formats.shipped_profiles import fitted_file
from kvalloc.measure.checkpoint import check_output
from kvalloc.online.conflicts import given_names
from kvalloc.prompts.calibration import KINDS, STANDINGS, calibration_prompts
from kvalloc.prompts.tasks import find_tasks
from kvalloc.prompts.texts import Document, Prompt, read_prompts, read_texts
from kvalloc.units import Option, duration, parse_numbers, size

PROMPTS = "On which text or prompts"


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(EngineOptions, ModelArgument):
    """Texts or prompts, the model, and the file."""

    output: Path | None
    """The file to write; None for the cache folder."""

    resume: Annotated[bool, Option()] = False
    """Resume the unfinished work of a killed command."""

    text: Annotated[Sequence[str] | None, Option("FILE|DIR", PROMPTS)] = None
    """Running text, files or folders, cut into samples."""

    prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", PROMPTS)] = None
    """Prompts like the expected ones, one JSON object a line with 'prompt', 'text', 'messages', or
    'context' and 'input'."""

    tasks: Annotated[str | None, Option("NAME,NAME", PROMPTS)] = None
    """Prompts with answers instead of text, made by the rules of these tasks of 'kvalloc eval',
    from texts and words that no evaluation uses."""

    question_at: Annotated[Literal["inside", "after", "both"] | None, Option("", PROMPTS)] = None
    """With `tasks`: whether the reduced prompt ends with the question, or the question is read
    after the reduction; inside by default."""

    lengths: Annotated[str | None, Option("N,N", PROMPTS)] = None
    """With `tasks`: prompts of each of these lengths, tokens; `context` by default."""

    context: Annotated[int | None, Option("N", PROMPTS, minimum=1)] = None
    """Longest prompt, tokens; 1024 by default, with --formats 600."""

    seed: Annotated[int, Option("N", PROMPTS, minimum=0)] = 0
    """Seed of the choice of samples or prompts."""


def measure(
    function: Callable[..., Any],
    options: MeasuringOptions,
    keywords: Mapping[str, Any],
    *,
    per_kind: int,
    makes_prompts: bool = False,
    default: Callable[[], list[Document]] = list,
    unit: str = "layers",
    context: int = 1024,
) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Measure a model on texts or prompts, by `kvalloc.profile` or `kvalloc.fit`.

    Without them, ``makes_prompts`` makes ``per_kind`` prompts of every kind and form, else
    ``default`` returns texts. The function counts ``unit``. Checks without the model come first.

    Returns
    -------
    tuple of object, dict and dict
        The result; file and time, for ``--json`` and for people.
    """
    if options.output is not None:
        check_output(options.output, resume=options.resume)
    context = options.context or context
    arguments = {**keywords, "context": context, "seed": options.seed}
    tasks, texts = options.tasks, _read(options)
    if texts and tasks is not None:
        raise InputError("--tasks makes prompts, and text or prompts are given; give one of them")
    if makes_prompts and not texts:
        tasks = tasks or ",".join(KINDS)
    if tasks is not None:
        made = _prompts_of(options, tasks, context, per_kind, keywords.get("samples"))
    elif about := {"question_at", "lengths"} & given_names(vars(options)):
        raise InputError(f"{option(max(about))} is about prompts that --tasks makes; add --tasks")
    start = time.perf_counter()
    with options.running(options.model) as loaded:
        if tasks is not None:
            try:
                texts = [*calibration_prompts(loaded.tokenizer, **made)]
            except InputError as error:
                raise InputError(f"{error}; or bring your own with --prompts or --text") from error
            arguments["samples"] = len(texts)
        with ProgressBar("measuring", unit=unit) as progress:
            measured = function(
                loaded.model,
                loaded.tokenizer,
                texts or default() or None,
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


def _read(options: MeasuringOptions) -> list[Document | Prompt]:
    texts: list[Document | Prompt] = [*read_texts(options.text or ())]
    return texts + [prompt for file in options.prompts or () for prompt in read_prompts(file)]


def _prompts_of(
    options: MeasuringOptions, tasks: str, context: int, per_kind: int, samples: int | None
) -> dict[str, Any]:
    kinds = tuple(task.name for task in find_tasks([name.strip() for name in tasks.split(",")]))
    question = options.question_at or "inside"
    lengths: tuple[int, ...] = (context,)
    if options.lengths is not None:
        lengths = tuple(dict.fromkeys(parse_numbers(options.lengths, "lengths")))
    if wrong := [length for length in lengths if not 0 < length <= context]:
        raise InputError(
            f"--lengths {wrong[0]}: a prompt has at least one token and at most the {context} of "
            "--context"
        )
    count = per_kind * len(kinds) * len(lengths) * len(STANDINGS[question])
    return {
        "n_prompts": count if samples is None else samples,
        "n_tokens": lengths,
        "kinds": kinds,
        "question": question,
        "seed": options.seed,
    }
