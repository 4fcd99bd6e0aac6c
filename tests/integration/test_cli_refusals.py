"""Every command line that is refused: one line that says what is wrong, and no file changed.

What the library refuses is in the tests of the library; that its errors are one line, in
tests/unit/cli/test_cli_main.py. Here is what the commands themselves look at.
"""

import json
import os
import shlex

import pytest
from cli_tools import prose, refused, run
from factories import make_budget_profile, make_losses, make_scores, make_shape

import kvalloc


@pytest.fixture(scope="module")
def folder(models, profiles, tmp_path_factory):
    """Models, profiles, texts, a saved cache, and files that are none of these."""
    folder = tmp_path_factory.mktemp("refused")
    for path in (*models.iterdir(), *profiles.glob("tiny*")):
        (folder / path.name).symlink_to(path)
    for name, tokens in (("text", 1000), ("prompt", 100), ("long", 600), ("doc", 120)):
        (folder / f"{name}.txt").write_text(prose(tokens))
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "w1 " * 505, "answer": "w2"}))
    scores, other = make_scores(), make_scores(shape=make_shape(model_id="tests/other"))
    scores.save(folder / "s.safetensors")
    make_scores(1).save(folder / "a.safetensors")
    make_losses(per="layer").save(folder / "losses.safetensors")
    kvalloc.solve(scores, budget="40%").save(folder / "p.json")
    kvalloc.solve(other, budget="40%").save(folder / "other.json")
    make_budget_profile([[20, 20]] * 5).save(folder / "five.json")
    (folder / "e.json").write_text('{"kind": "kvalloc.evaluation"}')
    (folder / "cut.safetensors").write_bytes((folder / "s.safetensors").read_bytes()[:2000])
    (folder / "w.json").write_text('{"a": 1}')
    (folder / "empty").write_bytes(b"")
    (folder / "plain").write_bytes(b"plain text, and nothing else")
    reading = ("chat", folder / "tiny", "--profile", folder / "tiny.json", "--max-new-tokens", 6)
    reading = (*reading, "--prompt-file", folder / "doc.txt", "--save-cache", folder / "doc.kv")
    assert run(*reading).code == 0
    return folder


KINDS = "expected a score profile or a budget profile or an evaluation or a fitted file or a saved"
REFUSED = {
    "": {
        "sovle": "no command 'sovle' | 'solve' | kvalloc --help",
        "list solver": "'solver' is not one of 'solvers', 'scorers'",
        "list solvers -q -v": "--quiet and --verbose contradict",
        "inspect a b": "b | kvalloc inspect --help",
        "inspect retention-90": "nearest is 'smollm2-135m-instruct-retention-90'",
        "inspect a --compression-ratio 0.8": "No such option: --compression-ratio; s",
        "inspect empty": f"is empty | {KINDS} | make this one again",
        "inspect plain": KINDS,
        "inspect w.json": f"JSON of another kind, or cut short | {KINDS}",
        "inspect .": "is a folder",
        "inspect missing": "no such file; check the path | shipped ones",
        "demo -o plain": "plain is a file",
    },
    "solve": {
        "": "SCORES | kvalloc solve --help",
        "s.safetensors": "no target",
        "s.safetensors --budgt 1": "--budgt | --budget",
        "s.safetensors --solver gredy --budget 1 --json": "nearest is 'greedy'",
        "smolm2-instruct --budget 1 --json": "is 'smollm2-135m-instruct'",
        "s.safetensors --context many": "--context | integer",
        "s.safetensors --budget 20% -o q --bits 16,8.5": "expected numbers such as 16,8,4",
        "s.safetensors --budget 45% -o q --resume": "--resume goes with --measure MODEL",
        "s.safetensors --budget 45% -o q --dtype float32": "--dtype goes with --measure MODEL",
        "s.safetensors --budget 40%": "-o OUT.json",
        "s.safetensors --budget 40% -o no/such/p.json": "cannot write",
        "s.safetensors --budget 40% -o s.safetensors": "overwrite",
        "s.safetensors s.safetensors --memory 1MiB -o out": "would write s.json; rename one",
        "s.safetensors a.safetensors --budget 20% -o out": "share a memory; give --memory 2GiB",
        "s.safetensors a.safetensors --memory 1MiB": "where the budget profiles go with -o FOLDER",
        "s.safetensors a.safetensors --memory 1MiB -o w.json": "is a file; name a folder",
        "s.safetensors a.safetensors --memory 1MiB --measure demo -o out": "--measure is for one",
        "s.safetensors none.safetensors --memory 1MiB -o out": "none.safetensors",
        "p.json --budget 40% --json": "generate MODEL --profile p.json'",
        "e.json --budget 40% --json": "'kvalloc report e.json -o report.html'",
        "loses.safetensors --budget 40% --json": "the nearest is 'losses.safetensors'",
    },
    "compare": {
        "demo --budget 40%": "'kvalloc profile demo -o s.safetensors'",
        "cut.safetensors --budget 40%": "cut.safetensors",
        "s.safetensors --budget 40% --solver pyramid:delta=3": "no option 'delta'",
    },
    "frontier": {
        ".": "folder",
        "s.safetensors --points 1": "points",
        "s.safetensors --cap 0=100B": "use --cap 0=200B",
    },
    "verify": {
        "p.json missing.safetensors": "missing.safetensors",
        "other.json s.safetensors": "tests/other",
        "s.safetensors p.json": "swapped; write: kvalloc verify p.json s.safetensors",
    },
    "profile": {
        "demo": "--output | kvalloc profile --help",
        "demo --scorer snapvk -o q": "nearest is 'snapkv'",
        "demo --loss fsat -o q": "'fsat' is not one of 'measured', 'fast'",
        "tiny --text text.txt --context 513 -o q": "513 | beyond the 512",
        "tiny --text text.txt --context 64 --samples 2 --scorer reconstruction -o q":
            "reconstruction has the model read the prompt again, and here it is read once",
        "tiny --text text.txt --context 64 --samples 2 --device abacus -o q": "abacus",
        "tiny --text long.jsonl -o q": "--prompts",
        "tiny --text text.txt --tasks needle -o q": "--tasks | text or prompts are given",
        "tiny --tasks kl --lengths 9,x -o q": "--lengths is '9,x', expected numbers",
        "tiny --tasks kl --context 64 --lengths 100000 -o q": "--lengths | --context",
        "tiny --text text.txt --question-at after -o q": "--question-at | add --tasks",
        "x -o q --engine dask": "'dask' is not one of 'local', 'ray'",
        "x -o q --address auto": "--address goes with --engine ray",
        "x -o q --workers 2": "--workers goes with --engine ray",
    },
    "generate": {
        "dmeo --budget 100% --prompt x": "nearest is 'demo'",
        "demo --policy tvoa --budget 20% --prompt x": "nearest is 'tova'",
        "demo --profile loss20 --prompt x": "shipped ones: smollm2",
        "demo --budget 100% --prompt x --temperature 0": "is 0, expected a number above 0",
        "demo --compression-ratio 0.8": "name the | stays: --budget 20%; see",
        "demo --compression-ratio=0.65": "stays: --budget 35%; see",
        "demo --compression-ratio": "stays: --budget 20%; see",
        "p.json --budget 100% --prompt w1": "a budget profile, and a model is wanted",
        "mamba --profile tiny.json --prompt w1": "Mamba",
        "./nothing --profile tiny.json --prompt w1": "check the path",
        "twin --profile tiny.json --prompt w1": "tiny | twin | --allow-other-model",
        "deeper --profile tiny.json --prompt w1": "n_layers | kvalloc profile",
        "tiny --prompt w1": "--profile | --budget 20%",
        "tiny --profile missing.json --prompt w1": "missing.json",
        "tiny --profile tiny.json --prompt w1 --prompt-file prompt.txt": "two prompts at once",
        "tiny --profile tiny.json --prompt-file nothing.txt": "nothing.txt | check the path",
        "tiny --profile tiny.json --prompt-file empty": "empty",
        "tiny --profile tiny.json --prompt-file long.txt": "600 | 512 | shorten",
        "tiny --profile tiny.json --prompt-file prompt.txt --max-new-tokens 450": "450 | 512",
        "tiny --profile tiny.json --prompt w1 --chat": "no chat form",
        "tiny --profile tiny.json --prompt w1 --dtype int4": "int4",
        "tiny --memory 1KiB --prompt-file prompt.txt": "--memory 1KiB | one layer in full",
        os.fsdecode(b"tiny --budget 100% --prompt caf\xe9"):
            "is not UTF-8 text (byte 3 cannot be read); convert it to UTF-8",
    },
    "eval": {
        "tiny": "nothing to evaluate",
        "demo --tasks nedle --budget 20%": "nearest is 'needle'",
        "demo --scorer snapkv": "--scorer says how a target is decided",
        "tiny --profile tiny.json --profile tiny.json": "two profiles are called tiny",
        "tiny --profile tiny.json --tasks kl --context 600": "ask for a shorter --context",
        "tiny --profile tiny.json --prompts long.jsonl":
            "line 1: a prompt of 505 tokens and its answer go beyond the 512",
        "tiny --plain-bits 4,x": "--plain-bits is '4,x', expected numbers",
        "tiny --budget 20% --metric f1": "--metric is for --prompts",
        "tiny --budget 20% -o no/r.json": "no",
    },
    "chat": {
        "tiny --profile tiny.json --prompt-file doc.txt --question ''": "question 1 is empty",
        "tiny --profile tiny.json --prompt-file doc.txt --question w1 --question ''":
            "question 2 is empty",
        "tiny --profile tiny.json --prompt-file doc.txt --question w1 --max-new-tokens 400":
            "leave no room | 512",
        "tiny --profile tiny.json --prompt-file doc.txt --save-cache none/x.kv": "none",
        "tiny --profile tiny.json --prompt-file doc.txt --recompute 5% --question w1":
            "--recompute | --document",
        os.fsdecode(b"tiny --budget 100% --prompt w1 --question caf\xe9"): "is not UTF-8 text",
        "demo --cache p.json": "expected a cache written with",
        "twin --cache doc.kv --question w1": "other weights | --allow-other-model",
        "deeper --cache doc.kv --question w1 --allow-other-model": "n_layers",
        "tiny --cache none.kv --question w1": "none.kv | missing | written with --save-cache",
        "tiny --cache doc.kv --question w1 --dtype bfloat16":
            "holds float32 entries | leave out --dtype",
        "tiny --cache doc.kv --question w1 --budget 20%": "--budget | when it was saved",
        "tiny --cache doc.kv --question w1 --max-new-tokens 500": "tokens to read leave no room",
        f"tiny --cache doc.kv --question '{'w5 ' * 400}'": "no room",
        "tiny --document doc.kv --question w1 --budget 20%": "--budget | when it was saved",
        "tiny --document doc.kv --question w1 --cache doc.kv": "--cache | each with --document",
        "tiny --document none.kv --question w1": "none.kv | missing",
        "tiny --document doc.kv --question w1 --recompute 2": "2",
        "tiny --document doc.kv --question w1 --max-new-tokens 500": "no room",
    },
    "export": {
        "p.json --to csw": "the nearest is 'csv'",
        "p.json --to csv": "name it with -o, such as -o out.csv",
        "p.json --to vllm -o v --accept bits": "there is no loss to accept 'bits'",
        "p.json --to csv -o none/t.csv": "the folder none does not exist",
        "losses.safetensors --to vllm -o v": "with --to csv or --to parquet",
    },
    "report": {
        "s.safetensors -o x.png --what budgets": "nothing to draw as budgets",
        "s.safetensors -o x.png --what budgts": "'budgts' | 'budgets', 'curves'",
        "s.safetensors -o x.gif": "another ending than .png and .svg",
        "s.safetensors -o none/x.png": "does not exist",
        "p.json five.json -o r.html": "p.json and | five.json | 3 layers | 5 layers",
        "plain -o r.html": "none of kvalloc's | a score profile or a budget profile",
        "nowhere.json -o r.html": "nowhere.json: no such file | check the path",
        "p.json -o none/r.html": "does not exist",
        "p.json -o p.json": "another ending than .png | .html",
    },
}  # fmt: skip
"""By command: what is typed after it, and words of the refusal."""


@pytest.mark.parametrize(
    ("typed", "words"),
    [(f"{name} {line}", words) for name, rows in REFUSED.items() for line, words in rows.items()],
)
def test_a_wrong_command_line_is_one_line(folder, monkeypatch, typed, words):
    monkeypatch.chdir(folder)
    refused(folder, *shlex.split(typed), words=words.split(" | "))
