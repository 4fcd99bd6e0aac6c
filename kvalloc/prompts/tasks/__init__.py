"""Tasks for evaluations: prompts made by rule, or read from a file."""

from __future__ import annotations

from collections.abc import Sequence

from kvalloc.errors import one_of
from kvalloc.prompts.tasks import (
    completion,
    frequent_words,
    magic_numbers,
    needles,
    pairs,
    reading,
    running,
    tool_calls,
    tree_walk,
    uuid_pairs,
    variable_tracking,
)
from kvalloc.prompts.tasks.task import Task

__all__ = ["TASKS", "Task", "find_tasks"]

_MODULES = (
    *(needles, pairs, reading, completion, running),
    *(magic_numbers, variable_tracking, frequent_words, uuid_pairs, tree_walk, tool_calls),
)
TASKS: dict[str, Task] = {task.name: task for module in _MODULES for task in module.TASKS}
"""The values of ``kvalloc eval --tasks``."""


def find_tasks(names: Sequence[str]) -> list[Task]:
    """Return the tasks of these names.

    Raises
    ------
    InputError
        If there is none of a name.
    """
    return [one_of("task", name, TASKS) for name in dict.fromkeys(names)]
