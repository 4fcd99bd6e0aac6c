"""``kvalloc chat``: conversations, and documents read once, saved and asked about; tiny models."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from cli_tools import Stdin, Terminal, prose, refused, run, save_tiny_model
from factories import make_budget_profile
from transformers import BloomConfig, BloomForCausalLM

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
    ran = run(*reading(folder), "--save-cache", folder / "doc.kv")
    assert ran.code == 0, ran.err
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
    assert (
        "; cache: asked for 50.0% of the entries at 64 tokens, 50.0% of a cache at 16 bits, "
        in first
    )
    assert second.startswith(f"saved as {folder / 'again.kv'}, ")
    assert run(*reading(folder), "--save-cache", folder / "again.kv", "--quiet").err == ""


def test_questions_do_not_pollute_each_other(folder):
    together = run(*asking(folder, *QUESTIONS), "--json").json
    assert together["document"] == "doc.txt"
    assert together["document_tokens"] == 120
    assert together["retained_bytes"] < 0.7 * together["full_bytes"]
    assert together["read_seconds"] > 0
    assert together["load_seconds"] > 0
    rows = together["answers"]
    assert [row["question"] for row in rows] == QUESTIONS
    for question, row in zip(QUESTIONS, rows, strict=True):
        alone = run(*asking(folder, question), "--json").json["answers"][0]
        assert alone["answer"] == row["answer"]
        assert 1 <= row["new_tokens"] <= 6
    assert len({row["answer"] for row in rows}) > 1
    turned = run(*asking(folder, *QUESTIONS), "--json").json["answers"][::-1]
    assert sorted(row["answer"] for row in turned) == sorted(row["answer"] for row in rows)


@pytest.mark.parametrize("name", ["tiny", "gemma", "chatty"])
def test_a_saved_document_answers_as_one_just_read(folder, name):
    path = folder / f"{name}.kv"
    more = ("--json", *(["--allow-other-model"] if name == "chatty" else []))
    questions = [word for question in QUESTIONS for word in ("--question", question)]
    direct = run(*reading(folder, name), *questions, "--save-cache", path, *more)
    assert direct.code == 0, direct.err
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


def test_only_answers_go_to_stdout(folder):
    answers = [row["answer"] for row in run(*asking(folder, *QUESTIONS), "--json").json["answers"]]
    ran = run(*asking(folder, *QUESTIONS))
    assert ran.out == "\n".join(f"{answer}\n" for answer in answers)  # an empty line between
    assert "120 tokens loaded in" in ran.err
    assert "x as long)" in ran.err
    for question in QUESTIONS:
        assert f"> {question}" in ran.err
    assert ran.err.count("the first after") == 3
    quiet = run(*asking(folder, *QUESTIONS), "--quiet")
    assert (quiet.out, quiet.err) == (ran.out, "")


def test_questions_stand_between_the_answers_in_a_terminal(folder, monkeypatch):
    """Those on stderr, unless they go elsewhere or are not shown."""

    answers = [row["answer"] for row in run(*asking(folder, *QUESTIONS), "--json").json["answers"]]
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
    ran = run("chat", *way, "--json")
    assert ran.code == 0, ran.err
    first, second = ran.json["answers"]
    alone = run("generate", *way, "--prompt", prose(80), "--json").json
    assert (first["answer"], first["question_tokens"]) == (alone["answer"], alone["prompt_tokens"])
    assert second["question_tokens"] < 8
    assert (ran.json["document"], ran.json["cache"]) == (None, None)
    assert ran.json["retained_bytes"] < ran.json["full_bytes"]


def test_a_conversation_goes_on_from_a_saved_answer(folder, monkeypatch):
    way = (folder / "chatty", "--max-new-tokens", 4)
    saved = ("--prompt", prose(80), "--save-cache", folder / "said.kv")
    ran = run("generate", *way, "--budget", "50%", *saved)
    assert ran.code == 0, ran.err
    assert f"saved as {folder / 'said.kv'}" in ran.err
    for turns, stdin in (("saved", QUESTIONS[2]), ("typed", f"{prose(80)}\n{QUESTIONS[2]}")):
        monkeypatch.setattr(sys, "stdin", Stdin(f"{stdin}\n"))
        begun = ("--cache", folder / "said.kv") if turns == "saved" else ("--budget", "50%")
        rows = run("chat", *way, *begun, "--json").json["answers"]
        assert len(rows) == (1 if turns == "saved" else 2)
        if turns == "saved":
            answer = rows[-1]["answer"]
    assert rows[-1]["answer"] == answer


def test_no_turn_is_refused(folder, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin("\n"))
    assert "there is no question" in run(*asking(folder)).err


def test_a_terminal_is_asked_until_an_empty_line(folder, monkeypatch):
    long = " ".join(["w5"] * 500)
    lines = iter([QUESTIONS[1], long, QUESTIONS[2], ""])
    prompts = []

    def typed(prompt):
        prompts.append(prompt)
        return next(lines)

    monkeypatch.setattr(sys, "stdin", Stdin(f"{QUESTIONS[1]}\n{QUESTIONS[2]}\n"))
    expected = run(*asking(folder)).out
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Stdin("", terminal=True))
    ran = run(*asking(folder))
    assert ran.code == 0
    assert ran.out == expected
    assert prompts == ["> "] * 4
    assert "empty line or Ctrl-D" in ran.err
    assert "no room" in ran.err  # for the long one, and the conversation goes on


def test_ctrl_c_ends_one_answer_and_the_conversation_goes_on(folder, monkeypatch):
    from kvalloc.runtime import answering

    lines = iter([QUESTIONS[1], QUESTIONS[2]])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    written, calls = answering._written, []

    def interrupted(*arguments):
        calls.append(1)
        for token in written(*arguments):
            if len(calls) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield token

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(answering, "_written", interrupted)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", Stdin("", terminal=True))
    ran = run(*asking(folder), "--json")
    assert (ran.code, signal.getsignal(signal.SIGINT)) == (0, before)
    assert "broken off" in ran.err
    broken, whole = ran.json["answers"]
    assert (broken["new_tokens"], len(calls)) == (1, 2)
    assert whole["new_tokens"] > 1


def test_budgets_for_the_prompt(folder):
    prompt = ("--prompt-file", folder / "doc.txt", "--max-new-tokens", 3, "--json")
    ran = run("generate", folder / "tiny", "--target-retention", 0.7, "--level", "head", *prompt)
    assert ran.code == 0, ran.err
    assert ran.json["decision_seconds"] > 0
    assert ran.json["retained_bytes"] < ran.json["full_bytes"]
    assert ran.json["profile"] is None
    stored = run("generate", folder / "tiny", "--profile", folder / "tiny.json", *prompt).json
    assert stored["decision_seconds"] is None
    told = run("generate", folder / "tiny", "--budget", "30%", "--solver", "greedy", *prompt[:-1])
    assert "to decide the budgets" in told.err
    short = run("generate", folder / "tiny", "--budget", "20%", "--prompt", "w1", *prompt[2:])
    assert "keeps the prompt whole, which is too short for 20.0%" in short.err
    assert "cache of the prompt: asked for 30.0% of the entries (retention 0." in told.err
    saved = run("chat", folder / "tiny", "--budget", "30%", *prompt, "--save-cache",
                folder / "own.kv", "--question", QUESTIONS[1])  # fmt: skip
    again = run("chat", folder / "tiny", "--cache", folder / "own.kv", "--max-new-tokens", 3,
                "--question", QUESTIONS[1], "--json")  # fmt: skip
    assert saved.json["answers"][0]["answer"] == again.json["answers"][0]["answer"]
    assert again.json["retained_bytes"] == saved.json["retained_bytes"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target-retention", "2"], ["retention of 2"]),
        (["--target-retention", "0.9", "--profile", "tiny.json"], ["one of"]),
        (["--budget", "much"], ["much"]),
        (["--budget", "20%", "--memory", "1MiB", "--solver", "greedy"], ["two targets"]),
        (["--budget", "20%", "--memory", "1KiB"], ["--memory 1KiB is 1.00", "full cache is held"]),
        (["--memory", "1KiB"], ["--memory 1KiB", "one layer in full"]),
        (["--budget", "20%", "--full"], ["--full"]),
        (["--budget", "20%", "--allow-other-model"], ["--allow-other-model", "stored profile"]),
        (["--level", "head"], ["--level", "--budget 20%"]),
        (["--budget", "20%", "--level", "both"], ["'both'"]),
        (["--budget", "20%", "--solver", "none"], ["no solver 'none'"]),
        (["--profile", "tiny.json", "--question", " "], ["empty"]),
        (["--profile", "tiny.json", "--question", "w1", "--question", ""], ["question 2 is empty"]),
        (["--full", "--save-cache", "x.kv"], ["--save-cache", "--full"]),
        (["--profile", "tiny.json", "--save-cache", "x.kv", "--decode-every", "4"],
         ["--save-cache", "--decode-every"]),
        (["--profile", "tiny.json", "--save-cache", "none/x.kv"], ["none"]),
        (["--profile", "tiny.json", "--question", "w1", "--chat"], ["no chat form"]),
        (["--profile", "tiny.json", "--question", "w1", "--max-new-tokens", "400"],
         ["tokens to read leave no room", "512"]),
    ],
)  # fmt: skip
def test_reading_refuses(folder, words, said):
    files = {"tiny.json", "x.kv", "none/x.kv"}
    given = [folder / word if word in files else word for word in words]
    asked = ("chat", folder / "tiny", "--prompt-file", folder / "doc.txt", *given)
    refused(folder, *asked, words=said)


@pytest.mark.parametrize(
    ("model", "cache", "words", "said"),
    [
        ("twin", "doc.kv", [], ["other weights", "--allow-other-model"]),
        ("deeper", "doc.kv", ["--allow-other-model"], ["n_layers"]),
        ("tiny", "none.kv", [], ["none.kv", "missing", "written with --save-cache"]),
        ("tiny", ".", [], ["a folder"]),
        ("tiny", "cut.kv", [], ["cut.kv", "not readable"]),
        ("tiny", "tiny.json", [], ["is a budget profile, expected a cache written"]),
        ("tiny", "tiny.safetensors", [], ["is a score profile, expected a cache written"]),
        ("tiny", "bent.kv", [], ["tensor_digest"]),
        ("tiny", "doc.kv", ["--dtype", "bfloat16"], ["leave out --dtype"]),
        ("tiny", "doc.kv", ["--prompt", "w1"], ["--cache", "--question"]),
        ("tiny", "doc.kv", ["--profile", "tiny.json"], ["--profile", "when it was saved"]),
        ("tiny", "doc.kv", ["--budget", "20%"], ["--budget", "when it was saved"]),
        ("tiny", "doc.kv", ["--full"], ["--full"]),
        ("tiny", "doc.kv", ["--save-cache", "y.kv"], ["--save-cache"]),
        ("tiny", "doc.kv", ["--max-new-tokens", "500"], ["tokens to read leave no room"]),
    ],
)
def test_a_saved_document_is_refused(folder, model, cache, words, said):
    whole = (folder / "doc.kv").read_bytes()
    (folder / "cut.kv").write_bytes(whole[:-200])
    (folder / "bent.kv").write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
    asked = ("chat", folder / model, "--cache", folder / cache, "--question", "w1", *words)
    refused(folder, *asked, words=said)


def test_a_question_that_does_not_fit_is_refused_before_the_first_answer(folder):
    long = " ".join(["w5"] * 400)
    line = refused(folder, *asking(folder, QUESTIONS[1], long))
    assert "no room" in line


def test_models_and_profiles_that_do_not_fit_are_refused(folder):
    """With stored budgets, with budgets that follow the prompt, and with a target."""
    bloom = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=101))
    save_tiny_model(folder / "bloom", bloom)
    stored = load_profile(folder / "tiny.json")
    sizes = {"n_layers": 2, "n_query_heads": 2, "n_kv_heads": 2, "head_dim": 16}
    other = replace(stored.shape, model_id="bloom", layer_types=("full", "full"), **sizes)
    plain = make_budget_profile(np.full((2, 2), 30), shape=other, context_tokens=64)
    plain.save(folder / "bloom.json")
    wide = replace(stored.shape, n_query_heads=12, n_kv_heads=4)
    make_budget_profile(np.full((3, 4), 30), shape=wide, context_tokens=64).save(folder / "w.json")
    document = ("--prompt-file", folder / "doc.txt", "--question", "w1")
    for model, said, way in (
        ("bloom", "Bloom", ["--target-retention", "0.9"]),
        ("bloom", "Bloom", ["--profile", folder / "bloom.json"]),
        ("tiny", "n_query_heads 12", ["--profile", folder / "w.json"]),
        ("tiny", "n_query_heads 12", ["--profile", folder / "w.json", "--allow-other-model"]),
    ):
        assert said in refused(folder, "chat", folder / model, *document, *way)


def test_a_saved_cache_can_be_inspected(folder):
    facts = run("inspect", folder / "doc.kv", "--json").json
    assert (facts["kind"], facts["document"]) == ("kvalloc.cache", "doc.txt")
    assert (facts["seen_tokens"], facts["prompt_tokens"], facts["rows"]) == (120, 120, 1)
    asked = run(*asking(folder, "w1"), "--json").json
    assert facts["full_bytes"] == asked["full_bytes"]
    assert facts["read_seconds"] == asked["read_seconds"]
    assert np.array(facts["budgets"]).sum() * 2 * 8 * 2 == asked["retained_bytes"]
    shown = run("inspect", folder / "doc.kv")
    assert shown.code == 0
    for words in ("doc.txt", "120, float32", "a full cache takes", "--cache", "window 8"):
        assert words in shown.out
    whole = (folder / "doc.kv").read_bytes()
    (folder / "odd.kv").write_bytes(whole[:5000])
    line = refused(folder, "inspect", folder / "odd.kv")
    assert "expected a cache written with --save-cache; read the prompt again" in line


def saved_with(folder, profile, model):
    """A saved cache of the document, reduced by a profile."""
    profile.save(folder / "other.json")
    document = ("--prompt-file", folder / "doc.txt", "--save-cache", folder / "other.kv")
    ran = run("chat", folder / model, "--profile", folder / "other.json", *document)
    assert ran.code == 0, ran.err
    return folder / "other.kv"


def test_inspecting_tells_bits_and_layers_that_share_entries(folder):
    from kvalloc.models.loading import load_model, shape_of

    loaded = load_model(folder / "deeper")
    bits = np.full((4, 2), 8)
    bits[0] = 16
    mixed = load_profile(folder / "tiny.json").replace(
        shape=shape_of(loaded.model, model_id=loaded.model_id),
        budgets=np.full((4, 2), 32),
        bits=bits,
        share_groups=((2, 3),),
    )
    saved = saved_with(folder, mixed, "deeper")
    told = run("inspect", saved, "--json").json
    assert told["bits"] == bits.tolist()
    assert told["share_groups"] == [[2, 3]]
    shown = " ".join(run("inspect", saved).out.split())
    # of 120 tokens the layers keep 54, 54, 53 and 53
    assert "25.2% at 16 bits, 74.8% at 8 bits, of the kept entries" in shown
    assert "layers 2-3 keep the same entries" in shown
    plain = run("inspect", folder / "doc.kv", "--json").json
    assert (plain["bits"], plain["share_groups"]) == (None, [])
    assert "sharing" not in run("inspect", folder / "doc.kv").out


@pytest.mark.parametrize("bits", [16, 8])
def test_inspecting_tells_what_a_prompt_handed_out_itself(folder, bits):
    import kvalloc
    from kvalloc.models.loading import load_model

    stored = load_profile(folder / "tiny.json")
    own = stored.replace(
        level="head", by_prompt=True,
        bits=None if bits == 16 else np.full_like(stored.budgets, bits),
    )  # fmt: skip
    saved = saved_with(folder, own, "tiny")
    told = run("inspect", saved, "--json").json
    cache = kvalloc.load_cache(saved, load_model(folder / "tiny").model)
    kept = cache.kept_tokens_by_row[0].tolist()
    assert told["budgets"] == kept
    assert kept != own.budgets_for(120).tolist()


def test_a_saved_document_is_asked_in_the_type_that_it_was_read_in(folder):
    half = ("--dtype", "bfloat16", "--save-cache", folder / "half.kv")
    assert run(*reading(folder), *half).code == 0
    words = ("chat", folder / "tiny", "--cache", folder / "half.kv", "--max-new-tokens", 3)
    asked = run(*words, "--question", "w1", "--json")
    assert asked.code == 0, asked.err
    said = run(*words, "--question", "w1", "--json", "--dtype", "bfloat16").json
    assert asked.json["answers"][0]["answer"] == said["answers"][0]["answer"]
    line = refused(folder, *words, "--question", "w1", "--dtype", "float32")
    assert "half.kv holds bfloat16 entries, and --dtype is float32" in line


def test_a_cache_saved_in_python_is_asked_as_plain_text(folder):
    from kvalloc.models.loading import load_model

    loaded = load_model(folder / "tiny")
    cache = kvalloc.make_cache(loaded.model, load_profile(folder / "tiny.json"))
    ids = loaded.tokenizer(prose(80), return_tensors="pt")["input_ids"]
    loaded.model(ids, past_key_values=cache)
    cache.save(folder / "py.kv")
    ran = run("chat", folder / "tiny", "--cache", folder / "py.kv", "--question", "w1",
              "--max-new-tokens", 2, "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.json["read_seconds"] is None
    assert ran.json["document_tokens"] == 80
    assert json.dumps(ran.json)
