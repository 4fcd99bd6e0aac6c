"""Tables, notes and bars of progress, in a terminal and in a pipe."""

import io
import sys
import time

import pytest
from cli_tools import Terminal

from kvalloc.cli import output
from kvalloc.cli.main import main
from kvalloc.cli.output import LINE_EVERY_SECONDS, ProgressBar
from kvalloc.report.terminal import table_text


def test_nan_is_never_printed_as_json():
    as_json = output.printing(output.Printing(json=True))
    with as_json, pytest.raises(ValueError, match="JSON"):
        output.print_result({"x": float("nan")})


def in_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    return terminal


HEADINGS = ("task", "cache", "bytes", "of 16 bits", "KL", "n")
ROWS = [("needle", "--budget 20%", "1.18 MiB", "20.0%", "0.0123", "6"), ("kl", "full", *"1234")]


@pytest.mark.parametrize("width", [30, 40, 200])
def test_a_table_fits_a_terminal_with_every_column(monkeypatch, width):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    print(table_text(HEADINGS, ROWS, keys=2))
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    blocks = terminal.getvalue().split("\n\n")
    assert (len(blocks) > 1) == (width < 60)
    for heading in HEADINGS[:2]:
        assert sum(heading in line for line in lines) == len(blocks)  # a row is named again
    for column in HEADINGS[2:], *(row[2:] for row in ROWS):
        assert all(cell in terminal.getvalue() for cell in column)


def test_a_table_in_a_pipe_has_a_line_a_row_whatever_its_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "30")
    print(table_text(HEADINGS, ROWS, keys=2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(cell in lines[1] for cell in ROWS[0])
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
@pytest.mark.parametrize(
    "words",
    ["frontier smollm2-135m-instruct --points 4", "inspect smollm2-135m-instruct-retention-90"],
)
def test_pictures_are_plain_in_a_pipe_and_fit_a_terminal(monkeypatch, words, stream):
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("COLUMNS", "80")
    stream.seek(stream.truncate(0))
    assert main(words.split()) == 0
    text = stream.getvalue()
    assert text.isascii() == (not stream.isatty())
    if stream.isatty():
        assert max(map(len, text.splitlines())) <= 80


def test_a_note_is_wrapped_in_a_terminal_alone(monkeypatch):
    for stream, expected in ((Terminal(), 2), (io.StringIO(), 1)):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", "40")
        output.note("predicted loss is a sum of single-unit measurements: each alone, not together")
        assert stream.getvalue().count("\n") == expected


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    now = iter([0.0, 0.0, 1.0, LINE_EVERY_SECONDS + 1, LINE_EVERY_SECONDS + 2, 200.0, 201.0])
    monkeypatch.setattr("kvalloc.cli.output.monotonic", lambda: next(now))
    with ProgressBar("measuring", unit="layers") as progress:
        for done in (0, 1, 31, 32, 100):
            progress(done, 100)
    assert log.getvalue() == "measuring: 31 of 100 layers, about 0:01:09 left\n"


def wait_for(terminal, text):
    deadline = time.monotonic() + 10
    while text not in terminal.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text in terminal.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left_unless_quiet(monkeypatch):
    terminal = in_terminal(monkeypatch)
    monkeypatch.setattr("kvalloc.cli.output.PATIENCE_SECONDS", 0.0)
    with (
        output.printing(output.Printing(quiet=True)),
        ProgressBar("x", unit="layers") as progress,
    ):
        progress(1, 2)
    assert terminal.getvalue() == ""
    with ProgressBar("measuring", unit="layers") as progress:
        wait_for(terminal, "measuring")
        progress(1, 4)
        wait_for(terminal, "1/4 layers")
        wait_for(terminal, "left")


def test_a_spinner_shows_only_when_it_takes_long(monkeypatch):
    terminal = in_terminal(monkeypatch)
    with ProgressBar("soon over"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr("kvalloc.cli.output.PATIENCE_SECONDS", 0.0)
    with ProgressBar("takes long"):
        wait_for(terminal, "takes long")
