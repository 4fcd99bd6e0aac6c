"""Rows of benchmarks, stored in results.jsonl, and RESULTS.md, which is made from them.

`parts.toml` says what the benchmarks are. A benchmark prints each row as one line of JSON, and
other lines for people.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

Cells: TypeAlias = dict[str, str]
"""A row: what was measured, its figure, unit, spread, what was wanted, whether it was met, a note,
and columns of its own."""

FOLDER = Path(__file__).parent
RESULTS, DATA, PRINTED = FOLDER / "RESULTS.md", FOLDER / "results.jsonl", FOLDER / "results"

HEADING = """# Results

Made by `python benchmarks/record.py` from `results.jsonl`; not edited by hand. Every
part names its command, machine, versions and date, and links what was printed. Compared things ran
side by side in one process or in turns, so trust the ratios; seconds are one machine's on one day.
The load is the machine's average of one minute before or after, whichever is larger.
"""


@dataclass(frozen=True)
class Part:
    """One call of a benchmark, as parts.toml describes it.

    Attributes
    ----------
    title : str
    command : str
        Empty if the script was removed: the last record stays.
    figure, spread : str
        Headings of columns.
    headline : str
        How the row of the summary begins.
    """

    title: str
    command: str = ""
    figure: str = "ratio"
    spread: str = "quartiles of the rounds"
    headline: str = ""


@dataclass(frozen=True)
class Benchmark:
    """A section of RESULTS.md."""

    title: str
    parts: dict[str, Part]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Benchmark:
        """Return the benchmark that a table of parts.toml describes."""
        return cls(record["title"], {key: Part(**part) for key, part in record["parts"].items()})


BENCHMARKS = {
    name: Benchmark.of(record)
    for name, record in tomllib.loads((FOLDER / "parts.toml").read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """One call of a part: a line of results.jsonl.

    Attributes
    ----------
    benchmark, part, command, date, machine : str
    versions : dict
        Package to version.
    exit_code : int
    rows : list of Cells
    script_removed : bool
        Whether the script of the command is in the tree no more.
    """

    benchmark: str
    part: str
    command: str
    date: str
    machine: str
    versions: dict[str, str]
    exit_code: int
    rows: list[Cells]
    script_removed: bool = False

    @property
    def where(self) -> str:
        """When and where it ran, in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.date}: {self.machine}; {versions}"

    def save(self, printed: str) -> None:
        """Write the record in the place of the part's last one, and what it printed."""
        records = {**load_records(), (self.benchmark, self.part): self}
        lines = [json.dumps(asdict(one), ensure_ascii=False) for one in records.values()]
        DATA.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        PRINTED.mkdir(exist_ok=True)
        file = PRINTED / f"{self.benchmark}-{self.part}.txt"
        file.write_text(f"$ {self.command}\n{self.where}\n\n{printed}\n", encoding="utf-8")


def load_records() -> dict[tuple[str, str], Record]:
    """Return the latest record of each part that was ever run, by benchmark and part."""
    lines = DATA.read_text(encoding="utf-8").splitlines() if DATA.exists() else []
    records = [Record(**json.loads(line)) for line in lines]
    return {(one.benchmark, one.part): one for one in records}


def rows_in(printed: str) -> list[Cells]:
    """Return the rows among printed lines."""
    return [json.loads(line) for line in printed.splitlines() if line.startswith('{"what": ')]


def parts_of(words: list[str]) -> tuple[str, list[str], list[str]]:
    """Split a call of record.py into the benchmark, its parts and their options."""
    benchmark, *options = words
    parts = BENCHMARKS[benchmark].parts
    if options and options[0] in parts:
        return benchmark, options[:1], options[1:]
    return benchmark, [key for key, part in parts.items() if part.command], options


def table_of(part: Part, rows: list[Cells]) -> str:
    """Return a part's table in Markdown; columns that no row fills are left out."""
    columns = {"what": "what", "figure": part.figure, "unit": "unit", "low": part.spread}
    columns |= {"wanted": "wanted", "verdict": "verdict"}
    remaining = dict.fromkeys(
        name for row in rows for name in row if name not in {*columns, "note"}
    )
    columns |= {name: name.replace("_", " ") for name in remaining if name != "high"}
    columns |= {"note": "note"}
    filled = {name: head for name, head in columns.items() if any(name in row for row in rows)}
    lines = [f"| {' | '.join(filled.values())} |", "|---" * len(filled) + "|"]
    for row in rows:
        cells = {**row, "low": spread_of(row)}
        shown = (cells.get(name, "").replace("|", "\\|") for name in filled)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def spread_of(row: Cells) -> str:
    """Return the two numbers beside a figure, or nothing."""
    return f"{row['low']} to {row['high']}" if "low" in row else ""


def in_words(row: Cells) -> str:
    """Return what a row says, without its note."""
    spread = f" ({spread_of(row)})" if "low" in row else ""
    unit = f" {row['unit']}" if "unit" in row else ""
    return f"{row['what']}: {row['figure']}{unit}{spread}"


def section_of(record: Record) -> tuple[str, list[str], str]:
    """Return a part's line of the summary, the targets that it missed, and its section."""
    name, key, rows = record.benchmark, record.part, record.rows
    part = BENCHMARKS[name].parts[key]
    judged = [row for row in rows if "verdict" in row]
    missed = [row for row in judged if row["verdict"] == "MISSED"]
    main = next((in_words(row) for row in rows if row["what"].startswith(part.headline)), "")
    targets = f"{len(judged) - len(missed)} of {len(judged)}" if judged else ""
    link = f"[{name}: {key}](#{name}-{key})"
    removed = " (script removed)" if record.script_removed else ""
    return (
        f"| {link} | {part.title} | {main} | {targets} | {record.date} |",
        [f"- {link}: {in_words(row)}, wanted {row['wanted']}" for row in missed],
        f"### {name}: {key}\n\n{part.title} ([all that it printed](results/{name}-{key}.txt)).\n\n"
        f"{table_of(part, rows)}\n\n`{record.command}`{removed}; {record.where}\n",
    )


def results_page() -> str:
    """Return RESULTS.md: a summary, the targets that are missed, then each benchmark's tables."""
    lines = ["| part | what is measured | main row | targets met | date |", "|---|---|---|---|---|"]
    missed, sections, records = [], [], load_records()
    for name, benchmark in BENCHMARKS.items():
        recorded = [records[name, key] for key in benchmark.parts if (name, key) in records]
        if recorded:
            sections.append(f"## {name}\n\n{benchmark.title}.\n")
        for record in recorded:
            line, those, section = section_of(record)
            lines.append(line)
            missed += those
            sections.append(section)
    summary = "\n".join([*lines, "", "Targets missed:", "", *missed])
    return f"{HEADING}\n## Summary\n\n{summary}\n\n" + "\n".join(sections)
