"""``kvalloc demo --quick`` from end to end, with the real model."""

import contextlib
import re

import cli_tools
import pytest

from kvalloc.cli.demo import BY_LOSS
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.prompts.splits import split_texts

pytestmark = [pytest.mark.model, pytest.mark.slow]

SOLVERS = {"greedy": "layer", "adaptive_head": "head"}
"""As if these were all: any other one costs two more answers."""

NAMES = {*SOLVERS, BY_LOSS}


def run(*arguments, folder, solvers=SOLVERS):
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvalloc.allocation.decision.solver_names", lambda: [*solvers])
        patch.setattr("kvalloc.cli.demo.SOLVERS", solvers)
        return cli_tools.run("demo", "--quick", *arguments)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    done = run(folder=folder)
    assert done.code == 0, done.err
    return folder / "demo-output", done.out


def test_every_file_is_there_and_sound(demo):
    folder, _ = demo
    scores = ScoreProfile.load(folder / "scores.safetensors")
    assert not any(name in scores.text_description for name in split_texts("development"))
    assert (folder / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    page = (folder / "report.html").read_text("utf-8")
    profiles = {file.stem: BudgetProfile.load(file) for file in folder.glob("*.json")
                if file.stem != "results"}  # fmt: skip
    assert {*profiles} == NAMES
    for name, profile in profiles.items():
        assert name in page
        assert name == BY_LOSS or profile.score_digest == scores.digest
    assert profiles[BY_LOSS].predicted_loss is not None


def test_budgets_of_equal_size_are_measured_and_shown(demo):
    folder, output = demo
    results = Evaluation.load(folder / "results.json")
    (default,) = {row["name"] for row in results.rows} - NAMES - {"full"}
    assert default.startswith("--budget ")
    needles = {row["name"]: row for row in results.rows if row["task"] == "needle"}
    sizes = [needles[name]["retained_bytes"] for name in NAMES]
    entry_of_every_head = 2 * needles["full"]["full_bytes"] / 240
    assert max(sizes) - min(sizes) <= entry_of_every_head
    for row in results.rows:
        starts = rf"{row['task']} +{re.escape(row['name'])} .* {row['kl']:.4f} "
        assert re.search(f"^{starts}", output, re.MULTILINE), starts
    assert "weak guide to harm" in " ".join(output.split())
    shown = [line.split()[2] for line in output.splitlines() if line.startswith("$ kvalloc ")]
    solved = ["solve"] * len(NAMES)
    assert shown == ["profile", "compare", *solved, "eval", "report", "report"]
