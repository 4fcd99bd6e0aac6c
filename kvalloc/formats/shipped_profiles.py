"""Any file of kvalloc by its name: a path, a file on the hub, or a shipped one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

from kvalloc.errors import InputError, ModelMismatchError, ProfileFileError, nearest
from kvalloc.files import cache_folder, near_file
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.fitted import FittedModel, FittedSurrogate
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.hub import local_file, on_hub
from kvalloc.formats.record import kind_of, require_kind
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.shape import ModelShape

F = TypeVar("F", bound=Callable[..., Any])

PACKAGE = "kvalloc.profiles"
SHIPPED: dict[type[Any], str] = {
    BudgetProfile: ".json",
    FittedModel: ".fitted.safetensors",
    FormatLosses: ".formats.safetensors",
}
"""Endings of shipped files, by kind."""

KINDS = (ScoreProfile, BudgetProfile, Evaluation)
"""Kinds of records that are read from any file."""


def shipped_profiles() -> list[str]:
    """Return the names of the budget profiles that ship with kvalloc, sorted."""
    return _shipped(BudgetProfile)


def shipped_fitted() -> list[str]:
    """Return the names of shipped fitted files, sorted."""
    return _shipped(FittedModel)


def shipped_formats() -> list[str]:
    """Return the names of shipped format profiles, sorted."""
    return _shipped(FormatLosses)


def _shipped(kind: type[Any]) -> list[str]:
    ending = SHIPPED[kind]
    names = (entry.name for entry in resources.files(PACKAGE).iterdir())
    return sorted(name.removesuffix(ending) for name in names if name.endswith(ending))


def load_profile(source: BudgetProfile | str | Path) -> BudgetProfile:
    """Load a budget profile from a file, from the hub, or a shipped one by its name.

    Parameters
    ----------
    source : BudgetProfile, str or Path
        A path, ``hf://owner/repo[@revision]/file.json``, a name in `shipped_profiles`, or a budget
        profile, which is returned.

    Raises
    ------
    InputError
        If there is no such file or name.
    ProfileFileError
        If the file is not valid.
    """
    return source if isinstance(source, BudgetProfile) else load_file(source, [BudgetProfile])


def load_scores(source: ScoreProfile | str | Path) -> ScoreProfile:
    """Load a score profile from a file, from the hub, or from a fitted file.

    Parameters
    ----------
    source : ScoreProfile, str or Path
        As of `load_profile`; a fitted file's name is such as ``"smollm2-135m-instruct"``.

    Raises
    ------
    InputError
    ProfileFileError
        As `load_profile`.
    """
    return source if isinstance(source, ScoreProfile) else load_file(source, [ScoreProfile])


def load_surrogate(source: str) -> FittedSurrogate:
    """Load the surrogate of a fitted file, or one alone."""
    fitted = _fitted_in(source, (FittedModel, FittedSurrogate))
    return fitted.surrogate if isinstance(fitted, FittedModel) else fitted


def load_fitted(source: str) -> FittedModel:
    """Load a fitted file as `load_profile`, cached while it is unchanged."""
    fitted: FittedModel = _fitted_in(source, (FittedModel,))
    return fitted


def while_unchanged(maxsize: int) -> Callable[[F], F]:
    """Cache results of a function until the file, its first argument, changes."""

    def decorate(function: F) -> F:
        @lru_cache(maxsize=maxsize)
        def remembered(changed_ns: int, *arguments: Any) -> Any:
            return function(*arguments)

        @wraps(function)
        def current(source: str, *arguments: Any) -> Any:
            changed_ns = os.stat(source).st_mtime_ns if os.path.exists(source) else 0
            return remembered(changed_ns, source, *arguments)

        return cast(F, current)

    return decorate


@while_unchanged(maxsize=16)
def _fitted_in(source: str, kinds: tuple[type[Any], ...]) -> Any:
    return load_file(source, kinds)


def load_file(source: str | Path, kinds: Sequence[type[Any]] = KINDS) -> Any:
    """Return the record of a file, here, on the hub, or shipped.

    A fitted file stands for its score profile if only that is taken.

    Raises
    ------
    InputError
    ProfileFileError
        As `load_profile`; also for another kind.
    """
    if ScoreProfile in kinds and FittedModel not in kinds:
        loaded = load_file(source, [*kinds, FittedModel])
        if not isinstance(loaded, FittedModel):
            return loaded
        ranked_by = {**loaded.scores.scorer_parameters, "file": str(source)}
        return loaded.scores.replace(scorer_parameters=ranked_by)
    if not on_hub(source) and not os.path.exists(source):
        return _load_shipped(source, kinds)
    with local_file(source) as path:
        kind = require_kind(path, kinds)
        return next((one for one in kinds if kind == one.NAME), kinds[0]).load(path)


def _load_shipped(name: str | Path, kinds: Sequence[type[Any]]) -> Any:
    name, shipped = str(name), [kind for kind in kinds if kind in SHIPPED]
    for kind in shipped:
        if name in _shipped(kind):
            with resources.as_file(resources.files(PACKAGE) / f"{name}{SHIPPED[kind]}") as file:
                return kind.load(file)
    if kind_of(name):  # the demo's name is a model
        require_kind(name, kinds)
    known = [one for kind in shipped for one in _shipped(kind)]
    raise InputError(
        f"there is no {' or '.join(kind.NAME for kind in kinds)} {name}: no such file; "
        f"{nearest(name, known) or near_file(name)}check the path; shipped ones: "
        f"{', '.join(known) or 'none'}"
    )


def fitted_folder() -> Path:
    """Return the folder of `kvalloc.fit`."""
    return cache_folder() / "fitted"


def fitted_file(shape: ModelShape) -> Path:
    """Return the path of `kvalloc.fit` for a model."""
    return fitted_folder() / f"{_name_of(shape)}.safetensors"


def formats_file(shape: ModelShape) -> Path:
    """Return the path of 'kvalloc advise' for a model's format losses."""
    return cache_folder() / "formats" / f"{_name_of(shape)}.formats.safetensors"


def find_formats(shape: ModelShape) -> str | None:
    """Return the format profile of a model, as `find_fitted` does.

    Raises
    ------
    ProfileFileError
    """
    files = [str(file) for file in [formats_file(shape)] if file.exists()]
    for source in (*files, *shipped_formats()):
        if load_file(source, [FormatLosses]).shape.has_weights_of(shape):
            return source
    return None


def _name_of(shape: ModelShape) -> str:
    name = re.sub(r"[^\w.-]", "_", shape.model_id.rstrip("/").rsplit("/", 1)[-1])
    return "-".join([name, *_weights_keys(shape)])


def fitted_files() -> list[Path]:
    """Return the files of `kvalloc.fit`, sorted."""
    return sorted(fitted_folder().glob("[!.]*.safetensors"))


def find_fitted(shape: ModelShape) -> str | None:
    """Return a model's fitted file in the cache folder, else a shipped one's name.

    Raises
    ------
    ProfileFileError
    """
    keys = _weights_keys(shape)
    by_name = [file for file in fitted_files() if any(key in file.name for key in keys)]
    for source in (*by_name, *shipped_fitted()):
        if load_fitted(str(source)).shape.has_weights_of(shape):
            return str(source)
    return None


def fitted_of_same_sizes(shape: ModelShape) -> str | None:
    """Return a valid fitted file of other weights of the same sizes."""
    return _of_same_sizes(str(fitted_folder()), shape)


@while_unchanged(maxsize=16)
def _of_same_sizes(folder: str, shape: ModelShape) -> str | None:
    for source in (*fitted_files(), *shipped_fitted()):
        with suppress(ModelMismatchError, ProfileFileError):
            load_fitted(str(source)).shape.require_same_model(shape, allow_other_model=True)
            return str(source)
    return None


def _weights_keys(shape: ModelShape) -> list[str]:
    return [digest[:16] for digest in shape.weights_digests or ()]
