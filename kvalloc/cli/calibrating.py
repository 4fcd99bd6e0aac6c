"""The prompts of the commands that measure losses: given, or made by the tasks' rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from kvalloc.errors import InputError
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.measure import Document, Prompt

PROMPTS = "On which text or prompts"
DEFAULT_CONTEXT = 1024


class PromptOptions(TypedDict, total=False):
    """Which texts or prompts are measured.

    Parameters
    ----------
    text : sequence of str
        Running text, files or folders, cut into samples.
    prompts : sequence of str
        Prompts of the kinds that are to come, one JSON object a line with 'prompt', 'text',
        'messages', or 'context' and 'input'.
    tasks : str
        Prompts with answers instead of text, made by the rules of these tasks of 'kvalloc eval'
        from texts and words that no evaluation uses.
    question : {"inside", "after", "both"}, default "inside"
        With `tasks`: whether the prompt that is reduced ends with the question, or is the context
        alone, and the question is read after the reduction.
    lengths : str
        With `tasks`: prompts of each of these lengths, tokens; `context` by default.
    context : int, default 1024
        Reference context, tokens.
    seed : int, default 0
        Of the choice of samples or prompts.
    """

    text: Annotated[Sequence[str] | None, Option("FILE|DIR", PROMPTS)]
    prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", PROMPTS)]
    tasks: Annotated[str | None, Option("NAME,NAME", PROMPTS)]
    question: Annotated[Literal["inside", "after", "both"] | None, Option("", PROMPTS)]
    lengths: Annotated[str | None, Option("N,N", PROMPTS)]
    context: Annotated[int | None, Option("N", PROMPTS, least=1)]
    seed: Annotated[int | None, Option("N", PROMPTS, least=0)]


def read_given(given: Mapping[str, Any]) -> list[Document | Prompt]:
    """The texts and prompts in the files that the user names."""
    from kvalloc.measure import read_prompts, read_texts

    texts: list[Document | Prompt] = [*read_texts(given.get("text", ()))]
    return texts + [one for file in given.get("prompts", ()) for one in read_prompts(file)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which prompts are to be made.

    Attributes
    ----------
    kinds : tuple of str
        Tasks.
    question : str
        See `kvalloc.prompts.calibration.calibration_prompts`.
    lengths : tuple of int
        Tokens; empty for the context's.
    """

    kinds: tuple[str, ...]
    question: str = "inside"
    lengths: tuple[int, ...] = ()

    def make(
        self, tokenizer: Any, given: Mapping[str, Any], *, each: int, begun_every: int = 0
    ) -> list[Prompt]:
        """The prompts.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase
        given : mapping
            What was typed of ``context``, ``seed`` and ``samples``, how many prompts.
        each : int
            So many of every kind and form by default.
        begun_every : int
            See `kvalloc.prompts.calibration.calibration_prompts`.

        Raises
        ------
        InputError
            If they cannot be made; says how to give others.
        """
        from kvalloc.prompts.calibration import STANDINGS, calibration_prompts

        lengths = self.lengths or (given.get("context", DEFAULT_CONTEXT),)
        forms = len(self.kinds) * len(lengths) * len(STANDINGS[self.question])
        try:
            return calibration_prompts(
                tokenizer,
                given.get("samples", each * forms),
                lengths,
                kinds=self.kinds,
                question=self.question,
                begun_every=begun_every,
                seed=given.get("seed", 0),
            )
        except InputError as error:
            raise InputError(f"{error}; or bring your own with --prompts or --text") from error


def read_recipe(given: Mapping[str, Any], *, default: Sequence[str] = ()) -> Recipe | None:
    """What --tasks, --question and --lengths ask for; None where no prompts are to be made.

    Parameters
    ----------
    given : mapping
        Of `PromptOptions`, those that were typed.
    default : sequence of str
        Tasks where the user gives nothing at all.

    Raises
    ------
    InputError
        If they contradict each other, or there is no such task, place or length.
    """
    own, tasks = bool(given.get("text") or given.get("prompts")), given.get("tasks")
    if tasks is not None and own:
        raise InputError("--tasks makes prompts, and text or prompts are given; give one of them")
    question = given.get("question")
    if tasks is None and (own or not default):
        if question is not None or "lengths" in given:
            flag = "--question" if question is not None else "--lengths"
            raise InputError(f"{flag} is about prompts that --tasks makes; add --tasks")
        return None
    from kvalloc.prompts.calibration import STANDINGS
    from kvalloc.prompts.tasks import find_tasks

    names = default if tasks is None else [name.strip() for name in tasks.split(",")]
    if question is not None and question not in STANDINGS:
        raise InputError(f"--question {question} is none of {', '.join(STANDINGS)}; give one")
    return Recipe(
        kinds=tuple(task.name for task in find_tasks(names)),
        question=question or "inside",
        lengths=_lengths(given.get("lengths"), given.get("context", DEFAULT_CONTEXT)),
    )


def _lengths(text: str | None, context: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError(f"--lengths {text} is no list of numbers; write 512,1024") from None
    for length in found:
        if not 0 < length <= context:
            raise InputError(
                f"--lengths {length}: a prompt has at least one token and at most the {context} "
                "of --context"
            )
    return found
