"""What caches are evaluated on: prompts made by rule, or read from a file, one kind a module."""

from __future__ import annotations

from collections.abc import Sequence

from kvalloc.errors import InputError
from kvalloc.prompts.tasks.completion import COMPLETION_TASK
from kvalloc.prompts.tasks.extraction import COMMON_TASK, FREQUENT_TASK
from kvalloc.prompts.tasks.labels import LABELS_TASK
from kvalloc.prompts.tasks.needles import NEEDLE_KEYS_TASK, NEEDLE_TASK
from kvalloc.prompts.tasks.pairs import PAIRS_TASK
from kvalloc.prompts.tasks.reading import FACTS_TASK, QUOTE_TASK
from kvalloc.prompts.tasks.running import KL_TASK, PERPLEXITY_TASK
from kvalloc.prompts.tasks.task import Task
from kvalloc.prompts.tasks.tracking import TRACKING_TASK

__all__ = ["TASKS", "Task", "find_tasks"]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        NEEDLE_TASK,
        NEEDLE_KEYS_TASK,
        PAIRS_TASK,
        TRACKING_TASK,
        COMMON_TASK,
        FREQUENT_TASK,
        LABELS_TASK,
        FACTS_TASK,
        QUOTE_TASK,
        COMPLETION_TASK,
        KL_TASK,
        PERPLEXITY_TASK,
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
