"""Pictures as files: the demo's, and what 'kvalloc report' draws."""

import xml.etree.ElementTree as ElementTree

import pytest
from cli_tools import succeed
from factories import make_evaluation, make_losses, make_row

from kvalloc.allocation.decision import solve
from kvalloc.report.figure import plot


def words_of(path):
    """All text of an SVG."""
    return [word for word in ElementTree.parse(path).getroot().itertext() if word.strip()]


@pytest.fixture(scope="module")
def scores():
    return make_losses(per="layer")


@pytest.fixture(scope="module")
def profiles(scores):
    names = ("uniform", "greedy", "ilp", "pyramid")
    return {name: solve(scores, target_retention=0.9, solver=name) for name in names}


def test_an_overview_has_a_panel_for_each_thing_and_equal_budgets_once(tmp_path, scores, profiles):
    scores.save(tmp_path / "s.safetensors")
    rows = [make_row(kl=0.8), make_row("greedy", kl=0.125, score=0.5), make_row("none", kl=None)]
    rows.append(make_row("exact", kl=0.0))
    make_evaluation(*rows, make_row("plain", kl=0.5, task="kl", score=None)).save(
        tmp_path / "r.json"
    )
    for name, profile in profiles.items():
        profile.save(tmp_path / f"{name}.json")
    files = [*tmp_path.glob("*.safetensors"), *sorted(tmp_path.glob("*.json"))]
    assert plot(files, tmp_path / "b.svg", "overview") == "overview"
    words = words_of(tmp_path / "b.svg")
    assert {"greedy = ilp", "Layers differ in what they need", "Measured harm"} <= {*words}
    assert {"0.8; 100%", "0.13; 50%", "0; 100%", "0.0001"} <= {*words}  # and an axis
    assert not {"none", "plain"} & {*words}
    assert sum("% of the bytes" in word for word in words) == 3


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ((), ["tests/tiny: budgets", "p: 47.8% of the bytes", "KV head"]),
        (("--what", "curves"), ["s: retention by scorer xkv", "loss, nats per token"]),
        (("--what", "frontier"), ["best layer budgets by s", "p", "bytes kept, of the full cache"]),
        (("--what", "measured"), ["needle, 40 tokens", "KL to the full cache, nats per token"]),
    ],
)
def test_plot_draws_what_is_asked_for(tmp_path, scores, what, words):
    scores.save(tmp_path / "s.safetensors")
    solve(scores, budget=0.5, objective="mean", solver="uniform").save(tmp_path / "p.json")
    make_evaluation(make_row("p")).save(tmp_path / "r.json")
    files = [tmp_path / name for name in ("s.safetensors", "p.json", "r.json")]
    ran = succeed("report", *files, "-o", tmp_path / "x.svg", *what)
    name = what[1] if what else "budgets"
    assert ran.out == f"written {tmp_path / 'x.svg'}: {name}\n"
    assert {*words} <= {*words_of(tmp_path / "x.svg")}
