"""profile and generate on tiny models, and every way in which a user can go wrong with them."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from cli_tools import files_in, prose, refused, run, save_tiny_model
from tiny_models import tiny_model
from transformers import MambaConfig, MambaForCausalLM

from kvalloc.library import load_profile
from kvalloc.measure.checkpoint import checkpoint_folder
from kvalloc.score_profile import ScoreProfile

CONTEXT = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of model folders."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "tiny", tiny_model())
    save_tiny_model(folder / "twin", tiny_model(seed=1))
    save_tiny_model(folder / "chatty", tiny_model(), chat=True)
    save_tiny_model(folder / "deeper", tiny_model(num_hidden_layers=4))
    save_tiny_model(folder / "gemma", tiny_model("gemma3"))
    save_tiny_model(
        folder / "mamba",
        MambaForCausalLM(
            MambaConfig(vocab_size=101, hidden_size=16, state_size=4, num_hidden_layers=2)
        ),
    )
    broken = tiny_model()
    with torch.no_grad():
        broken.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    save_tiny_model(folder / "nan", broken)
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text(prose(1000))
    (tmp_path / "prompt.txt").write_text(prose(100))
    return tmp_path


@pytest.fixture(scope="module")
def profiles(models, tmp_path_factory):
    """Profiles of the tiny model: s.safetensors, and p.json at half of all entries."""
    folder = tmp_path_factory.mktemp("profiles")
    (folder / "text.txt").write_text(prose(1000))
    arguments = ("--text", folder / "text.txt", "--context", CONTEXT, "--samples", 2)
    for name in ("tiny", "gemma"):
        scores = folder / f"{name}.safetensors"
        assert run("profile", models / name, *arguments, "-o", scores).code == 0
        budget = ("--budget", "50%", "--quiet")
        assert run("solve", scores, *budget, "-o", folder / f"{name}.json").code == 0
        head = (*budget, "--level", "head")
        assert run("solve", scores, *head, "-o", folder / f"{name}-head.json").code == 0
    return folder


def profile_arguments(models, folder, name="tiny"):
    return ["profile", models / name, "--text", folder / "text.txt", "--context", CONTEXT,
            "--samples", 2, "-o", folder / "s.safetensors"]  # fmt: skip


# profile


def test_profile_writes_what_it_says(models, folder):
    ran = run(*profile_arguments(models, folder), "--json")
    assert (ran.code, ran.err) == (0, "")
    facts = ran.json
    assert facts["model"] == "tiny"
    assert (facts["samples"], facts["context_tokens"], facts["sinks"]) == (2, CONTEXT, 4)
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert saved.shape.model_id == "tiny"
    assert "text.txt" in saved.text_description
    assert sorted(files_in(folder)) == ["prompt.txt", "s.safetensors", "text.txt"]


def test_profile_ends_with_a_summary(models, folder):
    ran = run(*profile_arguments(models, folder))
    assert ran.code == 0
    for words in ("tiny", "2 samples", "64 tokens", "xkv", "s.safetensors", " s, loading included"):
        assert words in ran.out
    assert run(*profile_arguments(models, folder), "-q").out == ""


def test_profile_makes_prompts_of_tasks(models, folder):
    ran = run(
        *("profile", models / "tiny", "--tasks", "kl", "--samples", 2, "--context", CONTEXT),
        *("--loss", "fast", "-o", folder / "s.safetensors", "-q"),
    )
    assert ran.code == 0, ran.err
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert "2 of 2 prompts of kl in " in saved.text_description
    assert saved.sample_tokens.tolist() == [CONTEXT, CONTEXT]
    assert saved.has_losses


def test_profile_passes_every_option_on(models, folder):
    (folder / "p.jsonl").write_text("\n".join(json.dumps({"prompt": prose(n)}) for n in (70, 50)))
    ran = run(
        *("profile", models / "tiny", "--prompts", folder / "p.jsonl", "--sampling-ratio", "1.0"),
        *("--context", 60, "--scorer", "snapkv", "--window", 16, "--pool", 3, "--count-sinks"),
        *("--group-reduce", "max", "--seed", 3, "--dtype", "bfloat16", "--device", "cpu"),
        *("-o", folder / "s.safetensors", "--json"),
    )
    assert ran.code == 0, ran.err
    saved = ScoreProfile.load(folder / "s.safetensors")
    assert saved.scorer == "snapkv"
    assert saved.scorer_parameters["pool"] == 3
    assert saved.scorer_parameters["group_reduce"] == "max"
    assert (saved.sinks, saved.window, saved.shape.dtype_bytes) == (0, 16, 2)
    assert saved.sample_tokens.tolist() == [60, 50]


def test_a_killed_profile_is_resumed_and_equal(models, folder, monkeypatch):
    from kvalloc.measure import profiling

    whole = folder / "whole.safetensors"
    arguments = profile_arguments(models, folder)
    assert run(*arguments[:-1], whole).code == 0
    measure, calls = profiling.mini_prefill, []

    def interrupted(*rest, **named):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*rest, **named)

    with monkeypatch.context() as patch:
        patch.setattr(profiling, "mini_prefill", interrupted)
        ran = run(*arguments)
    assert ran.code == 130
    assert ran.err.count("\n") == 1
    assert "--resume" in ran.err
    assert not (folder / "s.safetensors").exists()
    partial = checkpoint_folder(folder / "s.safetensors")
    assert partial.is_dir()
    assert "--resume" in refused(folder, *arguments)
    ran = run(*arguments, "--resume")
    assert ran.code == 0, ran.err
    assert not partial.exists()
    resumed, unbroken = (ScoreProfile.load(folder / f"{n}.safetensors") for n in ("s", "whole"))
    assert resumed.curves.tobytes() == unbroken.curves.tobytes()


def test_an_interruption_before_the_first_sample_leaves_nothing(models, folder, monkeypatch):
    from kvalloc.measure import profiling

    def interrupted(*rest, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "mini_prefill", interrupted)
    before = files_in(folder)
    ran = run(*profile_arguments(models, folder))
    assert (ran.code, ran.err) == (130, "interrupted\n")
    assert files_in(folder) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--text": "missing.txt"}, ["missing.txt", "check the path"]),
        ({"--text": "empty.txt"}, ["empty.txt", "empty"]),
        ({"--text": "binary.txt"}, ["binary.txt", "not text"]),
        ({"--text": "latin.txt"}, ["latin.txt", "UTF-8"]),
        ({"--text": "short.txt"}, ["fewer than one sample", "shorter context"]),
        ({"--samples": 99}, ["99 samples", "only 15"]),
        ({"--samples": 0}, ["0 samples"]),
        ({"--sampling-ratio": 0, "--samples": None}, ["sampling ratio"]),
        ({"--context": 12}, ["12 tokens", "at least 13"]),
        ({"--context": 513}, ["513", "beyond the 512"]),
        ({"--scorer": "oracle"}, ["no scorer 'oracle'", "xkv"]),
        ({"--pool": 4}, ["pool", "odd"]),
        ({"--scorer": "streaming", "--pool": 3}, ["streaming has no option 'pool'"]),
        ({"--group-reduce": "median"}, ["group_reduce", "median"]),
        ({"--window": 0}, ["window"]),
        ({"--sinks": -1}, ["sinks"]),
        ({"--sinks": 2, "--count-sinks": True}, ["contradict"]),
        ({"--dtype": "int4"}, ["int4", "bfloat16"]),
        ({"--device": "abacus"}, ["abacus"]),
        ({"-o": "no/folder/s.safetensors"}, ["cannot write", "does not exist"]),
        ({"-o": "."}, ["cannot write", "folder"]),
        ({"--prompts": "few.jsonl", "--text": None, "--samples": 1}, ["few.jsonl", "line 1"]),
        ({"--prompts": "no.jsonl"}, ["no.jsonl, line 1", "not JSON"]),
        ({"--text": "few.jsonl"}, ["--prompts"]),
        ({"--tasks": "needle"}, ["--tasks", "text or prompts are given"]),
        ({"--tasks": "riddle", "--text": None}, ["no task 'riddle'", "needle"]),
        (
            {"--tasks": "kl", "--text": None, "--sampling-ratio": 0.5},
            ["--sampling-ratio", "--samples"],
        ),
        ({"--tasks": "kl", "--text": None, "--question": "before"}, ["--question", "inside"]),
        ({"--tasks": "kl", "--text": None, "--lengths": "9,x"}, ["--lengths", "512,1024"]),
        ({"--tasks": "kl", "--text": None, "--lengths": "100000"}, ["--lengths", "--context"]),
        ({"--question": "after"}, ["--question", "add --tasks"]),
        ({"--tasks": "kl", "--text": None, "--samples": 0}, ["0 prompts"]),
        ({"--tasks": "kl", "--text": None, "--context": 100_000}, ["no text", "--prompts"]),
    ],
)
def test_profile_refuses(models, folder, changes, words):
    (folder / "empty.txt").write_text("\n \n")
    (folder / "binary.txt").write_bytes(b"\x7fELF\x00\x01\x02")
    (folder / "latin.txt").write_bytes("é".encode("latin-1") * 100)
    (folder / "short.txt").write_text(prose(20))
    (folder / "few.jsonl").write_text(json.dumps({"prompt": prose(10)}))
    (folder / "no.jsonl").write_text("not json at all")
    options = {"--text": "text.txt", "--context": CONTEXT, "--samples": 2, "-o": "s.safetensors"}
    arguments: list[object] = ["profile", models / "tiny"]
    for name, value in {**options, **changes}.items():
        if value is None:
            continue
        is_path = name in ("--text", "--prompts", "-o")
        arguments += [name] if value is True else [name, folder / value if is_path else value]
    line = refused(folder, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", ["check the path"]),
        ("", ["config.json"]),
        ("mamba", ["Mamba"]),
        ("nan", ["not finite", "layer 1"]),
    ],
)
def test_profile_refuses_a_model(models, folder, name, words):
    line = refused(folder, *profile_arguments(models, folder, name))
    for word in words:
        assert word in line


def test_profile_refuses_a_file_that_is_no_model(models, folder):
    arguments = profile_arguments(models, folder)
    arguments[1] = folder / "text.txt"
    assert ".gguf" in refused(folder, *arguments)
    (folder / "model.gguf").write_text("not a model")
    arguments[1] = folder / "model.gguf"
    assert "GGUF" in refused(folder, *arguments)


def test_a_name_that_is_neither_here_nor_on_the_hub(models, folder):
    arguments = profile_arguments(models, folder)
    arguments[1] = "nobody/nothing-of-the-kind"
    assert "nothing-of-the-kind" in refused(folder, *arguments)


# generate


def generate_arguments(models, profiles, folder, name="tiny"):
    return ["generate", models / name, "--profile", profiles / f"{name}.json",
            "--prompt-file", folder / "prompt.txt", "--max-new-tokens", 5]  # fmt: skip


@pytest.mark.parametrize("name", ["tiny", "gemma"])
def test_generate_keeps_what_was_granted(models, profiles, folder, name):
    ran = run(*generate_arguments(models, profiles, folder, name), "--json")
    assert (ran.code, ran.err) == (0, "")
    found = ran.json
    assert found["prompt_tokens"] == 100
    assert 1 <= found["new_tokens"] <= 5
    assert found["retained_bytes"] < found["full_bytes"]
    assert found["prefill_seconds"] > 0
    full = run("generate", models / name, "--full", *generate_arguments(models, profiles, folder,
               name)[4:], "--json").json  # fmt: skip
    assert full["profile"] is None
    assert full["full_bytes"] == found["full_bytes"]
    if name == "tiny":
        assert full["retained_bytes"] == full["full_bytes"]


def test_only_the_answer_goes_to_stdout(models, profiles, folder):
    arguments = generate_arguments(models, profiles, folder)
    answer = run(*arguments, "--json").json["answer"]
    ran = run(*arguments)
    assert ran.out.strip() == answer.strip()
    assert "100 prompt and" in ran.err
    assert "prefill" in ran.err
    assert run(*arguments, "--quiet").err == ""


def test_a_short_prompt_is_kept_whole_and_that_is_said(models, profiles, folder):
    short = ("--prompt", prose(6), "--max-new-tokens", 3)
    ran = run("generate", models / "tiny", "--profile", profiles / "tiny.json", *short)
    assert ran.code == 0
    assert "everything is kept" in ran.err
    full = run("generate", models / "tiny", "--full", *short)
    assert ran.out == full.out


def test_the_chat_form_is_used_where_there_is_one(models, profiles):
    arguments = ("--prompt", prose(20), "--max-new-tokens", 2, "--json")
    used = ("generate", models / "chatty", "--full", *arguments)
    assert run(*used).json["prompt_tokens"] == 22
    assert run(*used, "--no-chat").json["prompt_tokens"] == 20
    assert run("generate", models / "tiny", "--full", *arguments).json["prompt_tokens"] == 20


def test_the_prompt_can_come_from_stdin(models, monkeypatch):
    class Stdin(io.TextIOWrapper):
        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin(io.BytesIO(prose(9).encode())))
    ran = run("generate", models / "tiny", "--full", "--max-new-tokens", 1, "--json")
    assert ran.json["prompt_tokens"] == 9


def test_another_model_of_the_same_sizes_only_when_allowed(models, profiles, folder):
    arguments = generate_arguments(models, profiles, folder)
    arguments[1] = models / "twin"
    line = refused(folder, *arguments)
    assert "tiny" in line
    assert "twin" in line
    assert "--allow-other-model" in line
    assert run(*arguments, "--allow-other-model").code == 0


def test_generate_takes_budgets_of_single_heads(models, profiles, folder):
    arguments = ["--profile", profiles / "tiny-head.json", "--prompt-file", folder / "prompt.txt"]
    ran = run("generate", models / "tiny", *arguments, "--max-new-tokens", 5, "--json")
    assert ran.code == 0, ran.err
    assert 0 < ran.json["retained_bytes"] < ran.json["full_bytes"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MODEL": "deeper"}, ["n_layers", "kvalloc profile"]),
        ({"MODEL": "mamba"}, ["Mamba"]),
        ({"MODEL": "nothing"}, ["check the path"]),
        ({"--profile": None}, ["--profile", "--full"]),
        ({"--profile": "missing.json"}, ["missing.json"]),
        ({"--profile": "cut.json"}, ["cut.json", "not readable as JSON"]),
        ({"--profile": "edited.json"}, ["edited.json", "digest"]),
        ({"--profile": "tiny.safetensors"}, ["tiny.safetensors"]),
        ({"--prompt-file": None, "--prompt": " "}, ["empty"]),
        ({"--prompt": "w1"}, ["two prompts at once"]),
        ({"--prompt-file": "nothing.txt"}, ["nothing.txt", "check the path"]),
        ({"--prompt-file": "binary.txt"}, ["binary.txt", "not text"]),
        ({"--prompt-file": "empty.txt"}, ["empty.txt", "empty"]),
        ({"--prompt-file": "long.txt"}, ["600", "512", "shorten"]),
        ({"--max-new-tokens": 450}, ["450", "512"]),
        ({"--max-new-tokens": 0}, ["--max-new-tokens"]),
        ({"--chat": True}, ["no chat form"]),
        ({"--dtype": "int4"}, ["int4"]),
    ],
)
def test_generate_refuses(models, profiles, folder, changes, words):
    (folder / "empty.txt").write_text("")
    (folder / "binary.txt").write_bytes(b"\x00\x01")
    (folder / "long.txt").write_text(prose(600))
    text = (profiles / "tiny.json").read_text()
    for name in ("tiny.json", "tiny-head.json", "tiny.safetensors"):
        (folder / name).write_bytes((profiles / name).read_bytes())
    (folder / "cut.json").write_text(text[:300])
    (folder / "edited.json").write_text(text.replace('"greedy"', '"reedy"', 1))
    options = {"MODEL": "tiny", "--profile": "tiny.json", "--prompt-file": "prompt.txt"}
    chosen = {**options, "--max-new-tokens": 5, **changes}
    arguments: list[object] = ["generate", models / chosen.pop("MODEL")]
    for name, value in chosen.items():
        if value is None:
            continue
        is_path = name in ("--profile", "--prompt-file")
        arguments += [name] if value is True else [name, folder / value if is_path else value]
    line = refused(folder, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize("command", ["profile", "generate"])
def test_without_torch_the_way_to_get_it_is_told(
    models, profiles, folder, monkeypatch, package, command
):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    arguments = {"profile": profile_arguments(models, folder),
                 "generate": generate_arguments(models, profiles, folder)}  # fmt: skip
    line = refused(folder, *arguments[command])
    assert package in line
    assert "pip install 'kvalloc[run]'" in line


def test_eval_puts_profiles_beside_the_full_cache(models, profiles, folder):
    prompts = folder / "q.jsonl"
    lines = [{"prompt": " ".join(f"w{n}" for n in range(50)), "answer": "w7"}] * 2
    prompts.write_text("\n".join(map(json.dumps, lines)))
    budgets = profiles / "tiny.json"
    ran = run("eval", models / "tiny", "--profile", budgets, "--prompts", prompts, "--json")
    assert ran.code == 0, ran.err
    full, reduced = ran.json
    assert (full["name"], reduced["name"]) == ("full", "tiny")
    assert full["kl"] == 0
    assert reduced["kl"] > 0
    assert reduced["retained_bytes"] < reduced["full_bytes"] == full["retained_bytes"]
    assert reduced["n"] == 2
    assert reduced["ci95"][0] <= reduced["kl"] <= reduced["ci95"][1]
    assert reduced["task"] == "q.jsonl"
    other = folder / "other.json"
    other.write_bytes(budgets.read_bytes())
    saved = folder / "result.json"
    shown = run(
        *("eval", models / "tiny", "--profile", other, "--profile", budgets),
        *("--prompts", prompts, "-o", saved, "--turns", 1),
    )
    assert "q.jsonl" in shown.out
    assert "KL by KL" in shown.out
    record = json.loads(saved.read_text())
    assert record["settings"]["split"] == "development"
    assert len(record["prompts"]) == 2 * 3
    twin = record["rows"][2]["paired"][1]
    assert (twin["against"], twin["kl_ratio"], twin["kl_ratio_ci95"]) == ("other", 1.0, [1.0, 1.0])


def test_eval_puts_budgets_for_each_prompt_beside_stored_ones(models, profiles, folder):
    prompts = folder / "each.jsonl"
    lines = [
        {"prompt": " ".join(f"w{n * step}" for n in range(60)), "answer": "w7"} for step in (1, 3)
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    ran = run(
        *("eval", models / "tiny", "--profile", profiles / "tiny.json", "--prompts", prompts),
        *("--adapt", 0.5, "--target-retention", 0.8, "--json"),
    )
    assert ran.code == 0, ran.err
    names = ["full", "tiny", "tiny --adapt 0.5", "--target-retention 0.8"]
    assert [row["name"] for row in ran.json] == names
    full, stored, moved, each = ran.json
    assert moved["retained_bytes"] <= stored["retained_bytes"]
    assert moved["kl"] != stored["kl"]
    assert 0 < each["retained_bytes"] < full["retained_bytes"]
    alone = run(
        *("eval", models / "tiny", "--prompts", prompts, "--target-retention", 0.8, "--json")
    )
    assert alone.code == 0, alone.err
    assert alone.json[1]["kl"] == each["kl"]
    only = ("eval", models / "tiny", "--prompts", prompts)
    assert "give one" in refused(folder, *only, "--adapt", 0.5, "--target-retention", 0.8)
    assert "retention" in refused(folder, *only, "--target-retention", 1.5)
    assert "from 0 to 1" in refused(
        folder, *only, "--profile", profiles / "tiny.json", "--adapt", 2
    )


def test_eval_writes_what_it_measured_into_the_profile(models, profiles, folder):
    prompts = folder / "q.jsonl"
    record = {"context": "w1 w2 " * 20, "input": "w3", "answers": ["w7"]}
    prompts.write_text("\n".join([json.dumps(record)] * 2))
    copy = folder / "copy.json"
    copy.write_bytes((profiles / "tiny.json").read_bytes())
    before = load_profile(copy)
    ran = run(
        *("eval", models / "tiny", "--profile", copy, "--prompts", prompts, "--json"),
        *("--question", "after", "--metric", "exact", "--into-profile"),
    )
    assert ran.code == 0, ran.err
    after = load_profile(copy)
    assert after.evaluation["settings"]["question"] == "after"
    [row] = after.evaluation["rows"]
    assert row["kl"] == ran.json[1]["kl"] > 0
    assert (after.budgets == before.budgets).all()
    assert replace(after, evaluation=None).evaluation == before.evaluation is None


def test_eval_refuses(models, profiles, folder):
    budgets = profiles / "tiny.json"
    plain = folder / "plain.jsonl"
    plain.write_text('{"prompt": "a b c"}')
    assert "nothing to evaluate" in refused(folder, "eval", models / "tiny")
    assert "no task 'ruler'" in refused(
        folder, "eval", models / "tiny", "--profile", budgets, "--tasks", "ruler"
    )
    assert "line 1 has no 'answer'" in refused(
        folder, "eval", models / "tiny", "--profile", budgets, "--prompts", plain
    )
    assert "two profiles are called tiny" in refused(
        folder, "eval", models / "tiny", "--profile", budgets, "--profile", budgets
    )
    assert "deeper" in refused(
        folder, "eval", models / "deeper", "--profile", budgets, "--tasks", "needle"
    )
    assert "--context 600 is beyond the 512 tokens" in refused(
        folder, "eval", models / "tiny", "--profile", budgets, "--tasks", "kl", "--context", 600
    )
    long = folder / "long.jsonl"
    long.write_text(json.dumps({"prompt": "w1 " * 505, "answer": "w2"}))
    line = refused(folder, "eval", models / "tiny", "--profile", budgets, "--prompts", long)
    assert "long.jsonl, line 1: a prompt of 505 tokens and its answer go beyond the 512" in line
    for flags, message in (
        (("--question", "before"), "--question before is neither inside nor after"),
        (("--split", "test"), "--split test is neither development nor held-out"),
        (
            ("--tasks", "code", "--turns", 3, "--context", 400),
            "the task code asks 1 question a prompt, not 3",
        ),
        (("--metric", "f1"), "--metric is for --prompts"),
        (("--prompts", long, "--metric", "bleu"), "no metric 'bleu'"),
        (("-o", folder / "no" / "r.json"), "no"),
    ):
        assert message in refused(folder, "eval", models / "tiny", "--profile", budgets, *flags)
