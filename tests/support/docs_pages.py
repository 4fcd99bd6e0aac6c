"""The pages of the documentation and their fenced blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]*) -->\n)?^```(?P<language>python|sh)\n(?P<text>.*?)^```"
    r"(?:\n\n```text\n(?P<printed>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A block of ``python`` or ``sh``, the line before it, and why it does not run, if so.

    What it prints, if that stands below, is broken into lines that fit the page.
    """

    line: int
    language: str
    text: str
    reason: str | None
    printed: str | None

    def commands(self) -> list[str]:
        """The commands of a block of ``sh``, one a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Every block of a page in its order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            line=text[: found.start("text")].count("\n"),
            language=found["language"],
            text=found["text"],
            reason=found["reason"],
            printed=found["printed"],
        )
        for found in _BLOCK.finditer(text)
    ]
