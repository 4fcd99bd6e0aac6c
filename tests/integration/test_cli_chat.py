"""``kvalloc chat``: conversations, and documents read once, saved and asked about; tiny models."""

import io
import os
import re
import signal
import sys

import pytest
from cli_tools import Stdin, Terminal, prose, refused, run, succeed

import kvalloc
from kvalloc.cli.main import main
from kvalloc.formats.shipped_profiles import load_profile

QUESTIONS = [prose(40)[60:90].strip(), "w3 w8 w13", "w21"]


@pytest.fixture(scope="module")
def folder(models, profiles, tmp_path_factory):
    """Models, a budget profile, a document, and a saved cache of it."""
    folder = tmp_path_factory.mktemp("questions")
    for path in (*models.iterdir(), *profiles.iterdir()):
        (folder / path.name).symlink_to(path)
    (folder / "doc.txt").write_text(prose(120))
    succeed(*reading(folder), "--save-cache", folder / "doc.kv")
    return folder


def reading(folder, name="tiny"):
    """The words that let a model read the document."""
    profile = folder / f"{name.replace('chatty', 'tiny')}.json"
    prompt = ("--prompt-file", folder / "doc.txt", "--max-new-tokens", 6)
    return ("chat", folder / name, "--profile", profile, *prompt)


def asking(folder, *questions, name="tiny"):
    """The words that ask about a saved document."""
    asked = [word for question in questions for word in ("--question", question)]
    return ("chat", folder / name, "--cache", folder / "doc.kv", "--max-new-tokens", 6, *asked)


def test_reading_is_told_and_saved(folder):
    ran = run(*reading(folder), "--save-cache", folder / "again.kv")
    assert (ran.code, ran.out) == (0, "")
    first, second = ran.err.splitlines()
    assert first.startswith("doc.txt: 120 tokens read in ")
    assert "; cache: asked for 50.0% at 64 tokens, 43.7% of a cache at 16" in first
    assert second.startswith(f"saved as {folder / 'again.kv'}, ")
    assert run(*reading(folder), "--save-cache", folder / "again.kv", "--quiet").err == ""


@pytest.mark.parametrize("name", ["tiny", "gemma", "chatty"])
def test_a_saved_document_answers_as_one_just_read(folder, name):
    path = folder / f"{name}.kv"
    more = ("--json", *(["--allow-other-model"] if name == "chatty" else []))
    questions = [word for question in QUESTIONS for word in ("--question", question)]
    direct = succeed(*reading(folder, name), *questions, "--save-cache", path, *more)
    loaded = run("chat", folder / name, "--cache", path, *questions, "--max-new-tokens", 6,
                 *more)  # fmt: skip
    for one, other in zip(direct.json["answers"], loaded.json["answers"], strict=True):
        assert one["answer"] == other["answer"]
        assert one["question_tokens"] == other["question_tokens"]
    assert direct.json["saved"] == str(path)
    assert (loaded.json["cache"], loaded.json["saved"]) == (str(path), None)
    if name == "chatty":  # w2 calls for the answer
        assert loaded.json["answers"][-1]["question_tokens"] == 2


def test_typed_turns_see_the_ones_before(folder, monkeypatch):
    asked = asking(folder, QUESTIONS[1], QUESTIONS[1])
    apart = [row["answer"] for row in run(*asked, "--json").json["answers"]]
    monkeypatch.setattr(sys, "stdin", Stdin(f"{QUESTIONS[1]}\n\n{QUESTIONS[1]}\n"))
    talked = run(*asking(folder), "--json").json["answers"]
    assert apart[0] == apart[1] == talked[0]["answer"]
    assert talked[1]["answer"] != apart[1]
    # The last token of an answer has not been fed before, but for one that ends it.
    assert talked[1]["question_tokens"] - talked[0]["question_tokens"] in (0, 1)
    monkeypatch.setattr(sys, "stdin", Stdin("\n"))
    none = run(*asking(folder))
    assert (none.code, none.out) == (2, "")
    assert "there is no question" in none.err


def test_only_answers_go_to_stdout(folder, monkeypatch):
    """In a terminal questions stand between them, on stderr unless it is hidden or elsewhere."""
    facts = run(*asking(folder, *QUESTIONS), "--json").json
    assert (facts["document"], facts["document_tokens"]) == ("doc.txt", 120)
    assert facts["retained_bytes"] < 0.7 * facts["full_bytes"]
    assert min(facts["read_seconds"], facts["load_seconds"]) > 0
    assert [row["question"] for row in facts["answers"]] == QUESTIONS
    answers = [row["answer"] for row in facts["answers"]]
    ran = run(*asking(folder, *QUESTIONS))
    assert ran.out == "\n".join(f"{answer}\n" for answer in answers)  # an empty line between
    for words in ("120 tokens loaded in", "x as long)", *(f"> {one}" for one in QUESTIONS)):
        assert words in ran.err
    assert ran.err.count("the first after") == 3
    for err, more, empty in ((Terminal(), (), False), (io.StringIO(), (), True),
                             (Terminal(), ("--quiet",), True)):  # fmt: skip
        out = Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert main([*map(str, asking(folder, *QUESTIONS)), *more]) == 0
        between = "\n" if empty else ""
        assert out.getvalue() == between.join(f"{answer}\n" for answer in answers)


def test_a_conversation_begins_without_a_document(folder, monkeypatch):
    """Its first turn is the prompt that `generate` answers."""
    way = (folder / "chatty", "--budget", "50%", "--max-new-tokens", 4)
    monkeypatch.setattr(sys, "stdin", Stdin(f"{prose(80)}\n{QUESTIONS[2]}\n"))
    ran = succeed("chat", *way, "--json")
    first, second = ran.json["answers"]
    alone = run("generate", *way, "--prompt", prose(80), "--json").json
    assert (first["answer"], first["question_tokens"]) == (alone["answer"], alone["prompt_tokens"])
    assert second["question_tokens"] < 8
    assert (ran.json["document"], ran.json["cache"]) == (None, None)
    assert ran.json["retained_bytes"] < ran.json["full_bytes"]


def test_a_conversation_goes_on_from_a_saved_answer(folder, monkeypatch):
    way = (folder / "chatty", "--max-new-tokens", 4)
    saved = ("--prompt", prose(80), "--save-cache", folder / "said.kv")
    ran = run("generate", *way, "--budget", "100%", *saved)
    assert f"saved as {folder / 'said.kv'}" in ran.err
    answers = []
    for begun, typed in ((("--cache", folder / "said.kv"), ""), (("--budget", "100%"), prose(80))):
        monkeypatch.setattr(sys, "stdin", Stdin(f"{typed}\n{QUESTIONS[2]}\n"))
        answers.append(
            [row["answer"] for row in run("chat", *way, *begun, "--json").json["answers"]]
        )
    assert answers[0] == answers[1][1:]


@pytest.fixture
def typed(monkeypatch):
    """Let lines be typed in a terminal, then Ctrl-D; gives the prompts that it shows."""
    prompts = []

    def type_lines(*lines):
        left = iter(lines)

        def read(prompt):
            prompts.append(prompt)
            if (line := next(left, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", Stdin("", terminal=True))
        return prompts

    return type_lines


def test_a_terminal_is_asked_until_ctrl_d(folder, monkeypatch, typed):
    monkeypatch.setattr(sys, "stdin", Stdin(f"{QUESTIONS[1]}\n{QUESTIONS[2]}\n"))
    expected = run(*asking(folder)).out
    prompts = typed(QUESTIONS[1], " ".join(["w5"] * 500), "", QUESTIONS[2])
    ran = run(*asking(folder))
    assert (ran.code, ran.out, prompts) == (0, expected, ["> "] * 5)
    assert "Ctrl-D ends" in ran.err
    left = re.findall(r"\nconversation of (\d+) tokens: asked for 50.0%", ran.err)
    assert 120 < int(left[0]) < int(left[1])  # what each turn leaves
    assert ran.err.count("; the first") == 2
    assert "no room" in ran.err  # for the long one, and the conversation goes on


def test_ctrl_c_ends_one_answer_and_the_conversation_goes_on(folder, monkeypatch, typed):
    from kvalloc.extensions import answering

    written, calls = answering._written, []

    def interrupted(*arguments, **more):
        calls.append(1)
        for token in written(*arguments, **more):
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield token

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(answering, "_written", interrupted)
    typed(QUESTIONS[1], QUESTIONS[2])
    ran = run(*asking(folder), "--json")
    assert (ran.code, signal.getsignal(signal.SIGINT)) == (0, before)
    assert "broken off" in ran.err
    broken, whole = ran.json["answers"]
    assert (broken["new_tokens"], len(calls)) == (1, 2)
    assert whole["new_tokens"] > 1


def blending(folder, *more):
    """The words that ask about two documents, the second one longer."""
    return ("chat", folder / "tiny", "--max-new-tokens", 6, "--document", folder / "doc.kv",
            "--document", folder / "two.kv", *more)  # fmt: skip


def test_documents_are_put_together_in_front_of_each_question(folder, monkeypatch):
    (folder / "two.txt").write_text(prose(150)[100:])
    reading_two = [
        folder / "two.txt" if word == folder / "doc.txt" else word for word in reading(folder)
    ]
    succeed(*reading_two, "--save-cache", folder / "two.kv")
    questions = [word for question in QUESTIONS for word in ("--question", question)]
    ran = succeed(*blending(folder, *questions), "--json")
    assert ran.err.count("doc.kv, two.kv: ") == len(QUESTIONS)
    assert ran.json["document_tokens"] > 200
    alone = run(*blending(folder, "--question", QUESTIONS[-1]), "--json").json["answers"][0]
    assert alone["answer"] == ran.json["answers"][-1]["answer"]
    monkeypatch.setattr(sys, "stdin", Stdin(f"{QUESTIONS[0]}\n{QUESTIONS[1]}\n"))
    talked = run(*blending(folder, "--recompute", "0"), "--json")
    assert (talked.code, len(talked.json["answers"])) == (0, 2)
    assert talked.err.count("put together in") == 1


def test_documents_of_a_chat_are_refused(folder):
    path, allowed = folder / "of_chat.kv", "--allow-other-model"
    succeed(*reading(folder, "chatty"), "--chat", allowed, "--save-cache", path)
    asked = ("chat", folder / "chatty", "--document", path, allowed, "--question", "w1")
    refused(folder, *asked, words=["begins with the model's chat form", "--no-chat"])


def test_a_saved_cache_can_be_inspected(folder):
    facts = run("inspect", folder / "doc.kv", "--json").json
    assert (facts["kind"], facts["document"]) == ("kvalloc.cache", "doc.txt")
    assert (facts["seen_tokens"], facts["prompt_tokens"], facts["rows"]) == (120, 120, 1)
    assert facts["bits"] is None
    asked = run(*asking(folder, "w1"), "--json").json
    for name in ("full_bytes", "read_seconds"):
        assert facts[name] == asked[name]
    shown = run("inspect", folder / "doc.kv")
    for words in ("doc.txt", "120, float32", "a full cache takes", "--cache", "window 8"):
        assert words in shown.out
    (folder / "odd.kv").write_bytes((folder / "doc.kv").read_bytes()[:-5000])
    line = refused(folder, "inspect", folder / "odd.kv")
    assert "expected a cache written with --save-cache; read the prompt again" in line


def test_a_saved_document_is_asked_in_the_type_that_it_was_read_in(folder):
    half = ("--dtype", "bfloat16", "--save-cache", folder / "half.kv")
    succeed(*reading(folder), *half)
    words = ("chat", folder / "tiny", "--cache", folder / "half.kv", "--question", "w1", "--json")
    asked, said = (run(*words, *more).json for more in ((), ("--dtype", "bfloat16")))
    assert asked["answers"][0]["answer"] == said["answers"][0]["answer"]


def test_a_cache_saved_in_python_is_asked_as_plain_text(folder):
    loaded = kvalloc.load_model(folder / "tiny")
    cache = kvalloc.make_cache(loaded.model, load_profile(folder / "tiny.json"))
    loaded.model(
        loaded.tokenizer(prose(80), return_tensors="pt")["input_ids"], past_key_values=cache
    )
    kvalloc.save_cache(cache, folder / "py.kv")
    ran = run("chat", folder / "tiny", "--cache", folder / "py.kv", "--question", "w1", "--json")
    assert (ran.json["read_seconds"], ran.json["document_tokens"]) == (None, 80)
