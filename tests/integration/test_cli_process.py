"""The command as a process: what it imports, and what becomes of it when others hang up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from io import BytesIO, TextIOWrapper

import pytest

from kvalloc.cli.main import main

RUN = "import sys; from kvalloc.cli.main import main; code = main()"
EXIT = "sys.exit(code)"
HEAVY = ("torch", "transformers", "vl_convert", "jinja2")
OPTIMISERS = ("scipy", "ortools", "networkx")


def started(*arguments, code=f"{RUN}; {EXIT}", **options):
    """A command in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, timeout=120, check=False, **options)


LIGHT = (
    *("--help", "--version", "solve SCORES --budget 40% --json -q", "inspect SCORES -q"),
    "compare SCORES --budget 40% --solver greedy -q",
    *("list solvers", "list scorers", "list profiles"),
)
LOADED = """
import json, sys
from kvalloc.cli.main import main
for line in json.loads(sys.argv[1]):
    assert main(line) == 0, line
    loaded = {name.split(".")[0] for name in sys.modules} & {*json.loads(sys.argv[2])}
    assert not loaded, (line, loaded)
"""


def test_what_needs_no_model_loads_no_torch(scores):
    lines = [[str(scores) if word == "SCORES" else word for word in one.split()] for one in LIGHT]
    given = json.dumps(lines), json.dumps([*HEAVY, *OPTIMISERS])
    done = started(*given, code=LOADED, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_refused_request_ends_with_2_and_one_line(scores):
    asked = ("solve", scores, "--budget", "20%", "--memory", "1MiB", "--json")
    done = started(*asked, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_hangs_up_gets_no_complaint():
    read, write = os.pipe()
    os.close(read)
    done = started("list", "solvers", stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_an_encoding_lacks_is_escaped(models, profiles, folder, monkeypatch, encoding):
    """In answers, questions, tables and names of files and models, on stdout and on stderr."""
    model, profile = folder / "日本", folder / "語\udce9.json"
    shutil.copytree(models / "tiny", model)
    shutil.copy(profiles / "tiny.json", profile)
    tokenizer = model / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w', '"語'))
    way = (model, "--profile", profile, "--max-new-tokens", 3)
    lines = [
        (("generate", *way, "--prompt", "語1 語2 語3"), ("\\u8a9e",)),
        (("generate", *way, "--prompt", "語1 語2 語3", "--json"), ("\\u8a9e", "\\u65e5")),
        (("chat", *way), ("\\u8a9e",)),
        (("chat", *way, "--prompt", "語1", "--question", "語2"), ("\\u8a9e", "> \\u8a9e2")),
        (("eval", model, "--profile", profile, "--tasks", "kl", "--samples", 1, "--context", 64,
          "--answer-tokens", 4), ("\\u8a9e",)),
        (("inspect", profile), ("tiny",)),
        (("inspect", folder / "日.json"), ("error: ", "\\u65e5")),
        (("report", profile, "-o", folder / "日.html"), ("\\u65e5.html",)),
        (("report", profile, "-o", folder / "日.svg"), ("\\u65e5.svg",)),
    ]  # fmt: skip
    for words, expected in lines:
        out, err = (TextIOWrapper(BytesIO(), encoding=encoding) for _ in range(2))
        stdin = TextIOWrapper(BytesIO("語1 語2\n".encode()), encoding=encoding)
        for name, stream in (("stdout", out), ("stderr", err), ("stdin", stdin)):
            monkeypatch.setattr(sys, name, stream)
        code = main([str(word) for word in words])
        printed = ""
        for stream in (out, err):
            stream.flush()
            printed += stream.buffer.getvalue().decode(encoding)
        assert code == (2 if expected[0] == "error: " else 0), printed
        assert "語" not in printed
        assert all(word in printed for word in expected), (words, printed)


BREAKS_OFF = """
import os
import kvalloc
from kvalloc.extensions.answering import answer
from kvalloc.runtime.cache import BudgetCache
from tiny_models import tiny_model
BudgetCache.end_turn = lambda cache, write=os.write: write(2, b"computed")
def broken_off(model):
    cache = kvalloc.make_cache(model, kvalloc.load_profile(PROFILE), allow_other_model=True)
    tokens = answer(model, cache, list(range(1, 60)), ends=(), keep=True)
    next(tokens)
    raise ZeroDivisionError("ours")
broken_off(tiny_model())
"""


def test_an_answer_that_an_error_breaks_off_computes_nothing_while_python_exits(profiles):
    """Where it did, torch aborted the process."""
    done = started(
        code=BREAKS_OFF.replace("PROFILE", repr(str(profiles / "tiny.json"))),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("ZeroDivisionError: ours\n")


def test_ctrl_c_ends_a_process_with_130_and_one_line(tmp_path):
    fifo = tmp_path / "prompt.txt"
    os.mkfifo(fifo)  # reading it waits for a writer
    command = ("generate", "demo", "--budget", "100%", "--prompt-file", str(fifo))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", f"{RUN}; {EXIT}", *command], **pipes)
    writer = None
    try:
        writer = _open_when_read(fifo)
        out, err = _press_ctrl_c(process)
    finally:
        process.kill()
        if writer is not None:
            os.close(writer)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def _press_ctrl_c(process, *, presses=6):
    """What the process printed by the time it ended.

    A signal between the opening of the pipe and its reading is seen only when the read ends, which
    is never here: somebody at a keyboard would press the keys again.
    """
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"the process still runs after {presses} signals")


def _open_when_read(fifo, *, seconds=60.0):
    """The writing end of a pipe, as soon as somebody has opened the reading end."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_an_error_of_ours_keeps_its_traceback():
    code = (
        "import sys, kvalloc.cli.doctor as module\n"
        "def doctor(json: bool = False, quiet: bool = False) -> None:\n"
        "    'Fail.'\n"
        "    raise ZeroDivisionError('ours')\n"
        "module.doctor = doctor\n"
        "from kvalloc.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = started(code=code, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: ours" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="closes a file descriptor as a shell's >&- does")
@pytest.mark.parametrize("closed", [[1], [2], [1, 2]])
def test_output_that_was_closed_is_no_defect(scores, closed):
    def close():
        for number in closed:
            os.close(number)

    out, err = (None if number in closed else subprocess.PIPE for number in (1, 2))
    done = started("inspect", scores, "-q", stdout=out, stderr=err, preexec_fn=close)
    assert done.returncode == 0
    assert not done.stderr
    assert bool(done.stdout) == (1 not in closed)
