"""Commands about other engines' formats: advise, solve --engine, export and inspect of a choice."""

import json

import pytest
from cli_tools import refused, run, succeed
from factories import make_format_losses, make_scores, make_shape

from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.formats.shipped_profiles import load_fitted
from kvalloc.interop.engines import SYNTAX
from kvalloc.measure import format_profile

SHAPE = make_shape(n_layers=4, head_dim=64, max_context_tokens=40_000)


@pytest.fixture
def measured(tmp_path):
    """A format profile of all formats, in a folder of its own."""
    path = tmp_path / "m.formats.safetensors"
    make_format_losses(SHAPE, tuple(FORMATS)[1:]).save(path)
    return path


def test_a_choice_goes_from_a_profile_to_the_engine_s_file(measured):
    folder = measured.parent
    how = ("--engine", "mlx-lm", "--bits", 7, "--context", "32k", "-o", folder / "c.json")
    solved = succeed("solve", measured, *how, "--json").json
    assert (solved["context_tokens"], solved["engine"]) == (32768, "mlx-lm")
    assert solved["bits"] <= 7
    shown = succeed("inspect", folder / "c.json").out
    assert "--bits 7, 32,768 tokens" in shown
    assert shown.count("\n>") == 1  # the chosen one among others
    exported = succeed("export", folder / "c.json", "-o", folder / "kv.json").out
    assert "QuantizedKVCache(**stored)" in exported
    layers = json.loads((folder / "kv.json").read_text())["layers"]
    names = [f"mlx_{one['bits']}_{one['group_size']}" if one else "f16" for one in layers]
    assert [[name, name] for name in names] == solved["pairs"]
    assert run("solve", measured, *how[:-2]).code == 0  # nothing has to be written


def test_advice_has_a_row_for_every_engine_and_files_on_request(measured):
    told = ("advise", measured, "--bits", 6, "--context", 1000)
    advice = succeed(*told, "-o", measured.parent / "all", "--json").json
    assert {*advice} == {*SYNTAX}
    assert all("refused" in one or one["bits"] <= 6 for one in advice.values())
    assert "less than vllm can be told: its least" in advice["vllm"]["refused"]
    written = {path.name for path in (measured.parent / "all").iterdir()}
    assert written == {f"{name}{SYNTAX[name].suffix}" for name in SYNTAX if name != "vllm"}
    lines = succeed(*told).out.splitlines()
    assert lines[0] == "tests/tiny, --bits 6, 1,000 tokens"
    assert f"  {advice['llama.cpp']['run']}" in lines
    means = [one["mean"] for one in advice.values() if "mean" in one]
    assert means == sorted(means)


def test_kvalloc_s_own_cache_stands_beside_them_if_the_model_is_fitted(tmp_path):
    path = tmp_path / "m.formats.safetensors"
    make_format_losses(load_fitted("smollm2-135m-instruct").shape, ("q8_0", "q4_0")).save(path)
    advice = succeed("advise", path, "--bits", 6, "--context", "1k", "--batch", 2, "--json").json
    kept, full = advice["kvalloc"]["cache_bytes"], advice["llama.cpp"]["full_bytes"]
    assert 0.35 * full < kept <= 0.375 * full
    assert 0 < advice["kvalloc"]["mean"] < 0.1
    assert advice["kvalloc"]["run"].endswith("SmolLM2-135M-Instruct --budget 37.5%")
    least = ("advise", path, "--target-loss", 0.001, "--context", 1000)
    assert "kvalloc generate" in succeed(*least).out


def test_a_model_is_measured_once(models, tmp_path, monkeypatch):
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path))
    for name, less in (("SAMPLES", 1), ("CONTEXT_TOKENS", 40)):
        monkeypatch.setattr(format_profile, name, less)
    first, second = (succeed("advise", models / "tiny", "--bits", 9) for _ in range(2))
    assert "were not measured on tiny yet; measuring them into" in first.err
    assert "measured before" in second.err
    assert first.out == second.out
    assert [path.suffix for path in (tmp_path / "formats").iterdir()] == [".safetensors"]


REFUSED = {
    "give --memory": ("advise", "FILE", "--memory", "1KiB", "--context", "32k"),
    "beyond the 40000 tokens of tests/tiny": ("advise", "FILE", "--bits", 6, "--context", "40k"),
    "no targets are given; give one of --memory": ("advise", "FILE"),
    "it is decided already": ("advise", "BUDGETS", "--bits", 6),
    "--engine llama.cpp --bits 5.5": ("solve", "FILE", "--budget", "20%", "-o", "OUT"),
    "is a score profile": ("solve", "SCORES", "--engine", "vllm", "--bits", 6),
    "the nearest is 'vllm'": ("solve", "FILE", "--engine", "vlm", "--bits", 6),
    "--level is not about engine formats": (
        *("solve", "FILE", "--engine", "vllm", "--bits", 9, "--level", "head"),
    ),
    "--average does not go with --engine": (
        *("solve", "FILE", "--engine", "vllm", "--bits", 9, "--average", "allocations"),
    ),
    "--fairness does not go with --engine": (
        *("solve", "FILE", "--engine", "vllm", "--bits", 9, "--fairness", "worst"),
    ),
    "--accept is about budgets": ("export", "CHOICE", "--accept", "one-width", "-o", "OUT"),
    "'32 kilo' is no number of tokens": (
        "solve",
        "SCORES",
        "--budget",
        0.2,
        "--context",
        "32 kilo",
    ),
    "llama.cpp evicts nothing": ("export", "BUDGETS", "--to", "llama.cpp", "-o", "OUT"),
    "is for openvino; decide for vllm with": ("export", "CHOICE", "--to", "vllm", "-o", "OUT"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_line_with_what_is_nearest(words, measured):
    folder = measured.parent
    files = {"FILE": measured, "OUT": folder / "out"}
    files |= {name: folder / name for name in ("SCORES", "BUDGETS", "CHOICE")}
    make_scores(shape=make_shape()).save(files["SCORES"])
    succeed("solve", files["SCORES"], "--budget", "50%", "-o", files["BUDGETS"])
    succeed("solve", measured, "--engine", "openvino", "--bits", 9, "-o", files["CHOICE"])
    refused(folder, *(files.get(one, one) for one in REFUSED[words]), words=[words])
