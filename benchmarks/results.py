"""What benchmarks printed, kept in results/, and the tables of RESULTS.md that are read from it.

`parts.toml` says what the benchmarks are and which printed lines are the rows of their tables.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
RESULTS, RAW = FOLDER / "RESULTS.md", FOLDER / "results"

NUMBER = r"[-+]?[\d,]*\.?\d+(?:e-?\d+)?%?"
PATTERNS = {
    "FIGURE": rf"(?P<figure>{NUMBER})",
    "SPREAD": rf"\[(?P<low>{NUMBER})(?:, |\.\.)(?P<high>{NUMBER})\]",
    "WANTED": r"(?: \((?:target )?(?P<wanted>[^)]+)\))?",
    "JUDGED": r" \(wanted (?P<wanted>[^)]+)\) (?P<verdict>met|MISSED)",
    "NUMBER": NUMBER,
}
PATTERNS["ROW"] = (
    "(?P<what>.+?): {FIGURE}(?: (?P<unit>[a-zA-Z%]+))?(?: {SPREAD})?(?:{JUDGED})?; (?P<note>.*)"
).format_map(PATTERNS)
"""A line as `_common.describe` writes it: the rows of a part that says nothing else."""

HEADING = """# Results

Made by `python benchmarks/record.py` from what the benchmarks print; not edited by hand. Every
part names its command, machine, versions and date, and links what was printed. Compared things ran
side by side in one process or in turns, so trust the ratios; seconds are one machine's on one day.
The load is the machine's average of one minute before or after, whichever is larger.
"""


@dataclass(frozen=True)
class Part:
    """One call of a benchmark, as parts.toml describes it."""

    title: str
    command: str
    rows: tuple[str, ...] = ("@ROW@",)
    context: str = ""
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


@dataclass(frozen=True)
class Record:
    """One call of a benchmark and what it printed."""

    command: str
    where: str
    printed: str
    exit_code: int

    def save(self, benchmark: str, part: str) -> None:
        """Write the record into results/."""
        end = "" if not self.exit_code else f"\nexit code {self.exit_code}\n"
        RAW.mkdir(exist_ok=True)
        text = f"$ {self.command}\n{self.where}\n\n{self.printed}\n{end}"
        raw_file(benchmark, part).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a file of results/."""
        command, where, _, printed = path.read_text(encoding="utf-8").split("\n", 3)
        ended = re.search(r"\n\nexit code (\d+)\n$", printed)
        printed = printed[: ended.start()] if ended else printed
        code = int(ended[1]) if ended else 0
        return cls(command.removeprefix("$ "), where, printed.strip("\n"), code)


def raw_file(benchmark: str, part: str) -> Path:
    """Return the file of what a part printed."""
    return RAW / f"{benchmark}-{part}.txt"


def parts_of(words: list[str]) -> tuple[str, list[str], list[str]]:
    """Split a call of record.py into the benchmark, its parts and their options."""
    benchmark, *options = words
    parts = list(BENCHMARKS[benchmark].parts)
    if options and options[0] in parts:
        return benchmark, options[:1], options[1:]
    return benchmark, parts, options


def in_full(name: re.Match[str]) -> str:
    """Return the pattern that a name in parts.toml stands for."""
    return PATTERNS[name[1]]


def rows_of(part: Part, printed: str) -> Iterator[dict[str, str]]:
    """Return what each matching line says, by the names of the groups."""
    before = ""
    for line in printed.splitlines():
        if part.context and (found := re.fullmatch(part.context, line)):
            before = f"{found['what']}: "
            continue
        for pattern in part.rows:
            if found := re.fullmatch(re.sub(r"@(\w+)@", in_full, pattern), line):
                row = {name: text.strip() for name, text in found.groupdict().items() if text}
                row = verdict_of(row) | row
                yield {**row, "what": re.sub(" +", " ", before + row["what"])}
                break


def verdict_of(row: dict[str, str]) -> dict[str, str]:
    """Return whether a figure is within its limit, for lines that state a limit and no verdict."""
    limit = re.fullmatch(rf"(?:at most |<= )?({NUMBER})", row.get("wanted", ""))
    if limit is None:
        return {}
    figure, most = (float(number.replace(",", "")) for number in (row["figure"], limit[1]))
    return {"verdict": "met" if figure <= most else "MISSED"}


def table_of(part: Part, rows: list[dict[str, str]]) -> str:
    """Return a part's table in Markdown; columns that no row fills are left out."""
    columns = {"what": "what", "figure": part.figure, "unit": "unit", "low": part.spread}
    columns |= {"wanted": "wanted", "verdict": "verdict"}
    others = dict.fromkeys(name for row in rows for name in row if name not in {*columns, "note"})
    columns |= {name: name.replace("_", " ") for name in others if name != "high"}
    columns |= {"note": "note"}
    filled = {name: head for name, head in columns.items() if any(name in row for row in rows)}
    lines = [f"| {' | '.join(filled.values())} |", "|---" * len(filled) + "|"]
    for row in rows:
        cells = {**row, "low": spread_of(row)}
        shown = (cells.get(name, "").replace("|", "\\|") for name in filled)
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def spread_of(row: dict[str, str]) -> str:
    """Return the two numbers beside a figure, or nothing."""
    return f"{row['low']} to {row['high']}" if "low" in row else ""


def in_words(row: dict[str, str]) -> str:
    """Return what a row says, without its note."""
    spread = f" ({spread_of(row)})" if "low" in row else ""
    unit = f" {row['unit']}" if "unit" in row else ""
    return f"{row['what']}: {row['figure']}{unit}{spread}"


def section_of(name: str, key: str, record: Record) -> tuple[str, list[str], str]:
    """Return a part's line of the summary, the targets that it missed, and its section."""
    part, file = BENCHMARKS[name].parts[key], raw_file(name, key).name
    rows = list(rows_of(part, record.printed))
    judged = [row for row in rows if "verdict" in row]
    missed = [row for row in judged if row["verdict"] == "MISSED"]
    main = next((in_words(row) for row in rows if row["what"].startswith(part.headline)), "")
    targets = f"{len(judged) - len(missed)} of {len(judged)}" if judged else ""
    link, date = f"[{name}: {key}](#{name}-{key})", record.where.partition(":")[0]
    return (
        f"| {link} | {part.title} | {main} | {targets} | {date} |",
        [f"- {link}: {in_words(row)}, wanted {row['wanted']}" for row in missed],
        f"### {name}: {key}\n\n{part.title} ([all that it printed](results/{file})).\n\n"
        f"{table_of(part, rows)}\n\n`{record.command}`; {record.where}\n",
    )


def results_page() -> str:
    """Return RESULTS.md: a summary, the targets that are missed, then each benchmark's tables."""
    lines = ["| part | what is measured | main row | targets met | date |", "|---|---|---|---|---|"]
    missed, sections = [], []
    for name, benchmark in BENCHMARKS.items():
        recorded = [key for key in benchmark.parts if raw_file(name, key).exists()]
        if recorded:
            sections.append(f"## {name}\n\n{benchmark.title}.\n")
        for key in recorded:
            line, those, section = section_of(name, key, Record.load(raw_file(name, key)))
            lines.append(line)
            missed += those
            sections.append(section)
    summary = "\n".join([*lines, "", "Targets missed:", "", *missed])
    return f"{HEADING}\n## Summary\n\n{summary}\n\n" + "\n".join(sections)
