"""``kvalloc solve`` from files: what it decides, writes and says, and what it refuses."""

from __future__ import annotations

import pytest
from cli_tools import prose, run, save_tiny_model, succeed, write_prompts
from factories import make_bits, make_losses, make_scores, make_shape
from tiny_models import tiny_model

from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.shape import LayerShape

KEYS = """solver termination objective bound gap retention retained_tokens retained_bytes
full_bytes seconds budgets requested context_tokens level output measured_loss value_per_mib"""
NOTE = "sum of single-unit measurements"


@pytest.fixture
def losses(tmp_path):
    """A score profile with loss curves."""
    path = tmp_path / "losses.safetensors"
    make_losses().save(path)
    return path


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("--budget 40%",
         ["gap 0%", "not answer quality", "p.json", "most retention in 40%", "more buy +",
          "auto (greedy), optimal", "why        concave curves"]),
        ("--target-retention 0.6 --level head", ["0.01 more retention costs"]),
        ("--budget-tokens 15 --level head", []),
        ("--memory 2KiB", []),
    ],
)  # fmt: skip
def test_solve_says_all_there_is_to_say(tmp_path, scores, target, words):
    asked, output = ("solve", scores, *target.split()), tmp_path / "p.json"
    quiet = run(*asked, "-q", "-o", output)
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")
    saved, ran = BudgetProfile.load(output), run(*asked, "--json", "-o", output)
    assert (ran.code, ran.err) == (0, "")
    assert set(ran.json) >= {*KEYS.split()}
    assert ran.json["budgets"] == saved.budgets.tolist()
    assert (ran.json["output"], ran.json["gap"]) == (str(output), 0)
    assert (ran.json["solver"], ran.json["decided_by"]) == ("auto", "greedy")
    if "retention" in target:
        assert ran.json["retention"] >= 0.6 - 1e-9
        assert ran.json["requested_bytes"] is None
    else:
        assert ran.json["retained_bytes"] <= ran.json["requested_bytes"]
        assert ran.json["value_per_mib"] > 0
    shown = run(*asked, "-o", output).out
    assert [word for word in words if word not in shown] == []


def test_layers_without_entries_do_not_count_in_the_mean(tmp_path):
    full = LayerShape(kind="full", kv_heads=2, key_dim=4, value_dim=4)
    layers = (LayerShape(kind="state", state_bytes=64), full, full)
    shape = make_shape(layer_types=("state", "full", "full"), layers=layers)
    make_scores(shape=shape).save(tmp_path / "s.safetensors")
    files = tmp_path / "s.safetensors", "-o", tmp_path / "p.json"
    ran = run("solve", *files, "--budget-tokens", "10")
    assert "10.0 of 40.0 per KV head on average (40 entries)" in ran.out


def test_a_certificate_on_a_solver_s_word_is_no_pass_for_a_script(tmp_path):
    """The exit code tells what was proven again from what was not, and both from what is false."""
    scores, out = tmp_path / "s.safetensors", tmp_path / "p.json"
    make_losses(0).save(scores)
    asked = ("--budget", "40%", "--level", "head")
    run("solve", scores, *asked, "--objective", "loss", "--solver", "dp", "-o", out)
    ran = run("verify", out, scores)
    assert (ran.code, "not proven again: dp's word" in ran.out) == (3, True)
    assert "it stands on a solver's word" in ran.err
    facts = run("verify", out, scores, "--json")
    assert (facts.code, facts.json["passed"], facts.json["proven"]) == (3, True, False)
    forged = BudgetProfile.load(out)
    forged.replace(bound=forged.objective, bound_source="dual").save(out)
    assert run("verify", out, scores).code == 1
    run("solve", scores, *asked, "--objective", "mean", "-o", out)
    succeed("verify", out, scores)


DECIDED = [
    # scores, what is asked, words of solve, verify and inspect
    ("scores", "--budget 40% --cap 0=300B --cap 0-1=900B",
     ["layers 0-1 within 900B", "cap of layer 0 binds (", "more are worth"],
     ["cap of layers 0-1", "limits"], ["cap of layer 0 binds ("]),
    ("scores", "--budget 40% --level head --max-distinct 2 --max-tokens 15",
     ["no budget above 15 tokens", "at most 2 different budgets"], [], []),
    ("losses", "--target-loss 0.05 --solver dp",
     ["predicted loss of 0.05 nats per token or less in the fewest bytes", NOTE], [], [NOTE]),
    ("losses", "--budget 40% --objective mean --solver greedy", ["most retention"], [], []),
    ("bits", "--budget 20% --bits 16,8,4 --level head", ["bits, of the kept entries"], [],
     ["bits, of the kept entries"]),
]  # fmt: skip


@pytest.mark.parametrize(("made", "asked", "solved", "verified", "inspected"), DECIDED,
                         ids=[case[1] for case in DECIDED])  # fmt: skip
def test_what_is_decided_is_written_verified_and_shown(
    tmp_path, made, asked, solved, verified, inspected
):
    make = {"scores": make_scores, "losses": make_losses, "bits": make_bits}[made]
    scores, out = tmp_path / "s.safetensors", tmp_path / "p.json"
    make().save(scores)
    shown = {
        "solve": run("solve", scores, *asked.split(), "-o", out),
        "verify": run("verify", out, scores),
        "inspect": run("inspect", out),
    }
    for (name, ran), words in zip(shown.items(), (solved, verified, inspected), strict=True):
        by_word = name == "verify" and "'s word" in ran.out
        assert ran.code == (3 if by_word else 0), (name, ran.out, ran.err)
        for word in words:
            assert word in " ".join(ran.out.split()), name
    assert "WRONG" not in shown["verify"].out
    decided, stated = BudgetProfile.load(out), run("inspect", out, "--json").json
    assert stated["predicted_loss"] == decided.predicted_loss
    if "--bits" in asked:
        assert decided.bits is not None


def test_loss_decides_where_nothing_was_said_and_it_was_measured(losses):
    asked = ("solve", losses, "--budget", "50%", "--json")
    by_default = run(*asked)
    assert "least predicted loss decides" in by_default.err
    assert by_default.err.count("\n") == 1
    facts = by_default.json
    low, high = facts["predicted_loss_interval"]
    assert low < facts["predicted_loss"] < high
    assert facts["predicted_loss"] == pytest.approx(-facts["objective"])
    assert NOTE in facts["predicted_loss_note"]
    assert facts["budgets"] == run(*asked, "--objective", "loss").json["budgets"]
    by_mean = run(*asked, "--objective", "mean")
    assert by_mean.err == ""
    assert by_mean.json["predicted_loss"] >= facts["predicted_loss"]
    # curves of other units
    make_losses(per="layer").save(losses)
    by_head = run(*asked, "--level", "head")
    assert "retention decides, not the loss curves" in by_head.err
    assert by_head.json["requested"]["objective"] == "mean"
    assert run("solve", losses, "--target-retention", "0.8", "--json").err == ""


@pytest.fixture(scope="module")
def measuring(tmp_path_factory):
    """tiny (a model), s.safetensors with loss curves, prompts.jsonl."""
    folder = tmp_path_factory.mktemp("measured")
    save_tiny_model(folder / "tiny", tiny_model(initializer_range=0.3))
    write_prompts(folder / "prompts.jsonl")
    (folder / "text.txt").write_text(prose(300))
    text = ("--text", folder / "text.txt", "--context", 48, "--samples", 2)
    loss = ("--scorer", "xkv:window=4", "--loss", "fast", "--loss-level", "head")
    succeed("profile", folder / "tiny", *text, *loss, "-o", folder / "s.safetensors")
    return folder


def measured(folder, *more):
    named = ("--measure", folder / "tiny", "--measure-prompts", folder / "prompts.jsonl")
    return ("solve", folder / "s.safetensors", "--level", "head", *named, *more)


def test_a_decision_states_what_was_measured(measuring, tmp_path):
    out = tmp_path / "p.json"
    ran = succeed(*measured(measuring, "--budget", "45%", "-o", out))
    stated = BudgetProfile.load(out).measured_loss
    assert stated.by_task == {"copy": stated.loss}
    assert f"{stated.loss:.6f} nats per token (95% interval" in ran.out
    assert "prompts.jsonl" in ran.out
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    printed = run(*measured(measuring, "--budget", "45%", "--json")).json
    assert printed["measured_loss"] == stated.record()
    assert "measured loss" in run("inspect", out).out
    succeed("verify", out, measuring / "s.safetensors")
    met = run(*measured(measuring, "--target-loss", 1.05 * stated.loss, "--json")).json[
        "measured_loss"
    ]
    assert met["loss"] <= met["target"] == 1.05 * stated.loss


def test_several_score_profiles_share_a_memory(tmp_path):
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for seed, path in enumerate(files):
        make_scores(seed).save(path)
    asked = ["solve", *files, "--memory", "6000B"]
    ran = run(*asked, "-o", tmp_path / "out", "--json")
    assert (ran.code, ran.err) == (0, "")
    saved = [BudgetProfile.load(tmp_path / "out" / f"{name}.json") for name in "ab"]
    assert [one["budgets"] for one in ran.json["profiles"]] == [p.budgets.tolist() for p in saved]
    assert sum(one.requested["value"] for one in saved) <= 6000
    assert ran.json["objective"] == pytest.approx(sum(one.retention for one in saved))
    assert ran.json["bound"] == saved[1].requested["pool"]["bound"]
    succeed("verify", tmp_path / "out" / "a.json", files[0])
    together = run("verify", tmp_path / "out", *files, "--json")
    assert together.json["passed"]
    assert together.code == (0 if together.json["proven"] else 3)
    assert {one["name"].split(":")[0] for one in together.json["checks"]} == {"a", "b", "together"}
    missing = run("verify", tmp_path / "out", files[0], tmp_path / "s.safetensors")
    assert "out/s.json: no such" in missing.err
    lie = {**saved[1].requested["pool"], "objective": 0.99, "bound": 0.99}
    saved[1].replace(requested={**saved[1].requested, "pool": lie}).save(tmp_path / "out/b.json")
    ran = run("verify", tmp_path / "out", *files)
    assert (ran.code, "WRONG  together: pool" in ran.out) == (1, True)
    assert "no split of the memory reaches more" in run(*asked, "-o", tmp_path / "out").out
