"""What budgets by retention are predicted to lose is said wherever they are shown."""

import logging
import re

import runtime_oracle as tiny
from cli_tools import run, succeed
from factories import make_scores

import kvalloc
from kvalloc.allocation.decision import loss_outlook
from kvalloc.errors import naming_flags

SHIPPED = "smollm2-135m-instruct-retention-90"


def test_the_loss_of_retention_stands_beside_what_its_bytes_could_reach(tmp_path):
    said = loss_outlook(kvalloc.load_profile(SHIPPED))
    with naming_flags():
        flags = loss_outlook(kvalloc.load_profile(SHIPPED))
    lost, share, least = map(float, re.findall(r"[0-9.]+[0-9]", said)[:3])
    assert share == 31.3
    assert lost > 100 * least > 0
    assert flags in run("inspect", SHIPPED).out
    page = tmp_path / "r.html"
    succeed("report", SHIPPED, "-o", page)
    assert flags in page.read_text()


def test_without_curves_the_command_is_named_that_finds_it_out(tmp_path, caplog):
    scores = make_scores(0)
    scores.save(tmp_path / "s.safetensors")
    named = f"run 'kvalloc fit {scores.shape.model_id}' once"
    said = run("solve", tmp_path / "s.safetensors", "--target-retention", 0.9, "-o", tmp_path / "p")
    assert named in said.out
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, 40, 0.5).replace(retention=0.9)
    with caplog.at_level(logging.WARNING), kvalloc.apply(model, profile):
        assert "run 'kvalloc fit" in caplog.text
    assert not loss_outlook(profile.replace(predicted_loss=0.1))


def test_a_memory_says_what_the_rest_of_it_is_for(tmp_path):
    asked = ("--memory", "4MiB", "--context", 869)
    said = run("solve", "smollm2-135m-instruct", *asked, "-o", tmp_path / "p.json").out
    assert re.search("peak +4.00 MiB: beside these bytes, one layer in full", said)
