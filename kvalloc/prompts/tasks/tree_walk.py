"""State of a depth-first walk through a tree, after a long given text.

References
----------
TriAttention's recursive state queries, from its description: a model decodes a depth-first search
and remembers its state. Here the walk is fixed text of ``answer_tokens`` tokens after tree, rules
and an example; later turns ask for the state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice, pairwise

from kvalloc.prompts.chat import encode
from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.tasks.pairs import word_keys
from kvalloc.prompts.tasks.running import SPEED_TOKENS
from kvalloc.prompts.tasks.task import MOST_TURNS, Brief, by_rule

LEAD = """\
A tree is walked depth first. Each line of the tree names a node and the nodes below it.
Every step goes down to the next node below that was not entered yet, or else up to the node above.
After the last node the walk begins again.

Example of a tree:
hill: pond, mill
pond: frog, fish

Its walk:
down to pond
down to frog
up to pond
down to fish

The path is now: hill > pond > fish

The tree:
"""
WALK = Question(
    text="Write the walk from {root} on, one step a line.",
    prefix="Its walk:",
    max_new_tokens=SPEED_TOKENS,
)
PATH = Question(
    text="Where does the walk stand now? Write the path from {root} to that node.",
    prefix="The path is now: {root} >",
    metric="all",
    first_line=True,
    max_new_tokens=48,
)
BELOW = Question(
    text="Which nodes are directly below {node}?",
    prefix="{node}:",
    metric="all",
    first_line=True,
    max_new_tokens=48,
)
TOKENS_PER_NODE = 2
"""Lower bound for a node's name with a comma or line end."""
Path = tuple[str, ...]


def _paths(below: dict[str, list[str]], path: Path) -> Iterator[Path]:
    """Return the path to the present node after each step below a path's end."""
    for node in below[path[-1]]:
        yield (*path, node)
        yield from _paths(below, (*path, node))
        yield path


def _walk(brief: Brief) -> Draft:
    request = brief.request
    names = word_keys(brief, request.n_tokens // TOKENS_PER_NODE + 3)
    root, above = names[0], [brief.draw.randrange(place + 1) for place in range(len(names) - 1)]

    def make(size: int) -> Example:
        below: dict[str, list[str]] = {name: [] for name in names[:size]}
        for name, place in zip(names[1:size], above, strict=False):
            below[names[place]].append(name)
        tree = "\n".join(f"{name}: {', '.join(nodes)}" for name, nodes in below.items() if nodes)
        paths = [(root,), *islice(cycle(_paths(below, (root,))), request.answer_tokens)]
        steps = [
            f"\n{'down' if len(now) > len(before) else 'up'} to {now[-1]}"
            for before, now in pairwise(paths)
        ]
        # The walk ends where it enters a node, so that the path has one below the root.
        ends = [end for end, step in enumerate(steps, start=1) if step.startswith("\ndown")]
        fitting = bisect_right(
            ends,
            request.answer_tokens,
            key=lambda end: len(encode(request.tokenizer, "".join(steps[:end]))),
        )
        end = ends[max(fitting, 1) - 1]
        inner = [name for name in dict.fromkeys(path[-1] for path in paths[:end]) if below[name]]
        parents = [inner[turn * len(inner) // request.turns] for turn in range(1, request.turns)]
        questions = (
            replace(WALK.filled(root=root), continuation="".join(steps[:end])),
            PATH.filled(*paths[end][1:], root=root),
            *(BELOW.filled(*below[name], node=name) for name in parents),
        )
        return Example(context=f"{LEAD}{tree}", questions=questions, source="random tree")

    return Draft(make=make, min_items=4, max_items=len(names))


TASKS = (by_rule("dfs", _walk, most_turns=MOST_TURNS),)
