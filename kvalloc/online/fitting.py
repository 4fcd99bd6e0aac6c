"""``kvalloc.fit``: measure once what the default needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Unpack

from kvalloc.engine.contract import engine_of
from kvalloc.errors import InputError, option
from kvalloc.formats.shipped_profiles import fitted_file
from kvalloc.formats.surrogate import FittedSurrogate, SurrogatePart
from kvalloc.measure.scorer_fitting import FitOptions, fit_scorer
from kvalloc.models.loading import require_run_packages
from kvalloc.prompts.calibration import KINDS, calibration_prompts
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.units import keywords_of

EACH_KIND = 4
"""Prompts of each kind that are made where no text is given."""


@keywords_of(FitOptions)
def fit(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt] | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model_id: str | None = None,
    **options: Unpack[FitOptions],
) -> FittedSurrogate | SurrogatePart:
    """Fit to a model what the default needs of it, so that each prompt is read once.

    The file goes into kvalloc's cache folder under the digest of the weights.
    ``kvalloc.apply(model, budget=...)``, ``generate``, ``chat`` and ``eval`` take it from there.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
        A causal language model, the same afterwards; or workers, as for `kvalloc.profile`.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    texts : iterable of str, Document or Prompt, optional
        As `kvalloc.profile` takes them. By default prompts that kvalloc makes: four of each kind
        that ``kvalloc profile --loss`` measures on.
    output : str or Path, optional
        The file to write, atomically, instead of the one in the cache folder. What is finished is
        kept in ``OUTPUT.partial`` until then.
    resume : bool
        Go on with what an earlier, killed call left there; the result is bit-identical.
    progress : callable, optional
        Called with (layers done, layers in all).
    model_id : str, optional
        Instead of what the model's config says.
    **options
        See `kvalloc.measure.scorer_fitting.FitOptions`.

    Returns
    -------
    FittedSurrogate, or SurrogatePart of a shard

    Raises
    ------
    KVAllocError
        As `kvalloc.measure.scorer_fitting.fit_scorer`; or if a shard has no output.

    Examples
    --------
    >>> demo = kvalloc.load_model("demo")  # doctest: +SKIP
    >>> kvalloc.fit(demo.model, demo.tokenizer)  # doctest: +SKIP
    """
    require_run_packages()
    if output is None:
        if options.get("shard") is not None:
            raise InputError(
                f"{option('shard')} makes a part, which is put together with others by 'kvalloc "
                f"merge'; name its file with {option('output')}"
            )
        output = fitted_file(engine_of(model).facts(model_id).shape)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {output.parent} ({error.strerror}); set KVALLOC_CACHE to "
                f"one that can be written to, or name the file with {option('output')}"
            ) from error
    if texts is None:
        number = options.get("samples") or EACH_KIND * len(KINDS)
        options["samples"] = number
        context, seed = options.get("context", 1024), options.get("seed", 0)
        texts = calibration_prompts(tokenizer, number, context, seed=seed)
    return fit_scorer(
        model,
        tokenizer,
        texts,
        output=output,
        resume=resume,
        progress=progress,
        model_id=model_id,
        **options,
    )
