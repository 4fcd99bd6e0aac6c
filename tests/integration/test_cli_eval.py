"""``kvalloc eval`` on tiny models, and every way in which a user can go wrong with it."""

import json

import pytest
from cli_tools import run, succeed

from kvalloc.accounting.costs import plain_bytes
from kvalloc.formats.shipped_profiles import load_profile


def questions(folder, *, step=1, answer="w7", name="q.jsonl"):
    """Write two prompts of 50 words; return the file."""
    lines = [{"prompt": " ".join(f"w{n * step}" for n in range(50)), "answer": answer}] * 2
    (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder / name


def test_eval_puts_profiles_beside_the_full_cache(models, profiles, folder):
    prompts, budgets = questions(folder), profiles / "tiny.json"
    ran = succeed("eval", models / "tiny", "--profile", budgets, "--prompts", prompts, "--json")
    full, reduced = ran.json
    assert (full["name"], reduced["name"]) == ("full", "tiny")
    assert full["kl"] == 0 < reduced["kl"]
    assert reduced["retained_bytes"] < reduced["full_bytes"] == full["retained_bytes"]
    assert reduced["ci95"][0] <= reduced["kl"] <= reduced["ci95"][1]
    assert (reduced["n"], reduced["task"]) == (2, "q.jsonl")
    other, saved = folder / "other.json", folder / "result.json"
    other.write_bytes(budgets.read_bytes())
    shown = run(
        *("eval", models / "tiny", "--profile", other, "--profile", budgets),
        *("--prompts", prompts, "-o", saved, "--turns", 1),
    )
    assert all(name in shown.out for name in ("q.jsonl", "share", "exact", "0-15"))
    assert "KL ratio" in shown.out
    record = json.loads(saved.read_text())
    assert (record["schema_version"], record["settings"]["split"]) == (4, "development")
    assert len(record["prompts"]) == 2 * 3
    twin = record["rows"][2]["paired"][1]
    assert (twin["against"], twin["kl_ratio"], twin["kl_ratio_ci95"]) == ("other", 1.0, [1.0, 1.0])


def test_eval_shows_long_answers_by_position_and_bytes_of_16_bits(models, folder):
    prompts, saved = folder / "later.jsonl", folder / "later.json"
    record = {"context": "w1 w2 " * 20, "input": "w3", "answers": ["7"], "dataset": "passage_count"}
    prompts.write_text(json.dumps(record))
    way = ("--budget", "60%", "--plain-bits", "8,4", "--question-at", "second-turn")
    given = ("eval", models / "tiny", *way, "--prompts", prompts)
    ran = succeed(*given, "--json", "-o", saved)
    rows = {row["name"]: row for row in ran.json}
    assert list(rows) == ["full", "--budget 60%", "8 bits", "4 bits"]
    assert rows["full"]["share_of_16_bits"] == 1.0
    for row in rows.values():  # the table's bytes are those that its shares are of
        whole = rows["full"]["bytes_at_16_bits"]
        assert row["bytes_at_16_bits"] == pytest.approx(whole * row["share_of_16_bits"], abs=1)
    assert whole == rows["full"]["full_bytes"] / 2
    assert rows["4 bits"]["share_of_16_bits"] < rows["8 bits"]["share_of_16_bits"] < 1.5
    # answers are as long as the file's metric has them: no range beyond that
    assert list(rows["full"]["by_position"]) == ["0-15", "16-63"]
    assert rows["8 bits"]["by_position"]["0-15"]["n_tokens"] == 16
    assert 0 < rows["8 bits"]["kl"] < rows["4 bits"]["kl"]
    record = json.loads(saved.read_text())
    settings = {"question_at": "second-turn", "plain_bits": "8,4", "budget": "60%"}
    assert settings.items() <= record["settings"].items()
    twice = succeed(*given, "--budget", "60%, 30%", "--json").json
    assert [row["name"] for row in twice][1:3] == ["--budget 60%", "--budget 30%"]
    # the opening's answer is read, and only the second turn's tokens are there
    assert all(len(prompt["kls"]) == 1 for prompt in record["prompts"])


def test_eval_takes_shares_of_what_a_sliding_model_needs(models, profiles, folder):
    """To transformers' sliding layers a whole prompt clings until the next token."""
    arguments = ("eval", models / "gemma", "--profile", profiles / "gemma.json")
    ran = run(*arguments, "--prompts", questions(folder), "--json")
    full, reduced = ran.json
    profile = load_profile(profiles / "gemma.json")
    assert full["full_bytes"] == reduced["full_bytes"] == plain_bytes(profile.shape, 50)
    assert full["kept_bytes"] == full["full_bytes"] < full["retained_bytes"]
    assert reduced["retained_bytes"] == reduced["kept_bytes"] == profile.retained_bytes_at(50)
    assert "transformers stores" in ran.err


def test_eval_puts_budgets_for_each_prompt_beside_stored_ones(models, profiles, folder):
    target = ("--prompts", questions(folder, step=3), "--budget", "50%", "--solver", "greedy")
    target = (*target, "--json")
    ran = run("eval", models / "tiny", "--profile", profiles / "tiny.json", *target)
    names = ["full", "tiny", "--budget 50% --solver greedy"]
    assert [row["name"] for row in ran.json] == names
    full, _, each = ran.json
    assert 0 < each["retained_bytes"] < full["retained_bytes"]
    alone = run("eval", models / "tiny", *target)
    assert alone.json[1]["kl"] == each["kl"]
