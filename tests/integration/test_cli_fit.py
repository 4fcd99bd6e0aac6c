"""``kvalloc fit`` on tiny models: from an empty cache folder to prompts that are read once."""

import json
import re
import shlex

from cli_tools import generate_arguments, refused, run, succeed

from kvalloc.cli.output import ProgressBar


def test_a_fitted_model_is_found_by_itself(models, folder, fitted_here, monkeypatch):
    """Two commands, the second of which does not name the file."""
    counted = []
    monkeypatch.setattr(ProgressBar, "__call__", lambda bar, *now: counted.append(now))
    text = ("--text", folder / "text.txt", "--context", 64, "--samples", 4)
    ask = ("generate", models / "tiny", "--budget", "40%", "--prompt-file", folder / "prompt.txt")
    before = run(*ask, "--verbose").err
    assert "reads the prompt twice" in before
    assert "'kvalloc fit' once, and one read does, 1.5 times a plain prefill" in before
    said = run("fit", models / "tiny", *text)
    (prompts,) = re.findall(r"measuring takes about .* s: (\d+) prompts through 3 layers", said.err)
    assert counted == sorted(counted)
    assert counted[-1] == (int(prompts), int(prompts))
    command = shlex.split(re.findall(r"next +kvalloc (.*)", said.out)[0])
    monkeypatch.chdir(folder)
    assert "predicted loss" in run(*command).err
    (file,) = fitted_here.iterdir()
    assert str(file) in said.out
    assert file.name.startswith("tiny-")
    assert f"as solved from {file}" in run(*ask, "--verbose").err
    assert "predicted loss" in run(*ask, "--dtype", "float16").err
    assert f"fitted here: {file}" in run("list", "profiles").err
    file.write_bytes(file.read_bytes()[:-9])
    assert str(file) in refused(folder, *ask)


def test_a_fitted_file_is_named(models, profiles, folder):
    file, text = folder / "f.safetensors", ("--text", folder / "text.txt")
    fit = ("fit", models / "tiny", *text, "-o")
    said = run(*fit, file, "--context", 64, "--samples", 4, "--json").json
    assert (said["samples"], said["context_tokens"]) == (4, 64)
    assert len(said["r_squared"]) == 3
    assert said["file_bytes"] == file.stat().st_size
    picking = ("--policy", f"surrogate:file={file}", "--json")
    for more in ((), ("--decode-every", 1)):
        ran = run(*generate_arguments(models, profiles, folder), *picking, *more)
        assert ran.json["scorer"] == "surrogate"
        assert ran.json["retained_bytes"] < 0.7 * ran.json["full_bytes"]
    named = ("--budget", "40%", "--fitted", file, "--prompt-file", folder / "prompt.txt")
    assert "predicted loss" in run("generate", models / "tiny", *named).err
    tail = ("--target-loss", "0.5@99%", *named[2:])
    refused(folder, "generate", models / "tiny", *tail, words=("under 300", "leave @99% out"))
    words = (f"the fitted file {file} is for the weights of tiny", "--allow-other-model")
    refused(folder, "generate", models / "twin", *named, words=words)
    asked = folder / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "w1 w2 w3 " * 16, "answer": "w7"}))
    twin = ("eval", models / "twin", *named[:-2], "--prompts", asked)
    refused(folder, *twin, words=words)
    accepted = succeed(*twin, "--allow-other-model", "--json").json
    assert [row["name"] for row in accepted] == ["full", f"--budget 40% --fitted {file}"]
    assert "does not exist" in refused(folder, *fit, folder / "no" / "s.safetensors")
    short = ("--context", 16, "--samples", 2)
    said = refused(folder, *fit, folder / "g.safetensors", *short)
    assert "the samples have 24 tokens, and to fit" in said
