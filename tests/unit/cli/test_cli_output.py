"""Numbers and bars for people."""

from __future__ import annotations

import io
import sys
import time

import numpy as np
import pytest
from cli_tools import Terminal
from factories import make_budget_profile, make_scores, make_shape

from kvalloc import units
from kvalloc.cli import inspect, output
from kvalloc.cli.main import main
from kvalloc.cli.progress import LINE_EVERY_SECONDS, ProgressBar, slow
from kvalloc.report.terminal import bar
from kvalloc.report.wording import tokens_for


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (units.size(0), "0 bytes"),
        (units.size(1023), "1023 bytes"),
        (units.size(1024), "1.00 KiB"),
        (units.size(150 * 1024), "150 KiB"),
        (units.size(1024**3), "1.00 GiB"),
        (units.size(5000 * 1024**3), "5000 GiB"),
        (output.duration(0.0004), "0.000 s"),
        (output.duration(9.5), "9.500 s"),
        (output.duration(59.94), "59.9 s"),
        (output.duration(61), "1 min 1 s"),
        (units.gap_text(1e-7), "<0.001%"),
        (units.gap_text(0.0328), "3.28%"),
    ],
)
def test_sizes_durations_and_gaps(written, text):
    assert written == text


def test_nan_is_never_printed_as_json():
    with pytest.raises(ValueError, match="JSON"):
        output.print_json({"x": float("nan")})


def test_bars_are_exact_to_an_eighth():
    assert bar(0.0, 8, unicode=True) == ""
    assert bar(1.0, 8, unicode=True) == "█" * 8
    assert bar(0.5 + 3 / 64, 8, unicode=True) == "████▍"
    assert bar(0.26, 8, unicode=False) == "##"


def test_a_whole_bar_is_a_round_share_not_below_the_largest():
    shares = {0.01: 0.05, 0.05: 0.05, 0.051: 0.1, 0.3: 0.5, 0.51: 1.0, 1.0: 1.0}
    assert [inspect.bar_scale(share) for share in shares] == list(shares.values())


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_the_picture_has_a_line_a_layer_and_fits(monkeypatch, width, level):
    monkeypatch.setenv("COLUMNS", str(width))
    budgets = [[10, 10], [40, 40], [20, 20]] if level == "layer" else [[10, 30], [40, 6], [5, 5]]
    lines = inspect.budget_picture(make_budget_profile(budgets, level=level))
    assert len(lines) == 4
    assert all(len(line) <= width for line in lines[1:])
    if level == "layer":
        bars = [line.count("#") for line in lines[1:]]
        assert bars[1] == max(bars)
        assert bars[1] == pytest.approx(2 * bars[2], abs=1)
    else:
        assert "6..40" in lines[2]


def test_sliding_layers_are_named_and_do_not_count_for_the_spread():
    shape = make_shape(layer_types=("sliding", "full", "sliding"), sliding_window=9)
    profile = make_budget_profile([[8, 8], [20, 20], [8, 8]], shape=shape, level="layer")
    lines = inspect.budget_picture(profile)
    assert lines[1].endswith("sliding")
    assert not lines[2].endswith("sliding")
    assert inspect.budget_spread(profile) == (20, 20.0, 20)


def test_tokens_for_a_retention_are_the_fewest_that_reach_it():
    scores = make_scores(3)
    curves = scores.contributions().sum(axis=1)
    for retention in (0.5, 0.9, 0.99):
        for layer, tokens in enumerate(tokens_for(scores, retention)):
            rank = tokens - scores.protected_tokens
            assert curves[layer, rank] >= retention - 1e-9
            assert rank == 0 or curves[layer, rank - 1] < retention


def test_tokens_for_all_of_it_and_for_sliding_layers():
    shape = make_shape(layer_types=("sliding", "full", "full"), sliding_window=9)
    scores = make_scores(1, shape=shape, curves=_with_ones(make_scores(1, shape=shape).curves))
    needed = tokens_for(scores, 1.0)
    assert needed[0] is None
    assert needed[1] <= scores.context_tokens


def _with_ones(curves):
    changed = np.array(curves)
    changed[:, 0] = 1.0
    return changed


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
    output.print_table(HEADINGS, ROWS, keys=2)
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
    output.print_table(HEADINGS, ROWS, keys=2, optional=("bytes",))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(cell in lines[1] for cell in ROWS[0])
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
@pytest.mark.parametrize(
    "words", ["frontier smollm2-135m-instruct --points 4", "inspect smollm2-135m-instruct-bits-20"]
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
    now = iter([0.0, 1.0, LINE_EVERY_SECONDS + 1, LINE_EVERY_SECONDS + 2, 200.0])
    monkeypatch.setattr("kvalloc.cli.progress.monotonic", lambda: next(now))
    with ProgressBar("measuring", unit="layers") as progress:
        for done in (0, 1, 31, 32, 100):
            progress(done, 100)
    assert log.getvalue() == "measuring: 31 of 100 layers, about 1 min 9 s left\n"


def test_quiet_shows_nothing(monkeypatch):
    terminal = in_terminal(monkeypatch)
    monkeypatch.setattr("kvalloc.cli.progress.PATIENCE_SECONDS", 0.0)
    with output.printing(quiet=True), ProgressBar("x", unit="layers") as progress, slow("x"):
        progress(1, 2)
    assert terminal.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch):
    terminal = in_terminal(monkeypatch)
    with ProgressBar("measuring", unit="layers") as progress:
        progress(1, 4)
        progress._bar.refresh()
    assert "measuring" in terminal.getvalue()
    assert "1/4 layers" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def test_a_spinner_shows_only_when_it_takes_long(monkeypatch):
    terminal = in_terminal(monkeypatch)
    with slow("soon over"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr("kvalloc.cli.progress.PATIENCE_SECONDS", 0.0)
    with slow("takes long"):
        deadline = time.monotonic() + 10
        while "takes long" not in terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "takes long" in terminal.getvalue()
