"""Reading text and prompts, what is said about the unreadable, and texts that are held out."""

import json

import pytest
from letters import Letters, read

from kvalloc.errors import InputError
from kvalloc.measure.sampling import choose_samples
from kvalloc.prompts.splits import refuse_held_out, split_texts
from kvalloc.prompts.tasks import TASKS
from kvalloc.prompts.tasks.longbench import read_records
from kvalloc.prompts.texts import Document, Prompt, default_texts, read_prompts, read_texts

# Reading text and prompts, and what is said about the unreadable


def test_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("second")
    (tmp_path / "b" / "empty.py").write_text("  \n")
    (tmp_path / "b" / "image.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "three.txt").write_text("hidden")
    (tmp_path / "a.txt").write_bytes("\ufefffirst".encode())
    odd = tmp_path / "odd.log"
    odd.write_text("third")
    assert read_texts([tmp_path, odd]) == [
        Document(text="first", name="a.txt"),
        Document(text="second", name="two.md"),
        Document(text="third", name="odd.log"),
    ]


def test_text_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "latin.txt").write_bytes("d\u00e9j\u00e0".encode("latin-1"))
    with pytest.raises(InputError, match="latin.txt is not UTF-8 text .byte 1"):
        read_texts([tmp_path / "latin.txt"])


@pytest.mark.parametrize(
    ("value", "said"),
    [("9" * 5000, "out of range at column"), ("[" * 100_000, "recursion limit")],
    ids=["long", "deep"],
)
def test_a_line_that_is_too_much_is_named(tmp_path, value, said):
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": {value}}}')
    for read_lines in (read_prompts, read_records):
        with pytest.raises(InputError, match=f"p.jsonl, line 1 is not a JSON .*{said}"):
            read_lines(tmp_path / "p.jsonl")


def test_a_folder_without_text(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(InputError, match="holds no text files"):
        read_texts([tmp_path])


def test_prompts_of_all_forms(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    lines = [
        json.dumps({"prompt": "one", "answer": "x"}),
        "",
        json.dumps({"text": "two\u2028still two"}, ensure_ascii=False),
        json.dumps({"context": "long", "input": "question", "answers": ["one", "two"]}),
        json.dumps({"messages": chat}),
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    assert read_prompts(file) == [
        Prompt(text="one", answer="x", name="p.jsonl", line=1),
        Prompt(text="two\u2028still two", name="p.jsonl", line=3),
        Prompt(text="long\n\nquestion", answer="one", name="p.jsonl", line=4),
        Prompt(messages=tuple(chat), name="p.jsonl", line=5),
    ]


def test_what_is_not_read_may_hold_anything(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "n": [{}], "x": NaN}')
    assert read_prompts(file) == [Prompt(text="a", name="p.jsonl", line=1)]


def test_the_shipped_texts():
    documents = default_texts()
    assert sum(len(document.text) for document in documents) > 100_000
    assert all(document.name.startswith("profile_") for document in documents)


# The texts kept for the final evaluation are measured on by nobody


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
