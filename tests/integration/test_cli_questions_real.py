"""A real document, read once by the real model and asked about twice."""

from __future__ import annotations

from importlib import resources

import pytest
from cli_tools import run

from kvalloc.formats.shipped_profiles import load_profile

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROFILE = "smollm2-135m-instruct-retention-90"
QUESTIONS = ("--question", "Who speaks here?", "--question", "What is the speech about?")


def test_a_speech_is_read_saved_and_asked_about(tmp_path):
    text = (resources.files("kvalloc") / "data" / "texts" / "haystack_carter_1978.txt").read_text()
    (tmp_path / "speech.txt").write_text(text[:2000])
    document = ("--prompt-file", tmp_path / "speech.txt", "--save-cache", tmp_path / "speech.kv")
    short = ("--max-new-tokens", 8, "--json")
    read = run("generate", "demo", "--profile", PROFILE, *document, *QUESTIONS, *short)
    assert read.code == 0, read.err
    loaded = run("generate", "demo", "--cache", tmp_path / "speech.kv", *QUESTIONS, *short)
    assert loaded.code == 0, loaded.err
    first, second = (ran.json for ran in (read, loaded))
    assert first["document_tokens"] == second["document_tokens"] > 300
    assert first["retained_bytes"] == second["retained_bytes"] < 0.6 * first["full_bytes"]
    answers = [row["answer"] for row in second["answers"]]
    assert answers == [row["answer"] for row in first["answers"]]
    assert all(answer.strip() for answer in answers)
    assert answers[0] != answers[1]
    talked = run("generate", "demo", "--cache", tmp_path / "speech.kv", *QUESTIONS, "--keep-turns",
                 *short)  # fmt: skip
    assert talked.json["answers"][0]["answer"] == answers[0]
    assert talked.json["answers"][1]["question_tokens"] > second["answers"][1]["question_tokens"]


def test_budgets_are_decided_for_the_prompt(tmp_path):
    text = (resources.files("kvalloc") / "data" / "texts" / "haystack_carter_1978.txt").read_text()
    (tmp_path / "prompt.txt").write_text(text[:1500])
    prompt = ("--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 2, "--json")
    decided = run("generate", "demo", "--target-retention", "0.9", *prompt)
    assert decided.code == 0, decided.err
    assert decided.json["decision_seconds"] > 0
    assert decided.json["retained_bytes"] < 0.6 * decided.json["full_bytes"]
    moved = run("generate", "demo", "--profile", PROFILE, "--adapt", "0.25", *prompt).json
    prompt_bytes = load_profile(PROFILE).retained_bytes_at(moved["prompt_tokens"])
    followed = load_profile(PROFILE).full_bytes_at(moved["new_tokens"] - 1)
    assert moved["retained_bytes"] == prompt_bytes + followed
    assert moved["decision_seconds"] > 0
