"""``kvalloc push``: a profile or fitted file to a repository of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.units import Option


@takes()
def push(file: Path, repo: str, *, private: Annotated[bool, Option()] = False) -> None:
    """Upload a budget profile, a score profile or a fitted file to the hub.

    The file is checked first. The token of 'hf auth login' is used.

    Parameters
    ----------
    file : Path
        What is uploaded.
    repo : str
        owner/repo, or hf://owner/repo/NAME for another name there; made if there is none.
    private : bool
        Make a new repository private.

    Examples
    --------
    kvalloc push p.json me/budgets
    kvalloc push p.json hf://datasets/me/budgets/llama/p.json --private
    kvalloc inspect hf://me/budgets/p.json
    """
    from kvalloc.formats.hub import push as upload

    where = upload(file, repo, private=private)
    print_result({"source": where}, {"uploaded": where})
