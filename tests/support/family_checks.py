"""What is checked of a model of any family: each result against the plain model, or the oracle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from hidden_entries import Twin, full_layers
from named_models import CAUSAL, NotAlone, named_model
from tiny_models import WordTokenizer

import kvalloc
from kvalloc.engine.contract import engine_of
from kvalloc.errors import KVAllocError, UnsupportedRequestError, one_line
from kvalloc.models import names
from kvalloc.online.fitting import _check_rotation

TOKENS, PADDING, TOLERANCE, SHARE = 160, 30, 1e-4, 0.3
SCORER = "snapkv:window=16"
DECIDED = {"budget": f"{SHARE:.0%}", "scorer": SCORER, "solver": "uniform"}
"""At 16 bits: the oracle rounds to nothing else."""

UNSAID = " (without the class, a way out, or in several lines)"
FIELDS = ("class", "outcome", "layers", "fit", "note")
KINDS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "DynamicIndexedLayer": "indexed",
    "LinearAttentionLayer": "linear",
    "LinearAttentionAndFullAttentionLayer": "linear and full",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear and sliding",
    "DummyLayer": "no entries of its own",
}
"""By class of the layers of a plain cache."""


class Wrong(Exception):
    """A result that is not what it must be, and nobody says so."""


def check(name: str, mapping: Mapping[str, str] = CAUSAL) -> dict[str, str]:
    """Return class, outcome, layers, fit and note of a model.

    The outcome is served, refused, wrong, crashes or not tried. Fit is "yes", or why `kvalloc.fit`
    refuses the model.
    """
    row = dict.fromkeys(FIELDS, "")
    try:
        model = named_model(name, mapping)
        row["class"] = type(model).__name__
        plain = _written(model, _prompt())
    except Exception as error:
        not_tried = row | {"outcome": "not tried", "note": _line(error)}
        if not row["class"]:
            return not_tried
        outcome, note = _outcome(partial(kvalloc.apply, model, budget=SHARE), row["class"])
        return row | {"outcome": outcome, "note": note} if outcome == "refused" else not_tried
    row["layers"] = _kinds(model, names.cache_among(plain))
    results, settings = list[tuple[str, str]](), dict(DECIDED)
    for step in (partial(_equal_to_plain, model, plain), partial(_default, model)):
        outcome, note = _outcome(step, row["class"])
        if outcome == "refused":
            return row | {"outcome": outcome, "note": note}
        results.append((outcome, note))
    for check_of in (_choose, _reduced, _turns, _padded):
        results.append(_outcome(partial(check_of, model, settings), row["class"]))
    fitted, why = _outcome(partial(_fitted, model), "")
    results.append((fitted, why if fitted == "crashes" else ""))
    bad = [one for one, _ in results if one in ("wrong", "crashes")]
    return row | {
        "outcome": bad[0] if bad else "served",
        "note": "; ".join(dict.fromkeys(note for _, note in results if note)),
        "fit": "yes" if fitted == "served" else why,
    }


def _outcome(step: Callable[[], None], model_class: str) -> tuple[str, str]:
    """Return the outcome of a step and a note, which is empty if all is well."""
    try:
        step()
    except KVAllocError as error:
        text = str(error)
        said = re.split("For|With|LMHead", model_class)[0] in text and "; " in text
        return "refused", _line(error) + ("" if said and "\n" not in text else UNSAID)
    except Wrong as error:
        return "wrong", str(error)
    except Exception as error:
        return "crashes", _line(error)
    return "served", ""


def _equal_to_plain(model: Any, plain: Any) -> None:
    with kvalloc.apply(model, budget="100%"):
        found = _written(model, _prompt())
    off = float((torch.stack(found.logits) - torch.stack(plain.logits)).abs().max())
    if not off <= TOLERANCE:
        raise Wrong(f"at 100% logits differ by {off:.2g}")


def _default(model: Any) -> None:
    """Reduce a prompt by default, in ``generate()`` and in a forward that makes a cache."""
    with torch.no_grad(), kvalloc.apply(model, budget=SHARE) as applied:
        _written(model, _prompt())
        _require_share(applied.last_cache, "by default")
        model(input_ids=_prompt(), use_cache=True)
        _require_share(applied.last_cache, "by default, in a forward,")


def _choose(model: Any, settings: dict[str, Any]) -> None:
    """Take stored budgets if the decoder gets embeddings."""
    try:
        with kvalloc.apply(model, **settings):
            _written(model, _prompt(), 1)
    except UnsupportedRequestError:
        texts = [" ".join(f"w{i * j % 97}" for j in range(400)) for i in (3, 5)]
        how: dict[str, Any] = {"context": TOKENS, "samples": 2, "scorer": SCORER}
        scores = kvalloc.profile(model, WordTokenizer(), texts, **how)
        settings.clear()
        settings["profile"] = kvalloc.solve(scores, budget=SHARE, solver="uniform")


def _reduced(model: Any, settings: dict[str, Any]) -> None:
    """Hold tokens after a reduced prompt, several at once and single ones, against the oracle."""
    with _watched(model, settings, "after a prompt") as (applied, twin):
        _written(model, _prompt(), 1)
        cache = applied.last_cache
        _require_share(cache, "after a prompt")
        for layer in full_layers(twin.cache):
            if cache.kept_indices(layer).shape[2] >= TOKENS:
                raise Wrong(f"layer {layer} keeps the whole prompt")
        for ids in _prompt(1, 9, seed=4).split([5, 1, 1, 1, 1], dim=1):
            model(input_ids=ids, **names.cache_keyword(model, cache))


def _turns(model: Any, settings: dict[str, Any]) -> None:
    """Hold a second turn against the oracle."""
    with _watched(model, settings, "in a second turn") as (applied, _):
        out = _written(model, _prompt(), 4)
        ids = torch.cat([out.sequences, _prompt(1, 20, seed=5)], dim=1)
        more = {names.generation_argument(): names.cache_among(out)}
        more["attention_mask"] = torch.ones_like(ids)  # a model may write the padding token
        _written(model, ids, 3, **more)
        seen, expected = applied.last_cache.get_seq_length(), ids.shape[1] + 2
        if seen != expected:
            raise Wrong(f"after a second turn the cache has seen {seen} tokens, not {expected}")
        _require_share(applied.last_cache, "after a second turn")


def _padded(model: Any, settings: dict[str, Any]) -> None:
    """Hold two rows against the oracle, and what each keeps against what it keeps alone."""
    ids, mask = _prompt(2), torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :PADDING] = ids[0, :PADDING] = 0
    plain = torch.stack(_written(model, ids, attention_mask=mask).logits)
    with _watched(model, settings, "in a padded batch") as (applied, twin):
        _written(model, ids, attention_mask=mask)
    with kvalloc.apply(model, **settings) as applied:  # a turn's end ranks by few queries
        _written(model, ids, 1, attention_mask=mask)
        together = _kept(applied.last_cache, full_layers(twin.cache))
    for row, start in enumerate((PADDING, 0)):
        alone = ids[row : row + 1, start:]
        answers = torch.stack(_written(model, alone).logits)
        if (answers[:, 0] - plain[:, row]).abs().max() > TOLERANCE:
            continue  # those of the plain model differ, too
        with kvalloc.apply(model, **settings) as applied:
            _written(model, alone, 1)
        for layer, kept in _kept(applied.last_cache, full_layers(twin.cache)).items():
            if [[n + start for n in head] for head in kept[0]] != together[layer][row]:
                raise Wrong(f"row {row} of a padded batch keeps other entries than alone")


def _fitted(model: Any) -> None:
    facts = engine_of(model).facts()
    _check_rotation(facts.shape.full_layers, model, None, lambda steps: None)


@contextmanager
def _watched(model: Any, settings: dict[str, Any], when: str) -> Iterator[tuple[Any, Twin]]:
    """Reduce the prompts of a model; raise if a forward differs from what its twin says."""
    twin, differences = Twin(model), list[float]()

    def follow(module: Any, args: Any) -> None:
        if twin.has_read:  # only now: what ends a turn evicts as well
            twin.follow(applied.last_cache)

    def compare(module: Any, args: Any, inputs: dict[str, Any], out: Any) -> None:
        off = out.logits - twin.logits(**names.without_cache(inputs))
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            off = off[mask[:, -off.shape[1] :].bool()]
        differences.append(float(off.abs().max()))

    handles = (
        model.register_forward_pre_hook(follow),
        model.register_forward_hook(compare, with_kwargs=True),
    )
    try:
        with torch.no_grad(), kvalloc.apply(model, **settings) as applied:
            yield applied, twin
    finally:
        for handle in handles:
            handle.remove()
    for forward, off in enumerate(differences):
        if not off <= TOLERANCE:
            raise Wrong(f"{when} forward {forward} is {off:.2g} off the oracle")


def _prompt(rows: int = 1, tokens: int = TOKENS, seed: int = 3) -> torch.Tensor:
    """Return token ids none of which is special."""
    return torch.randint(4, 98, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def _written(model: Any, ids: torch.Tensor, n_tokens: int = 3, **inputs: Any) -> Any:
    settings = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(input_ids=ids, **inputs, max_new_tokens=n_tokens, **settings)


def _require_share(cache: Any, when: str) -> None:
    if not 0 < cache.share <= SHARE:
        raise Wrong(f"{when} the cache has {cache.share:.3f} of the bytes of a full one")


def _kept(cache: Any, layers: list[int]) -> dict[int, list[list[list[int]]]]:
    """Return the columns that each layer, row and head keeps."""
    kept = {layer: cache.kept_indices(layer).tolist() for layer in layers}
    return {
        layer: [[[n for n in head if n >= 0] for head in row] for row in rows]
        for layer, rows in kept.items()
    }


def _kinds(model: Any, cache: Any) -> str:
    """Return the kinds of layers that a plain cache has, each once."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    kinds = dict.fromkeys(KINDS.get(type(one).__name__, type(one).__name__) for one in layers)
    text = ", ".join(kinds) or "no cache of layers"
    latent = any(hasattr(module, "expand_kv") for module in model.modules())
    return text.replace("full", "latent") if latent else text


def _line(error: Exception) -> str:
    kind = "" if isinstance(error, KVAllocError | NotAlone) else f"{type(error).__name__}: "
    return one_line(f"{kind}{error}", 300)
