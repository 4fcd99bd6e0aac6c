"""Prompts made by the tasks' rules, for the commands that measure losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.measure import Prompt


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
        self,
        tokenizer: Any,
        *,
        samples: int | None,
        each: int,
        context: int,
        seed: int,
        begun_every: int = 0,
    ) -> list[Prompt]:
        """The prompts.

        Parameters
        ----------
        tokenizer : PreTrainedTokenizerBase
        samples : int or None
            How many; `each` of every kind and form by default.
        each : int
        context : int
            Reference context, tokens.
        seed : int
        begun_every : int
            See `kvalloc.prompts.calibration.calibration_prompts`.

        Raises
        ------
        InputError
            If they cannot be made; says how to give others.
        """
        from kvalloc.prompts.calibration import STANDINGS, calibration_prompts

        lengths = self.lengths or (context,)
        forms = len(self.kinds) * len(lengths) * len(STANDINGS[self.question])
        try:
            return calibration_prompts(
                tokenizer,
                each * forms if samples is None else samples,
                lengths,
                kinds=self.kinds,
                question=self.question,
                begun_every=begun_every,
                seed=seed,
            )
        except InputError as error:
            raise InputError(f"{error}; or bring your own with --prompts or --text") from error


def read_recipe(
    tasks: str | None,
    question: str | None,
    lengths: str | None,
    *,
    context: int,
    given: bool,
    default: Sequence[str] = (),
) -> Recipe | None:
    """What --tasks, --question and --lengths ask for; None where no prompts are to be made.

    Parameters
    ----------
    tasks, question, lengths : str or None
        As the user wrote them.
    context : int
        Reference context, tokens: no prompt may be longer.
    given : bool
        Whether there are texts or prompts of the user's.
    default : sequence of str
        Tasks where the user gives nothing at all.

    Raises
    ------
    InputError
        If they contradict each other, or there is no such task, place or length.
    """
    if tasks is not None and given:
        raise InputError("--tasks makes prompts, and text or prompts are given; give one of them")
    if tasks is None and (given or not default):
        if question is not None or lengths is not None:
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
        lengths=_lengths(lengths, context),
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
