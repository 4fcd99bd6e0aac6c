"""What ``kvalloc inspect`` says of losses and evaluations."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cli_tools import Terminal, refused, run
from factories import (
    make_budget_profile,
    make_evaluation,
    make_losses,
    make_row,
    make_scores,
)

from kvalloc.cli import inspect
from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.policy import Policy
from kvalloc.formats.score_profile import ScoreProfile

ROWS = [
    {"task": "needle", "kl": 0.0321, "ci95": [0.01, 0.05],
     "top1_agreement": 0.96, "score": 0.5, "n": 6},
    {"task": "kl", "kl": 0.2, "ci95": None, "score": None, "n": 1},
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("measured", "measured one"),
        ("fast", "estimated to second order (--loss fast) one"),
        ("", "this older file does not say"),
    ],
)
def test_it_says_whether_losses_were_measured(tmp_path, method, words):
    file = tmp_path / "s.safetensors"
    scores = make_losses().replace(loss_method=method)
    scores.save(file)
    assert ScoreProfile.load(file).loss_method == method
    assert words in " ".join(run("inspect", file).out.split())
    assert run("inspect", file, "--json").json["loss_method"] == (method or None)


def test_a_method_that_there_is_none_of_is_refused():
    with pytest.raises(InputError, match="loss_method"):
        make_losses().replace(loss_method="guessed")
    with pytest.raises(InputError, match="loss_method"):
        make_scores().replace(loss_method="fast")


def test_the_method_is_part_of_the_digest(tmp_path):
    plain = make_losses()
    assert plain.replace(loss_method="fast").digest != plain.digest
    file = tmp_path / "s.safetensors"
    plain.replace(loss_method="fast").save(file)
    data = file.read_bytes().replace(b'loss_method\\": \\"fast', b'loss_method\\": \\"slow')
    file.write_bytes(data)
    with pytest.raises(ProfileFileError, match="loss_method"):
        ScoreProfile.load(file)


def test_it_shows_the_evaluation(tmp_path):
    file = tmp_path / "p.json"
    budgets = make_budget_profile(np.full((2, 2), 20))
    evaluation = {"settings": {"split": "held-out", "seed": 7}, "rows": ROWS}
    budgets.replace(evaluation=evaluation).save(file)
    said = run("inspect", file).out
    lines = [line.split() for line in said.splitlines()]
    assert ["needle", "0.0321", "0.0100..0.0500", "96%", "50%", "6"] in lines
    assert ["kl", "0.2000", "-", "-", "-", "1"] in lines
    assert "split held-out, seed 7" in said


def test_the_evaluation_comes_first_and_strings_of_scorers_when_asked_for(tmp_path):
    own = Policy(
        scorer="lookahead", scorer_parameters={"tokens": 5}, sinks=2, window=3, label="lookahead"
    )
    other = own.replace(scorer_parameters={"tokens": 16}, label="lookahead:tokens=16")
    make_budget_profile(
        np.full((2, 2), 20),
        policy=own.replace(name="attention_matching"),
        other_policies=(other,),
        unit_policies=np.array([[0, 1], [1, 0]]),
        solver_options={"learning_rate": 0.15},
        evaluation={"settings": {}, "rows": ROWS},
    ).save(tmp_path / "p.json")
    brief, whole = (run("inspect", tmp_path / "p.json", *more).out for more in ((), ("--verbose",)))
    for said in (brief, whole):
        assert said.index("KL in nats per token") < said.index("task") < said.index("model ")
    assert "attention_matching by lookahead, 2 sinks" in brief
    for words in ("lookahead:tokens=16", "learning_rate=0.15", "other policies"):
        assert words in whole
        assert words not in brief


def test_a_result_file_is_shown_as_eval_shows_it(tmp_path):
    make_evaluation(make_row("full", kl=0.0), make_row("p", kl=0.0321)).save(tmp_path / "r.json")
    said = run("inspect", tmp_path / "r.json").out
    for words in ("full ", "p ", "0.0321", "development"):
        assert words in said
    assert run("inspect", tmp_path / "r.json", "--json").json["settings"]["seed"] == 0


def test_heads_are_a_spark_each_blocks_or_digits(monkeypatch):
    budgets = make_budget_profile(np.array([[5, 40], [20, 20]]))
    assert inspect.budget_picture(budgets)[2].split()[3] == "55"
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert inspect.budget_picture(budgets)[1].split()[3] == "▂█"


@pytest.mark.parametrize("evaluation", [{}, {"rows": 3}, {"rows": [1, "x"], "settings": []}])
def test_an_evaluation_of_another_form_does_no_harm(tmp_path, evaluation):
    file = tmp_path / "p.json"
    plain = make_budget_profile(np.full((2, 2), 20))
    plain.replace(evaluation=evaluation).save(file)
    assert "measured on" not in run("inspect", file).out


NASTY = "a\x1b[31m\nb\x07"
SHOWN = "a\\x1b[31m\\nb\\x07"


def test_control_characters_from_a_file_are_shown_escaped(tmp_path):
    """They would colour a terminal, move its cursor or forge a line of the output."""
    scores = make_losses().replace(text_description=NASTY)
    scores.save(tmp_path / "s.safetensors")
    budgets = make_budget_profile(np.full((2, 2), 20), created=NASTY)
    rows = [{"task": NASTY, "kl": 0.1}]
    evaluation = {"settings": {"split": NASTY, "seed": 7}, "rows": rows}
    budgets.replace(evaluation=evaluation).save(tmp_path / "p.json")
    for name, count in (("s.safetensors", 1), ("p.json", 3)):
        said = run("inspect", tmp_path / name).out
        assert said.count(SHOWN) == count
        assert said.replace("\n", "").isprintable()


def test_control_characters_of_an_error_are_shown_escaped(tmp_path):
    assert "x\\x1b]0;y\\x07.json" in refused(tmp_path, "inspect", tmp_path / "x\x1b]0;y\x07.json")


def test_what_is_no_file_of_ours_is_told_by_its_first_bytes(tmp_path):
    """Also where the reader's own words for it are others than those of today."""
    file = tmp_path / "x.bin"
    make_losses().save(file)
    truncated = file.read_bytes()[:-7]
    for data in (b"\x00" * 20, b"plain text, and nothing else"):
        file.write_bytes(data)
        said = refused(tmp_path, "inspect", file)
        assert "expected a score profile or a budget profile or an evaluation or a saved" in said
        assert "make this one again" in said
    file.write_bytes(truncated)  # what its header says is believed so far
    assert "a score profile written by 'kvalloc profile'" in refused(tmp_path, "inspect", file)
    said = refused(tmp_path, "inspect", tmp_path)
    assert "is a folder, expected a score profile or a budget profile or an evaluation" in said
