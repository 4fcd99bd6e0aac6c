"""Tool calls: one or two calls of one of twelve tools.

References
----------
S. G. Patil et al., Berkeley Function Calling Leaderboard (2025): multiple (one call of one of
several tools) and parallel (two calls of one tool). Here tools are new, and earlier requests with
calls fill the prompt. Categories without a right tool, and with a single one (simple), are left
out.
"""

from __future__ import annotations

import json
import re

from kvalloc.data import words
from kvalloc.prompts.examples import Draft, Example, Question
from kvalloc.prompts.splits import KEYS, belongs
from kvalloc.prompts.tasks.task import Brief, by_rule

LEAD = (
    "You can call these tools, with all of their parameters:\n\n{tools}\n\n"
    "Answer each request with the calls it needs.\n\n"
)
TOOLS = {
    "send_message": "Send {person} a message about the {item}.",
    "call_person": "Call {person} on the phone.",
    "invite_guest": "Invite {person} to dinner at {hour} o'clock.",
    "book_table": "Book a table for {count} guests in the name of {person}.",
    "order_item": "Order {count} pieces of the {item}.",
    "find_shop": "Find a shop that sells a {item}.",
    "set_timer": "Set a timer of {minutes} minutes.",
    "set_alarm": "Set an alarm for {hour} o'clock.",
    "play_song": "Play the song about the {item} for {minutes} minutes.",
    "add_note": "Add a note about the {item}.",
    "delete_note": "Delete the note about the {item}.",
    "lend_item": "Lend the {item} to {person} for {minutes} minutes.",
}
"""Text of a request by the name of its tool; its places are the tool's parameters."""
INTEGERS = {"count": range(2, 100), "minutes": range(5, 100), "hour": range(1, 13)}
"""Values of the parameters that are integers."""
QUESTION = Question(
    text="Request: {request}",
    prefix="Calls:",
    metric="call",
    first_line=True,
    max_new_tokens=128,
)
MOST_REQUESTS = 6
TOKENS_PER_EXAMPLE = 20
"""Lower bound of a request with its calls, in any vocabulary."""
_PLACE = re.compile(r"{(\w+)}")


def _schema(name: str, request: str) -> str:
    kinds = {one: "integer" if one in INTEGERS else "string" for one in _PLACE.findall(request)}
    types = {one: {"type": kind} for one, kind in kinds.items()}
    return json.dumps({"name": name, "parameters": {"type": "object", "properties": types}})


def _question(brief: Brief) -> Question:
    """Return a request for one or two calls of a random tool."""
    split, draw = brief.request.split, brief.draw
    strings = {
        "person": [name for name in words("first_names") if belongs(name, split)],
        "item": KEYS[split],
    }
    name, request = draw.choice(list(TOOLS.items()))
    requests, calls = [], []
    for _ in range(draw.choice((1, 1, 2))):
        arguments = {one: draw.choice((strings | INTEGERS)[one]) for one in _PLACE.findall(request)}
        requests.append(request.format(**arguments))
        calls.append({"name": name, "arguments": arguments})
    return QUESTION.filled(json.dumps(calls), request=" ".join(requests))


def _calls(brief: Brief) -> Draft:
    questions = tuple(_question(brief) for _ in range(brief.request.turns))
    n_examples = brief.request.n_tokens // TOKENS_PER_EXAMPLE
    examples = [_question(brief) for _ in range(n_examples)]
    shown = [f"{one.text}\n{one.prefix} {one.answers[0]}" for one in examples]
    tools = LEAD.format(tools="\n".join(_schema(*tool) for tool in TOOLS.items()))

    def make(size: int) -> Example:
        context = tools + "\n\n".join(shown[:size])
        return Example(context=context, questions=questions, source="own tools", chat=False)

    return Draft(make=make, min_items=2, max_items=n_examples)


TASKS = (by_rule("tools", _calls, most_turns=MOST_REQUESTS),)
