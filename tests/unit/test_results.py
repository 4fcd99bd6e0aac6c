"""RESULTS.md is made from benchmarks/results/, by the code that makes it for new runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from results import BENCHMARKS, FOLDER, RESULTS, Record, parts_of, raw_file, results_page, rows_of

PARTS = [(name, key) for name, benchmark in BENCHMARKS.items() for key in benchmark.parts]


def test_the_page_is_what_the_files_give() -> None:
    assert results_page() == RESULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "key"), PARTS)
def test_every_part_has_a_script_and_rows(name: str, key: str) -> None:
    part = BENCHMARKS[name].parts[key]
    assert (
        part.command.startswith("-m pytest ") or (FOLDER.parent / part.command.split()[0]).is_file()
    )
    if not raw_file(name, key).exists():
        return  # nobody has run it yet
    rows = list(rows_of(part, Record.load(raw_file(name, key)).printed))
    assert rows
    assert any(row["what"].startswith(part.headline) for row in rows)


def test_a_record_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("results.RAW", tmp_path)
    for code, printed in ((0, "a: 1.5 [1, 2]"), (1, "  first\n\nexit code 7 is no end\n  last")):
        record = Record("python x.py", "2026-11-21: a machine", printed, code)
        record.save("solvers", "scale")
        assert Record.load(tmp_path / "solvers-scale.txt") == record


def test_a_call_names_a_benchmark_a_part_and_options() -> None:
    assert parts_of(["solvers", "scale", "--quick"]) == ("solvers", ["scale"], ["--quick"])
    name, parts, options = parts_of(["quality", "--shares", "20"])
    assert (name, parts, options) == ("quality", ["peers"], ["--shares", "20"])
