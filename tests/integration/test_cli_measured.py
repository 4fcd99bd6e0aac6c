"""``kvalloc solve --measure`` on a tiny model."""

import json

import pytest
from cli_tools import prose, refused, run, save_tiny_model
from tiny_models import tiny_model

from kvalloc.formats.budget_profile import BudgetProfile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny and other (models), s.safetensors with loss curves, prompts.jsonl."""
    folder = tmp_path_factory.mktemp("measured")
    save_tiny_model(folder / "tiny", tiny_model(initializer_range=0.3))
    save_tiny_model(folder / "other", tiny_model(num_hidden_layers=2))
    words = prose(400).split()
    rows = [
        {"text": " ".join(words[50 * i : 50 * i + 48]), "answer": "w3 w1 w4 w1", "task": "copy"}
        for i in range(5)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "short.jsonl").write_text("\n".join([json.dumps({"text": "w1 w2"})] * 4))
    (folder / "text.txt").write_text(prose(300))
    text = ("--text", folder / "text.txt", "--context", 48, "--samples", 2, "--window", 4)
    loss = ("--loss", "fast", "--loss-level", "head")
    ran = run("profile", folder / "tiny", *text, *loss, "-o", folder / "s.safetensors")
    assert ran.code == 0, ran.err
    return folder


def solve(folder, *more, prompts="prompts.jsonl", model="tiny"):
    named = ("--measure", folder / model, "--measure-prompts", folder / prompts)
    return ("solve", folder / "s.safetensors", "--level", "head", *named, *more)


def test_a_decision_states_what_was_measured(folder, tmp_path):
    out = tmp_path / "p.json"
    ran = run(*solve(folder, "--budget", "45%", "-o", out))
    assert ran.code == 0, ran.err
    stated = BudgetProfile.load(out).measured_loss
    assert stated.by_task == {"copy": stated.loss}
    assert f"{stated.loss:.6f} nats per token (95% interval" in ran.out
    assert "prompts.jsonl" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    printed = run(*solve(folder, "--budget", "45%", "--json")).json
    assert printed["measured_loss"] == stated.record()
    assert "measured loss" in run("inspect", out).out
    assert run("verify", out, folder / "s.safetensors").code == 0
    met = run(*solve(folder, "--target-loss", 1.05 * stated.loss, "--json")).json["measured_loss"]
    assert met["loss"] <= met["target"] == 1.05 * stated.loss


@pytest.mark.parametrize(
    ("more", "files", "said"),
    [
        (("--budget", "45%"), {"prompts": "short.jsonl"}, "short.jsonl, line 1: the prompt has 2"),
        (("--budget", "45%"), {"model": "other"}, "other"),
        (("--target-loss", "1e-9", "--max-tokens", 20), {}, "is not possible"),
    ],
)
def test_what_is_refused(folder, more, files, said):
    assert said in refused(folder, *solve(folder, *more, "-o", folder / "p.json", **files))
