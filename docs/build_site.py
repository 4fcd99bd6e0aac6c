"""What mkdocs cannot do by itself: pages of the whole repository, notebooks, formulas, checks.

A hook of mkdocs.yml. Pages keep their place and their links, which therefore lead somewhere in the
repository and in the site. Notebooks come with the outputs that ``make notebooks`` has written to
``build/notebooks``. Formulas become MathML, which a browser draws without a script. The finished
site is read once more: it loads nothing from elsewhere, and every link and anchor is there.
"""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*.png", "docs/*.json", "profiles/README.md", "benchmarks/*.md",
         "benchmarks/studies/*.md",
         "benchmarks/quality/*.png", "benchmarks/results/*.txt")  # fmt: skip
NOTEBOOKS = ROOT / "build" / "notebooks"
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Every page and picture at its place in the repository, notebooks as pages."""
    found = [file for file in files if file.src_dir != config.docs_dir]  # the theme's
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        name = path.relative_to(ROOT).as_posix()
        found.append(File.generated(config, name, abs_src_path=str(path)))
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        executed = NOTEBOOKS / source.name
        if not executed.is_file():
            raise PluginError(f"{executed} is missing: run 'make notebooks' first")
        page = notebook_page(json.loads(executed.read_text(encoding="utf-8")))
        found.append(File.generated(config, f"notebooks/{source.stem}.md", content=page))
    return Files(found)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages."""
    return re.sub(r"(\]\([^)]*)\.ipynb\)", r"\1.md)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas in MathML."""
    return FORMULA.sub(_formula, html)


def _formula(found: re.Match[str]) -> str:
    made = convert(unescape(found[2]), display="block" if found[1] == "div" else "inline")
    if "\\" in made:
        raise PluginError(f"a command of this formula is not known: {found[2]}")
    return made


def on_post_build(config: Any) -> None:
    """Refuse a site that loads something from elsewhere, or whose links lead nowhere."""
    if found := problems(Path(config.site_dir)):
        raise PluginError("\n".join(found))


def notebook_page(notebook: dict[str, Any]) -> str:
    """An executed notebook in Markdown: its texts, its code, and what each cell put out."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += filter(None, map(_output, cell["outputs"]))
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output.get("name") == "stderr":  # warnings of other packages
        return ""
    data = output.get("data", {})
    if "image/png" in data:
        source = f"data:image/png;base64,{data['image/png'].strip()}"
        return f'<img alt="drawn by the code above" src="{source}">'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""


class _Page(HTMLParser):
    """The anchors of a page, where its links lead, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take down what one tag names."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a":
            self.links |= {values["href"]} if "href" in values else set()
        elif values.get("rel") != "canonical":
            self.loaded |= {values[name] for name in ("src", "href", "data") if name in values}


def problems(site: Path) -> list[str]:
    """What a built site loads from elsewhere, and its links and anchors that lead nowhere."""
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in files}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for link in sorted(page.loaded | page.links):
            scheme, host, target, _, anchor = urlsplit(link)
            if scheme == "data" or ((scheme or host) and link not in page.loaded):
                continue
            if scheme or host:
                found.append(f"{name} loads {link}")
                continue
            to = (path.parent / unquote(target)).resolve() if target else path
            to = to / "index.html" if to.is_dir() else to
            if not to.is_file():
                found.append(f"{name} links to {link}, which is not there")
            elif anchor and to in pages and unquote(anchor) not in pages[to].anchors:
                found.append(f"{name} links to {link}, and there is no such anchor")
    return found
