"""The texts kept for the final evaluation are measured on by nobody."""

from __future__ import annotations

import pytest
from letters import Letters, read

from kvalloc.errors import InputError
from kvalloc.measure import Document, Prompt, default_texts
from kvalloc.measure.sampling import choose_samples
from kvalloc.prompts.splits import refuse_held_out, split_texts
from kvalloc.prompts.tasks import TASKS


def test_no_text_to_profile_on_is_held_out():
    refuse_held_out(default_texts())
    for text in split_texts("development").values():
        refuse_held_out([Document(text=text)])


@pytest.mark.parametrize("name", ["needle", "qa"])
def test_prompts_of_the_held_out_split_are_refused_as_samples(name):
    def prompts(split):
        cases = TASKS[name].make(Letters(), 2, 3000, split=split)
        return [Prompt(text=read(case.input_ids), name="p.jsonl", line=4) for case in cases]

    refuse_held_out(prompts("profiling"))
    with pytest.raises(InputError, match=r"p.jsonl, line 4 holds a piece of heldout_\w+.txt"):
        choose_samples(prompts("held-out"), Letters(), context_tokens=64, least_tokens=8)


def test_a_piece_is_found_wherever_it_stands_and_a_quotation_is_none():
    text = split_texts("held-out")["ford_1976"].upper()
    words = text.split()
    around = "one two three " * 50
    piece = Document(text=around + "\n".join(words[500:530]) + around, name="mine.txt")
    with pytest.raises(InputError, match="mine.txt holds a piece of heldout_ford_1976.txt"):
        refuse_held_out([piece])
    chat = Prompt(messages=({"role": "user", "content": " ".join(words[10:60])},))
    with pytest.raises(InputError, match="the prompts holds? a piece"):
        refuse_held_out([chat])
    refuse_held_out([Document(text=around + " ".join(words[500:515]) + around)])
