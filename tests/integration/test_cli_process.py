"""The command as a process: what it imports, and what becomes of it when others hang up."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

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
