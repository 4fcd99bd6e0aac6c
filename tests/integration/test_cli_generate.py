"""``kvalloc generate`` on tiny models, and every way in which a user can go wrong with it."""

import json
import sys

import pytest
from cli_tools import Stdin, generate_arguments, prose, run, succeed

import kvalloc
from kvalloc.formats.shipped_profiles import load_profile
from kvalloc.runtime.policies import policy_names


@pytest.mark.parametrize("name", ["tiny", "gemma", "tiny-head"])
def test_generate_keeps_what_was_granted_and_only_the_answer_goes_to_stdout(
    models, profiles, folder, name
):
    arguments = generate_arguments(models, profiles, folder, name)
    ran = run(*arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    facts = ran.json
    assert facts["prompt_tokens"] == 100
    assert 1 <= facts["new_tokens"] <= 5
    assert facts["retained_bytes"] < facts["full_bytes"]
    assert (facts["retained_bytes"] == facts["granted_bytes"]) == (name != "gemma")  # it slides
    assert facts["prefill_seconds"] > 0
    assert (facts["requested"], facts["decision_seconds"]) == (None, None)
    full = run(*arguments[:2], "--budget", "100%", *arguments[4:], "--json").json
    assert full["profile"] is None
    assert full["full_bytes"] == facts["full_bytes"] < full["retained_bytes"]  # in float32
    shown = run(*arguments)
    assert shown.out.strip() == facts["answer"].strip()
    assert "100 prompt and" in shown.err
    assert facts["cut"] == ("cut at the limit of --max-new-tokens 5" in shown.err)
    assert "prefill" in shown.err
    # a share of its own where the prompt's length gives another than the profile's
    assert "tokens, " in shown.err.splitlines()[1].partition(" at ")[2]
    assert run(*arguments, "--quiet").err == ""


@pytest.mark.parametrize(
    ("asked", "way"),
    [((), "reads the prompt twice"), (("--memory", "40KiB"), "evicts while the prompt is read")],
)
def test_a_budget_alone_takes_the_default_and_says_so(models, folder, asked, way):
    words = ("generate", models / "tiny", "--budget", "25%", *asked, "--prompt-file",
             folder / "prompt.txt", "--max-new-tokens", 20)  # fmt: skip
    told = run(*words).err
    assert f"nothing measured: {way[:12]}" in told
    result = run(*words, "--json").json
    assert f"answer: asked for 25.0%, {result['share']:.1%} of a cache at 16 bits, " in told
    assert 0.2 < result["share"] <= 0.25
    assert result["granted_bytes"] < result["full_bytes"]
    assert result["retained_bytes"] <= 0.25 * result["full_bytes"]


def test_a_lossless_answer_is_the_full_caches(models, folder):
    words = ("generate", models / "tiny", "--prompt-file", folder / "prompt.txt",
             "--max-new-tokens", 40)  # fmt: skip
    full = run(*words, "--budget", "100%", "--json").json["answer"]
    ran = run(*words, "--budget", "25%", "--lossless")
    assert ran.out.strip() == full.strip()
    assert "lossless, with" in ran.err
    assert "drafts accepted" in ran.err
    facts = run(*words, "--budget", "25%", "--lossless", "--json").json["lossless"]
    assert facts["rounds"] < facts["tokens"] == 40


def test_one_prompt_has_one_share_wherever_it_is_shown(models, folder):
    text = (folder / "prompt.txt").read_text()
    result = run("generate", models / "tiny", "--budget", "25%", "--prompt-file",
                folder / "prompt.txt", "--max-new-tokens", 20, "--json").json  # fmt: skip
    prompts = folder / "one.jsonl"
    prompts.write_text(json.dumps({"prompt": text, "answer": "w7"}))
    rows = run("eval", models / "tiny", "--budget", "25%", "--prompts", prompts, "--json").json
    loaded = kvalloc.load_model(models / "tiny")
    caches = []
    with kvalloc.apply(loaded.model, budget="25%") as applied:
        for new in (1, 20):
            loaded.model.generate(**loaded.tokenizer(text, return_tensors="pt"), max_new_tokens=new)
            caches.append(applied.last_cache)
    prompt, both = caches
    assert prompt.share == rows[1]["share_of_16_bits"]
    assert both.share == result["share"]
    assert f"({prompt.share:.1%})" in both.profile.detail
    share = f"{both.share:.1%} of a cache at 16 bits"
    assert f"tokens=119, asked for 25.0%, {share}, " in repr(both)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--budget", "40%", "--solver", "greedy"), "40.0% (retention 0."),
        (("--budget-tokens", 40), "40 entries a head (retention 0."),
        (("--memory", "30KiB", "--solver", "greedy"), "30.00 KiB (retention 0."),
        (("--target-retention", "70%"), "retention 0.7 (retention 0.7"),
    ],
)
def test_what_is_kept_stands_beside_what_was_asked(models, folder, asked, said):
    words = ("generate", models / "tiny", *asked, "--prompt-file", folder / "prompt.txt",
             "--max-new-tokens", 6)  # fmt: skip
    result = run(*words, "--json").json
    assert result["retained_bytes"] <= result["granted_bytes"]
    assert result["retained_bytes"] < result["full_bytes"]
    assert result["requested"]["target"] == asked[0][2:].replace("-", "_").removeprefix("target_")
    assert result["retention"] >= (0.7 if "70%" in asked else 0)
    assert result["decision_seconds"] > 0
    _, kept = run(*words).err.splitlines()
    assert kept.startswith(f"[cache of prompt and answer: asked for {said}")
    assert f" reached), {result['share']:.1%} of a cache at 16 bits, " in kept
    assert result["share"] == pytest.approx(result["retained_bytes"] / result["full_bytes"])


def test_a_short_prompt_is_kept_whole_and_that_is_said(models, profiles):
    short = ("--prompt", prose(6), "--max-new-tokens", 3)
    ran = run("generate", models / "tiny", "--profile", profiles / "tiny.json", *short)
    assert "everything is kept" in ran.err
    assert ran.out == run("generate", models / "tiny", "--budget", "100%", *short).out
    decided = run("generate", models / "tiny", "--budget", "20%", "--prompt", "w1")
    assert "too short for 20.0%" in decided.err


def test_the_chat_form_is_used_where_there_is_one(models, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Stdin(prose(9)))
    ran = run("generate", models / "tiny", "--budget", "100%", "--max-new-tokens", 1, "--json")
    assert ran.json["prompt_tokens"] == 9
    arguments = ("--prompt", prose(20), "--max-new-tokens", 2, "--json")
    used = ("generate", models / "chatty", "--budget", "100%", *arguments)
    assert run(*used).json["prompt_tokens"] == 22
    assert run(*used, "--no-chat").json["prompt_tokens"] == 20


@pytest.mark.parametrize("question", [(), ("--question", "w5 w6")])
def test_an_answer_can_be_drawn_and_a_seed_draws_it_again(models, folder, question):
    words = ["chat" if question else "generate", models / "tiny", "--budget", "50%", *question,
             "--prompt-file", folder / "prompt.txt", "--max-new-tokens", 12]  # fmt: skip

    def answer(*more):
        return run(*words, *more).out

    hot = ("--temperature", 5)
    drawn = {seed: answer(*hot, "--seed", seed) for seed in (0, 1)}
    assert len({*drawn.values(), answer()}) == 3
    assert (answer(*hot), answer(*hot, "--seed", 1)) == (drawn[0], drawn[1])
    assert answer("--temperature", 1e-5) == answer()


@pytest.fixture
def generate(models, profiles, folder):
    """A command line that asks through half of all entries."""
    arguments = [*generate_arguments(models, profiles, folder), "--json"]
    return lambda *more: (*arguments, *more)


@pytest.mark.parametrize("name", ["nacl", "merge", "attention_matching", "snapkv", "lookahead"])
def test_generate_picks_entries_by_the_name_of_a_policy_or_scorer(generate, profiles, name):
    ran = succeed(*generate("--policy", name, "--max-new-tokens", 20))
    seen = ran.json["prompt_tokens"] + ran.json["new_tokens"] - 1
    entries = int(load_profile(profiles / "tiny.json").budgets_for(seen).sum())
    stored = entries * (32 + 2)  # numbers and a position
    assert ran.json["retained_bytes"] == ran.json["granted_bytes"] == stored
    is_policy = name in policy_names()
    assert ran.json["policy"] == (name if is_policy else "score")
    assert ran.json["scorer"] == ("xkv" if is_policy else name)
