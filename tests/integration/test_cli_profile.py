"""``kvalloc profile`` on tiny models, and every way in which a user can go wrong with it."""

import json

from cli_tools import CLI_CONTEXT, files_in, profile_arguments, prose, refused, run

from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure import profiling


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
    ran = run(
        *("profile", models / "tiny", "--tasks", "kl", "--samples", 2, "--context", CLI_CONTEXT),
        *("--loss", "fast", "-o", folder / "s.safetensors"),
    )
    assert ran.code == 0, ran.err
    assert "estimated to second order (--loss fast) one layer at a time, at 8 budgets" in ran.out
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert "2 of 2 prompts of kl in " in saved.text_description
    assert saved.sample_tokens.tolist() == [CLI_CONTEXT, CLI_CONTEXT]
    assert saved.has_losses


def test_profile_passes_every_option_on(models, folder):
    (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prose(n)}) for n in (70, 50)))
    ran = run(
        *("profile", models / "tiny", "--prompts", folder / "p.jsonl", "--samples", 2),
        *("--context", 60, "--scorer", "snapkv:window=16:pool=3:group-reduce=max", "--sinks", 0),
        *("--seed", 3, "--dtype", "bfloat16", "--device", "cpu"),
        *("-o", folder / "s.safetensors", "--json"),
    )
    assert ran.code == 0, ran.err
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert saved.scorer == "snapkv"
    assert saved.scorer_parameters["pool"] == 3
    assert saved.scorer_parameters["group_reduce"] == "max"
    assert (saved.sinks, saved.window, saved.shape.dtype_bytes) == (0, 16, 2)
    assert saved.sample_tokens.tolist() == [60, 50]


def test_a_killed_profile_is_resumed(models, folder, monkeypatch):
    """Bit for bit: `test_a_stopped_job_goes_on_and_gives_the_same_bits`."""
    measure, calls = profiling.mini_prefill, []

    def interrupted(*rest, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*rest, **named)

    arguments = profile_arguments(models, folder)
    with monkeypatch.context() as patch:
        patch.setattr(profiling, "mini_prefill", interrupted)
        ran = run(*arguments)
    assert (ran.code, ran.err.count("\n")) == (130, 1)
    assert "--resume" in ran.err
    assert "--resume" in refused(folder, *arguments)
    assert run(*arguments, "--resume").code == 0
    assert [path.name for path in folder.glob("s.*")] == ["s.safetensors"]


def test_shards_are_merged_to_what_one_call_writes(models, folder):
    text = ("--text", folder / "text.txt", "--context", CLI_CONTEXT, "--samples", 4)
    assert run("profile", models / "tiny", *text, "-o", folder / "whole").code == 0
    for number in (1, 2):
        shard = ("--shard", f"{number}/2", "-o", folder / f"part{number}")
        ran = run("profile", models / "tiny", *text, *shard)
        assert f"shard {number} of 2" in ran.out
        assert "2 samples" in ran.out
    ran = run("merge", folder / "part2", folder / "part1", "-o", folder / "merged")
    assert "4 samples of 2 parts" in ran.out
    assert (folder / "merged").read_bytes() == (folder / "whole").read_bytes()


def test_losses_of_widths_are_measured(models, folder):
    loss = ("--loss", "fast", "--loss-level", "head", "--bits", "8,3")
    ran = run(*profile_arguments(models, folder), "--scorer", "snapkv:window=8", *loss, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["loss_widths"] == [16, 8, 3]
    shown = " ".join(run("inspect", folder / "s.safetensors").out.split())
    assert "stored at 16, 8, 3 bits each" in shown
