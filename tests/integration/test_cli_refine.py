"""``kvalloc solve --refine`` on a tiny model."""

import json

import pytest
from cli_tools import prose, refused, run, save_tiny_model
from tiny_models import tiny_model

from kvalloc.formats.budget_profile import BudgetProfile

ASKED = ("--budget", "45%", "--level", "head", "--rounds", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny and other (models), s.safetensors with loss curves, prompts.jsonl."""
    folder = tmp_path_factory.mktemp("refine")
    model = tiny_model(initializer_range=0.3)
    save_tiny_model(folder / "tiny", model)
    save_tiny_model(folder / "other", tiny_model(num_hidden_layers=2))
    words = prose(400).split()
    rows = [
        {"text": " ".join(words[50 * i : 50 * i + 48]), "answer": "w3 w1 w4 w1", "task": "copy"}
        for i in range(5)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "few.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    (folder / "short.jsonl").write_text("\n".join([json.dumps({"text": "w1 w2"})] * 4))
    (folder / "text.txt").write_text(prose(300))
    text = ("--text", folder / "text.txt", "--context", 48, "--samples", 2, "--window", 4)
    loss = ("--loss", "fast", "--loss-level", "head")
    ran = run("profile", folder / "tiny", *text, *loss, "-o", folder / "s.safetensors")
    assert ran.code == 0, ran.err
    return folder


def solve(folder, *more, prompts="prompts.jsonl"):
    refine = ("--refine", folder / "tiny", "--refine-prompts", folder / prompts)
    return ("solve", folder / "s.safetensors", *ASKED, *refine, *more)


def test_a_refined_profile_states_what_was_measured(folder, tmp_path):
    out = tmp_path / "p.json"
    ran = run(*solve(folder, "-o", out))
    assert ran.code == 0, ran.err
    decided = BudgetProfile.load(out)
    told = decided.refinement
    assert told["tasks"] == ["copy"] * 5
    assert f"{told['measured_loss']:.6f} nats per token (95% interval" in ran.out
    assert "prompts.jsonl" in ran.out
    assert "sum of single-unit" not in ran.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.json"]
    printed = run(*solve(folder, "-o", tmp_path / "q.json", "--json")).json
    assert printed["refinement"] == told
    assert printed["budgets"] == decided.budgets.tolist()
    assert printed["predicted_loss_note"] is None
    assert "held-out loss" in run("inspect", out).out
    verified = run("verify", out, folder / "s.safetensors")
    assert verified.code == 0, verified.out


@pytest.mark.parametrize(
    ("more", "prompts", "said"),
    [
        ((), "few.jsonl", "at least 4 prompts"),
        ((), "short.jsonl", "short.jsonl, line 1: the prompt has 2 tokens"),
        ((), "none.jsonl", "no file or folder"),
        (("--json",), "prompts.jsonl", "say -o OUT.json"),
        (("--average", "allocations"), "prompts.jsonl", "leave out --average"),
    ],
)
def test_what_is_refused(folder, more, prompts, said):
    out = () if more == ("--json",) else ("-o", folder / "p.json")
    assert said in refused(folder, *solve(folder, *more, *out, prompts=prompts))


@pytest.mark.parametrize(
    ("more", "model", "said"),
    [
        (("--budget", "40%", "--rounds", 2), None, "--rounds belongs to a refinement"),
        (("--budget", "40%", "--refine-prompts", "prompts.jsonl"), "other", "other"),
        (("--target-retention", 0.9), "tiny", "leave out the retention"),
    ],
)
def test_requests_that_are_refused(folder, more, model, said):
    paths = [folder / one if one == "prompts.jsonl" else one for one in more]
    refine = () if model is None else ("--refine", folder / model)
    out = ("-o", folder / "p.json")
    assert said in refused(folder, "solve", folder / "s.safetensors", *paths, *refine, *out)
