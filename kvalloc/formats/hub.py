"""Profiles and surrogates in repositories of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvalloc.errors import InputError, ProfileFileError, one_line, require

_PREFIXES = ("hf://", "https://", "http://")
HUB_TIMEOUT_SECONDS = 10.0
"""Longest wait for an answer of the hub before its cache is used."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MEANINGS = {
    "HfUriError": " names nothing on the hub; write hf://owner/repo/file.json or "
    "hf://owner/repo@revision/file.json",
    "LocalEntryNotFoundError": " is not in the local hub cache, and the hub cannot be reached or "
    "HF_HUB_OFFLINE is set; try again with a network",
    "EntryNotFoundError": ": there is no such file in that repository",
    "RevisionNotFoundError": ": the repository has no such revision",
    "GatedRepoError": ": the hub does not give it to everyone; accept its terms and log in first",
    "RepositoryNotFoundError": ": there is no such repository on the hub, or only for others; "
    "check the name, or log in with 'hf auth login'",
}
"""Meaning of the client's errors, special ones before their base classes."""


def on_hub(source: str | Path) -> str | None:
    """Return the name of a file on the hub, or None; a `Path` has lost a slash.

    Examples
    --------
    >>> on_hub(Path("hf://me/budgets/p.json")), on_hub("p.json")
    ('hf://me/budgets/p.json', None)
    """
    text = str(source)
    if text.startswith("hf:/") and not text.startswith("hf://"):
        text = text.replace("hf:/", "hf://", 1)
    return text if text.startswith(_PREFIXES) else None


@contextmanager
def local_file(source: str | Path) -> Iterator[Path]:
    """Give the local path of a file, which is fetched if it is on the hub.

    Its name is ``hf://[datasets/]owner/repo[@revision]/file``, or a page's address, and stands in
    errors inside the ``with``. Without a network, the hub's cache is used.

    Raises
    ------
    InputError
        If there is no such file, or it is not reached.
    MissingDependencyError
    """
    name = on_hub(source)
    if name is None:
        yield Path(source)
        return
    path = _fetched(name)
    try:
        yield path
    except ProfileFileError as error:
        raise ProfileFileError(
            name,
            field=error.field,
            value=error.value,
            expected=error.expected,
            way_out=error.way_out.replace(str(path), name),
        ) from error


def _fetched(name: str) -> Path:
    uri = _parsed(name)
    if not uri.path_in_repo:
        raise InputError(f"{name} is a repository; name a file in it, such as {name}/p.json")
    with _clear_errors(name):
        from huggingface_hub import (
            errors,
            get_hf_file_metadata,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )

        where = {"repo_type": uri.type, "revision": uri.revision}
        if _COMMIT.fullmatch(uri.revision or ""):  # a commit never changes: no request needed
            cached = try_to_load_from_cache(uri.id, uri.path_in_repo, **where)
            if isinstance(cached, str):
                return Path(cached)
        here = False
        try:
            url = hf_hub_url(uri.id, uri.path_in_repo, **where)
            get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
        except errors.HfHubHTTPError:
            pass  # the hub answers, and its client turns the answer into an error
        except Exception:  # nobody answers: the client would ask again for half a minute
            here = True
        return Path(hf_hub_download(uri.id, uri.path_in_repo, **where, local_files_only=here))


def _parsed(name: str) -> Any:
    with _clear_errors(name):
        from huggingface_hub import parse_hf_uri

        uri = parse_hf_uri(name)
    if uri.type not in ("model", "dataset", "space"):
        raise InputError(f"{name} is a {uri.type}, expected a repository of the hub")
    return uri


@contextmanager
def _clear_errors(name: str) -> Iterator[None]:
    require(f"{name} on the hub", "huggingface_hub", extra="hub")
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # every network library has errors of its own
        meanings = (
            text for kind, text in _MEANINGS.items() if isinstance(error, getattr(errors, kind))
        )
        raise InputError(f"{name}{next(meanings, f': the hub refuses: {one_line(error)}')}") from (
            error
        )
