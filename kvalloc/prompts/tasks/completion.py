"""Code completion: the next line of a module of Python's standard library.

References
----------
LongBench (2023), Table 1, LCC: a file's next line, by edit similarity. Here prompts differ between
versions of Python.
"""

from __future__ import annotations

import sys
import sysconfig
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

from kvalloc.errors import InputError, option
from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.splits import Split, belongs
from kvalloc.prompts.tasks.task import Brief, by_rule

MIN_CHARACTERS = 12
"""A shorter next line, such as ``else:``, says little."""
QUESTION_LINES = 5
"""Last lines before the answer: the question, where that comes after the compression."""
MIN_LINES = 30


def _modules(split: Split) -> list[Path]:
    """Return a split's modules of one file each."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        folder / f"{name}.py"
        for name in sorted(sys.stdlib_module_names)
        if belongs(name, split) and (folder / f"{name}.py").is_file()
    ]


def _lines(file: Path, n_tokens: int) -> list[str]:
    lines = file.read_text("utf-8").expandtabs(4).rstrip().split("\n")
    return lines if sum(map(len, lines)) > 6 * n_tokens else []


def _is_worth_asking(line: str) -> bool:
    code = line.strip()
    return len(code) >= MIN_CHARACTERS and not any(mark in code for mark in ("#", "`", "//", '"""'))


def _completion(brief: Brief) -> Draft:
    n_tokens = brief.request.n_tokens
    long_enough = [
        (file.stem, lines)
        for file in _modules(brief.request.split)
        if (lines := _lines(file, n_tokens))
    ]
    if not long_enough:
        raise InputError(
            f"no module of Python's standard library has {n_tokens} tokens; ask for a "
            f"shorter {option('context')}"
        )
    name, lines = brief.draw.choice(long_enough)
    # Lines before the answer are taken from it backwards, so it must leave enough behind it.
    ends = list(accumulate(len(line) + 1 for line in lines))
    worth = [place for place, line in enumerate(lines) if _is_worth_asking(line)]
    far = [place for place in worth if place >= bisect_right(ends, 5 * n_tokens)]
    at = brief.draw.choice(far or [place for place in worth if place >= MIN_LINES])

    def make(size: int) -> Example:
        before = lines[max(0, at - size) : at]
        question = Question(
            # No line end: with it, tokenizers would split it from the indentation that follows.
            text="\n".join(before[-QUESTION_LINES:]),
            answers=(lines[at].strip(),),
            metric="edit",
            first_line=True,
            max_new_tokens=32,
        )
        return Example(
            context="\n".join(before[:-QUESTION_LINES]),
            questions=(question,),
            source=f"{name}.py",
            joint="\n",
            chat=False,
        )

    return Draft(make=make, min_items=MIN_LINES // 2, max_items=at)


TASKS = (by_rule("code", _completion),)
