"""If it is shown, it runs: every ``python`` and ``sh`` block of README.md and docs/*.md.

The blocks of a page share one namespace and one folder, in the order of the page. Commands run in
this process, with sizes appended that make them quick. On README.md `demo` is the
demo's own model, on the other pages a tiny random one with the demo's tokenizer. A block that
cannot run here follows a comment ``<!-- not run: REASON -->``, and stands in `NOT_RUN`.
"""

import json
import re
import shlex
import sys
from functools import partial

import pytest
import torch
from cli_tools import Stdin, run
from docs_pages import PAGES, ROOT, blocks
from scorer_oracle import make_states
from tiny_models import equal_budgets, tiny_model
from transformers.cli import serve
from transformers.cli.serving.model_manager import ModelManager

import kvalloc
from kvalloc.models import loading
from kvalloc.prompts.texts import default_texts
from kvalloc.scorers import get_scorer

SIZES = {
    "profile": "--samples 2 --context 256",
    "eval": "--samples 2 --context 300 --answer-tokens 8",
    "generate": "--max-new-tokens 8",
    "chat": "--max-new-tokens 8",
    "--lengths": "--lengths 200,300",
    "fit": "--samples 2 --context 256",
}
"""What is appended to lines with these words: of an option that is given twice, the last counts."""

NOT_RUN = {
    ("README.md", "installs; CI runs every line of this page in a fresh environment"),
    ("clients.md", "a test loads the server's models and has no server"),
    ("clients.md", "these packages are in no environment of this project"),
    ("evaluating.md", "takes hours; a quick form takes minutes"),
    ("evaluating.md", "lm-eval has an environment of its own"),
    ("from_kvpress.md", "kvpress has an environment of its own, where a test runs this"),
    ("from_kvpress.md", "kvpress has an environment of its own"),
}  # fmt: skip


WITH_BLOCKS = [page for page in PAGES if any(block.reason is None for block in blocks(page))]


@pytest.fixture(scope="module")
def tiny_demo(tmp_path_factory):
    """A folder with a tiny random model that reads and writes the demo's tokens."""
    tokenizer = loading.load_model("demo").tokenizer
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 8192,
        "initializer_range": 0.1,
    }
    tiny_model(**sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_files(folder):
    """The prompts and files that pages name."""
    words = next(iter(default_texts())).text.split()[:400]
    (folder / "prompt.txt").write_text(" ".join(words), encoding="utf-8")
    (folder / "LICENSE").write_text((ROOT / "LICENSE").read_text(encoding="utf-8")[:2000])
    words.insert(100, "The special number is 4829131.")
    for name in ("context.txt", "contract.txt"):
        (folder / name).write_text(" ".join(words), encoding="utf-8")
    lines = [
        {"context": " ".join(words[at:]), "input": "Who speaks?", "answers": ["Monroe"]}
        for at in range(12)
    ]
    for name in ("q", "calibration", "hotpotqa"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")


@pytest.mark.model
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_every_block_runs(
    page, tiny_demo, tmp_path, monkeypatch,
    capsys
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Stdin("Who speaks?\n"))
    source = "demo" if page.name == "README.md" else str(tiny_demo)
    load = loading.load_model

    def load_here(name, **how):
        return load(source if name == "demo" else name, **how)

    for place in (loading, kvalloc):
        monkeypatch.setattr(place, "load_model", load_here)
    demo = loading.load_model("demo")
    write_files(tmp_path)
    names = prepare(tmp_path, demo)
    if page.name == "solvers.md":
        (tmp_path / "my_solver.py").write_text(blocks(page)[0].text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
    said = ""
    for block in blocks(page):
        if block.reason is not None:
            continue
        if block.language == "python":
            lines = "\n" * block.line + block.text  # so that a traceback names the page's line
            exec(compile(lines, str(page), "exec"), names)
        else:
            for line in block.commands():
                run_line(line, source)
        said += (last := capsys.readouterr().out)
        assert block.printed is None or last.split() == block.printed.split()
    if page.name in CHECKED:
        CHECKED[page.name](names, said)


def run_line(line, demo):
    words = shlex.split(line, comments=True)
    assert words[0] == "kvalloc", line
    arguments = [demo if word in ("demo", "MODEL") else word for word in words[1:]]
    sizes = [size for word, text in SIZES.items() if word in words for size in text.split()]
    ran = run(*arguments, *sizes)
    assert ran.code == 0, f"{line}\n{ran.err}"


def prepare(folder, demo):
    """What pages take for granted: a model, a profile, inputs, questions."""
    profile = equal_budgets(demo.model, 120, context_tokens=300)
    for name in ("p.json", "a.json", "b.json"):
        profile.save(folder / name)
    ids = torch.arange(1000, 1300)[None]
    return {
        "kvalloc": kvalloc,
        "model": demo.model,
        "tokenizer": demo.tokenizer,
        "profile": profile,
        "inputs": {"input_ids": ids, "max_new_tokens": 3},
        "document": {"input_ids": ids},
        "torch": torch,
        "question": torch.tensor([[7, 8, 9]]),
        "questions": torch.tensor([[[7, 8, 9]], [[70, 80, 90]]]),
    }


def check_readme(names, _):
    cache = names["applied"].last_cache
    # a solved share stays filled when the answer has made the text longer
    assert cache.profile.share_at(cache.get_seq_length()) <= cache.share + 1e-9 <= 0.2 + 1e-9
    assert 0.19 < cache.share <= 0.2  # with positions


def check_policies(names, _):
    made = names["EverySecond"](scorer=get_scorer("xkv", window=2))
    kept = made.keep(make_states(n_tokens=10), torch.full((1, 2), 7), sinks=1, window=2)
    assert kept[0, 1].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 6, 8, 9]


def check_running(names, said):
    first, second = said.splitlines()[-2:]
    assert first != second
    assert names["cache"].get_seq_length() == 300


CHECKED = {
    "README.md": check_readme,
    "policies.md": check_policies,
    "running.md": check_running,
}


@pytest.mark.model
def test_every_call_that_stands_for_a_press_works(tiny_demo, tmp_path):
    text = (ROOT / "docs" / "from_kvpress.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    calls = {call for row in rows for call in re.findall(r"`(apply\([^`]*\))`", row)}
    assert len(calls) >= 12
    model = loading.load_model(str(tiny_demo)).model
    ids = torch.arange(1000, 1800)[None]
    for call in sorted(calls - {'apply(fitted="s.safetensors")'}):
        applied = eval(
            call.replace("=...", '="snapkv"').replace("[...]", str([1.0] * 6)),
            {"apply": partial(kvalloc.apply, model, budget="30%")},
        )
        with applied:
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        cache = applied.last_cache
        assert cache.retained_bytes < 0.4 * cache.full_bytes, call


def test_the_models_of_a_server_are_reduced(models, monkeypatch):
    """They are loaded and asked as the server does it."""
    applied, apply = [], kvalloc.apply

    def serve_once(force_model, port):
        manager = ModelManager(force_model=force_model, device="cpu", dtype="float32")
        model = manager.load_model_and_processor(force_model)[0]
        model.generate(torch.arange(2, 82)[None], max_new_tokens=4)

    def apply_here(model, **options):
        applied.append(apply(model, **options))

    monkeypatch.setattr(ModelManager, "_load_model", ModelManager._load_model)  # put back
    monkeypatch.setattr(serve, "Serve", serve_once)
    monkeypatch.setattr(kvalloc, "apply", apply_here)
    script = next(block for page in PAGES if page.name == "clients.md" for block in blocks(page))
    exec(script.text.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(models / "tiny")), {})
    applied[0].remove()
    assert applied[0].last_cache.get_seq_length() > 80
    assert applied[0].last_cache.share <= 0.25


def test_blocks_that_do_not_run_are_these():
    result = {(page.name, block.reason) for page in PAGES for block in blocks(page)}
    assert {pair for pair in result if pair[1] is not None} == NOT_RUN


def test_the_readme_is_short_and_shows_both_commands_at_the_top():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    assert "make demo" in text[:900]
    assert "make test" in text[:900]
    snippet = next(block for block in blocks(PAGES[0]) if block.printed is not None)
    assert len([line for line in snippet.text.splitlines() if line]) <= 10


WITH_LINKS = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")})


@pytest.mark.parametrize("page", WITH_LINKS, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (page.parent / target).exists(), target
