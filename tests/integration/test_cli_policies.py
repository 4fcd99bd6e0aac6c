"""Policies and scorers from the command line, on a tiny model."""

from __future__ import annotations

import json

import pytest
from cli_tools import generate_arguments, profile_arguments, refused, run

from kvalloc.runtime.layer import SPARE
from kvalloc.runtime.policies import policy_names
from kvalloc.scorers import get_scorer


@pytest.fixture
def generate(models, profiles, folder):
    """A command line that asks through half of all entries."""
    arguments = [*generate_arguments(models, profiles, folder), "--json"]
    return lambda *more: (*arguments, *more)


@pytest.mark.parametrize("name", ["nacl", "merge", "attention_matching", "snapkv", "lookahead"])
def test_generate_picks_entries_by_the_name_of_a_policy_or_scorer(generate, name):
    longer = ("--max-new-tokens", 20)  # than any of them waits for
    ran = run(*generate("--policy", name, *longer))
    assert ran.code == 0, ran.err
    plain = run(*generate(*longer))
    kept = ran.json["prompt_retained_bytes"]
    assert kept == plain.json["prompt_retained_bytes"] == ran.json["granted_bytes"]
    followed = 2 * (ran.json["full_bytes"] - ran.json["prompt_full_bytes"])  # in float32
    room = ran.json["retained_bytes"] - kept - followed
    assert 0 <= room <= followed // SPARE
    is_policy = name in policy_names()
    assert ran.json["policy"] == (name if is_policy else "score")
    assert ran.json["scorer"] == ("xkv" if is_policy else name)


def test_an_answer_that_ends_before_the_eviction_says_so(generate):
    ran = run(*generate("--policy", "lookahead", "--max-new-tokens", 5))  # 4 of them are fed
    assert ran.json["retained_bytes"] == 2 * ran.json["full_bytes"]  # in float32
    assert "note: nothing is evicted yet: these budgets wait until 4 more tokens have" in ran.err


@pytest.mark.parametrize("name", ["h2o", "lookahead"])
def test_profile_measures_with_a_scorer(models, folder, name):
    scores, budgets = folder / "s.safetensors", folder / "p.json"
    measuring = (*profile_arguments(models, folder), "--scorer", name, "--window", 8)
    if get_scorer(name).later is not None:
        said = refused(folder, *measuring)
        assert f"the scorer {name} looks at tokens that come after the prompt" in said
        return
    assert run(*measuring).code == 0
    run("solve", scores, "--budget", "50%", "--solver", "greedy", "-o", budgets, "--quiet")
    assert json.loads(budgets.read_text())["policy"]["scorer"] == name
    prompt = ("--prompt-file", folder / "prompt.txt", "--json")
    ran = run("generate", models / "tiny", "--profile", budgets, *prompt)
    assert ran.json["scorer"] == name
    assert ran.json["prompt_retained_bytes"] < 0.7 * ran.json["prompt_full_bytes"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--policy nothing", "no policy or scorer 'nothing'; choose from: "),
        ("--policy SnapKV", "no policy or scorer 'SnapKV'; the nearest is 'snapkv'"),
        ("--policy nacl --policy-option sed=1", "no option 'sed'; the nearest is 'seed'"),
        ("--policy reconstruction --decode-every 4", "leave out --decode-every"),
        ("--policy nacl --policy-option seed=x", "--policy-option seed of nacl is 'x'"),
        ("--policy nacl --policy-option scorer=xkv", "no option 'scorer'"),
        ("--policy critical --policy-option alpha=7", "alpha is 7.0"),
        ("--policy cake --policy-option window=60", "they must agree"),
        ("--policy-option seed=1", "name it with --policy"),
        ("--policy surrogate", "file is '', expected what"),
        ("--policy surrogate --policy-option file=SCORES", "score profile, expected a surrogate"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(folder, generate, profiles, more, said):
    words = more.replace("SCORES", str(profiles / "tiny.safetensors")).split()
    assert said in refused(folder, *generate(*words))


def test_policies_lists_them_without_the_scorer_they_are_given():
    rows = {row["name"]: row for row in run("list", "policies", "--json").json}
    assert sorted(rows) == policy_names()
    assert rows["critical"]["options"] == {"alpha": 0.5, "epsilon": 0.0001}
    assert rows["score"]["options"] == {}
    assert all(row["summary"] and row["reference"] for row in rows.values())


def test_a_surrogate_is_fitted_and_picks_entries(models, folder, generate):
    file, text = folder / "f.safetensors", ("--text", folder / "text.txt")
    fit = ("fit-scorer", models / "tiny", *text, "-o")
    said = run(*fit, file, "--context", 64, "--samples", 4, "--json").json
    assert (said["samples"], said["context_tokens"]) == (4, 64)
    assert len(said["r_squared"]) == len(said["rank_correlation"]) == 3
    assert said["file_bytes"] == file.stat().st_size
    for more in ((), ("--decode-every", 1)):
        ran = run(*generate("--policy", "surrogate", "--policy-option", f"file={file}", *more))
        assert ran.json["scorer"] == "surrogate"
        assert ran.json["retained_bytes"] < 0.7 * ran.json["full_bytes"]
    said = refused(
        folder, "profile", models / "twin", *text, "--context", 64,
        "--scorer", f"surrogate:file={file}", "-o", folder / "s.safetensors",
    )  # fmt: skip
    assert "is for the weights of tiny" in said
    assert "choose --context 256 or less" in refused(folder, *fit, file, "--context", 400)
    assert "does not exist" in refused(folder, *fit, folder / "no" / "s.safetensors")
