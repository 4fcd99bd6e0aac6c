"""``kvalloc profile`` on tiny models, and every way in which a user can go wrong with it."""

import json

from cli_tools import CLI_CONTEXT, files_in, profile_arguments, prose, run, succeed

from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.score_profile import ScoreProfile


def test_profile_writes_what_it_says(models, folder):
    ran = run(*profile_arguments(models, folder), "--json")
    assert (ran.code, ran.err) == (0, "")
    facts = ran.json
    assert facts["model"] == "tiny"
    assert (facts["samples"], facts["context_tokens"], facts["sinks"]) == (2, CLI_CONTEXT, 4)
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert saved.shape.model_id == "tiny"
    assert "text.txt" in saved.text_description
    assert sorted(files_in(folder)) == ["prompt.txt", "s.safetensors", "text.txt"]
    shown = run(*profile_arguments(models, folder)).out
    words = ("tiny", "2 samples", "64 tokens", "xkv", "s.safetensors", " s, loading included")
    assert [word for word in words if word not in shown] == []


def test_profile_makes_prompts_of_tasks(models, folder):
    ran = succeed(
        *("profile", models / "tiny", "--tasks", "kl", "--samples", 2, "--context", CLI_CONTEXT),
        *("--loss", "fast", "-o", folder / "s.safetensors"),
    )
    assert "estimated to second order (--loss fast) one layer at a time, at 8 budgets" in ran.out
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert "2 of 2 prompts of kl in " in saved.text_description
    assert saved.sample_tokens.tolist() == [CLI_CONTEXT, CLI_CONTEXT]
    assert saved.has_losses


def test_profile_passes_every_option_on(models, folder):
    (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prose(n)}) for n in (70, 50)))
    succeed(
        *("profile", models / "tiny", "--prompts", folder / "p.jsonl", "--samples", 2),
        *("--context", 60, "--scorer", "snapkv:window=16:pool=3:group-reduce=max", "--sinks", 0),
        *("--seed", 3, "--dtype", "bfloat16", "--device", "cpu"),
        *("-o", folder / "s.safetensors", "--json"),
    )
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert saved.scorer == "snapkv"
    assert saved.scorer_parameters["pool"] == 3
    assert saved.scorer_parameters["group_reduce"] == "max"
    assert (saved.sinks, saved.window, saved.shape.dtype_bytes) == (0, 16, 2)
    assert saved.sample_tokens.tolist() == [60, 50]


def test_profile_measures_engine_formats(models, folder):
    file = folder / "s.formats.safetensors"
    command = ("profile", models / "tiny", "--text", folder / "text.txt", "-o", file)
    options = ("--formats", "kvtuner", "--formats", "fp8", "--samples", 2, "--context", 40)
    ran = run(*command, *options, "--json")
    assert (ran.code, ran.err) == (0, "")
    saved = FormatLosses.load(file)
    assert saved.formats == ("fp8", "kvt_8", "kvt_4", "kvt_2")
    assert (saved.n_tokens, saved.context_tokens) == (80, 40)
    by_format = {one["format"]: one for one in ran.json["by_format"]}
    assert [*by_format] == [*saved.formats]
    assert by_format["kvt_2"]["mean"] == saved.mean[3] > by_format["kvt_8"]["mean"]
    file.unlink()
    shown = succeed(*command, *options).out
    assert [
        word for word in ("K alone", "kvt_2", "99.9%", "12 whole caches") if word not in shown
    ] == []
    inspected = run("inspect", file)
    assert "80 predictions" in inspected.out
    assert run("inspect", file, "--json").json["by_format"] == ran.json["by_format"]


def test_what_formats_cannot_do_is_refused_before_a_model_is_loaded(models, folder):
    command = ("profile", "no-such-model", "-o", folder / "s.safetensors", "--formats")
    for options, words in (
        (("lama.cpp",), "there is no engine or format 'lama.cpp'; the nearest is 'llama.cpp'"),
        (("vllm", "--scorer", "knorm"), "--scorer is about scores, which --formats does not"),
    ):
        ran = run(*command, *options)
        assert ran.code == 2
        assert words in ran.err
    ran = run("profile", models / "tiny", *command[2:], "llama.cpp")
    assert (ran.code, ran.out) == (2, "")
    assert "q8_0 stores blocks of 32 numbers, and heads of tiny have 8; take f16" in ran.err
