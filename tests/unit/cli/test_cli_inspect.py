"""``kvalloc inspect``: files of each kind, and what is none."""

import sys

import numpy as np
import pytest
from cli_tools import Terminal, refused, run
from factories import (
    make_bits,
    make_budget_profile,
    make_evaluation,
    make_losses,
    make_row,
    make_scores,
    make_shape,
)

import kvalloc
from kvalloc.formats.budget_profile import Policy
from kvalloc.report.terminal import budget_picture
from kvalloc.report.wording import budget_spread, tokens_for


@pytest.mark.parametrize(
    ("make", "words", "facts"),
    [
        (make_scores, "made up", {"losses_per": None, "loss_method": None}),
        (make_losses, "one head at a time, at 5 budgets from 5 to 40 tokens",
         {"loss_tokens": [5, 7, 12, 20, 40], "losses_per": "head", "loss_method": None}),
        (lambda: make_losses().replace(loss_method="fast"),
         "estimated to second order (--loss fast) one", {"loss_method": "fast"}),
        (make_bits, "stored at 16, 8, 4 bits each", {"loss_widths": [16, 8, 4]}),
    ],
)  # fmt: skip
def test_score_profiles(tmp_path, make, words, facts):
    make().save(file := tmp_path / "s.safetensors")
    assert words in " ".join(run("inspect", file).out.split())
    ran = run("inspect", file, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert {"kind": "kvalloc.score_profile", **facts}.items() <= ran.json.items()
    needed = (ran.json["tokens_for_retention"][level] for level in ("0.5", "0.9", "0.99"))
    assert all(a <= b <= c for a, b, c in zip(*needed, strict=True))


def test_tokens_for_a_retention_are_the_fewest_that_reach_it():
    shape = make_shape(layer_types=("sliding", "full", "full"), sliding_window=9)
    assert tokens_for(make_scores(1, shape=shape), 0.9)[0] is None
    scores = make_scores(3)
    curves = scores.contributions().sum(axis=1)
    for layer, tokens in enumerate(tokens_for(scores, 0.9)):
        rank = tokens - scores.protected_tokens
        assert curves[layer, rank - 1] < 0.9 <= curves[layer, rank] + 1e-9


def test_a_budget_profile_is_known_by_its_content(tmp_path):
    kvalloc.solve(make_scores(), budget="40%").save(tmp_path / "no_suffix")
    facts = run("inspect", tmp_path / "no_suffix", "--json").json
    assert facts["kind"] == "kvalloc.budget_profile"
    assert facts["min_tokens"] <= facts["mean_tokens"] <= facts["max_tokens"]
    shown = run("inspect", tmp_path / "no_suffix").out
    assert "auto (greedy), optimal" in shown
    assert len(shown.partition("\n\n")[2].splitlines()) == 1 + 3
    make_budget_profile([[10, 20], [8, 8]]).save(tmp_path / "p.json")
    assert "not recorded" in run("inspect", tmp_path / "p.json").out


def test_parameters_are_shown_when_asked_for(tmp_path):
    policy = Policy(scorer="lookahead", scorer_parameters={"votes": 5}, sinks=2, window=3)
    policy = policy.replace(name="attention_matching")
    made = {"policy": policy, "solver_options": {"learning_rate": 0.15}}
    make_budget_profile(np.full((2, 2), 20), **made).save(tmp_path / "p.json")
    brief, whole = (run("inspect", tmp_path / "p.json", *more).out for more in ((), ("--verbose",)))
    assert "attention_matching by lookahead, 2 sinks" in brief
    for words in ("votes=5", "learning_rate=0.15"):
        assert words in whole
        assert words not in brief


def test_a_result_file_is_shown_as_eval_shows_it(tmp_path):
    many = {"kl": 0.02, "p99": 1.5, "p999": None, "n_tokens": 300, "top1_agreement": 0.875}
    rows = [make_row(name, kl=kl) for name, kl in (("full", 0.0), ("p", 0.0321))]
    for one in rows:
        one["by_position"] = {**one["by_position"], "16-63": many}
    make_evaluation(*rows).save(tmp_path / "r.json")
    said = run("inspect", tmp_path / "r.json").out
    for words in ("full ", "p ", "0.0321", "0.0100..0.0500", "development", "KL 99.9%"):
        assert words in said
    *_, headings, last = said.splitlines()  # of positions with enough tokens for a percentile
    assert headings.split()[:3] == ["task", "cache", "positions"]
    assert last.split() == ["needle", "p", "16-63", "0.0200", "1.5000", "-", "300", "87.5%"]
    assert run("inspect", tmp_path / "r.json", "--json").json["settings"]["seed"] == 0


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_has_a_line_a_layer_and_fits(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    by_layer = budget_picture(make_budget_profile([[10, 10], [40, 40], [20, 20]], level="layer"))
    by_head = budget_picture(make_budget_profile([[10, 30], [40, 6], [5, 5]]))
    for lines in (by_layer, by_head):
        assert len(lines) == 4
        assert all(len(line) <= width for line in lines[1:])
    bars = [line.count("#") for line in by_layer[1:]]
    assert bars[1] == max(bars)
    assert bars[1] == pytest.approx(2 * bars[2], abs=1)
    assert by_head[2].split()[2:4] == ["6..40", "91"]  # a digit a head
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert budget_picture(make_budget_profile([[5, 40]]))[1].split()[3] == "▂█"


def test_sliding_layers_are_named_and_do_not_count_for_the_spread():
    shape = make_shape(layer_types=("sliding", "full", "sliding"), sliding_window=9)
    profile = make_budget_profile([[8, 8], [20, 20], [8, 8]], shape=shape, level="layer")
    lines = budget_picture(profile)
    assert [line.endswith("sliding") for line in lines[1:]] == [True, False, True]
    assert budget_spread(profile) == (20, 20.0, 20)


NASTY = "a\x1b[31m\nb\x07"
SHOWN = "a\\x1b[31m\\nb\\x07"


def test_control_characters_from_a_file_are_shown_escaped(tmp_path):
    """They would colour a terminal, move its cursor or forge a line of the output."""
    make_losses().replace(text_description=NASTY).save(tmp_path / "s.safetensors")
    make_budget_profile(np.full((2, 2), 20), created=NASTY).save(tmp_path / "p.json")
    make_evaluation(make_row(task=NASTY)).save(tmp_path / "r.json")
    for name, count in (("s.safetensors", 1), ("p.json", 1), ("r.json", 1)):
        said = run("inspect", tmp_path / name).out
        assert said.count(SHOWN) == count
        assert said.replace("\n", "").isprintable()
    assert "x\\x1b]0;y\\x07.json" in refused(tmp_path, "inspect", tmp_path / "x\x1b]0;y\x07.json")
