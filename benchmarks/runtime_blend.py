"""Documents that were read one by one: what blending them loses, and when the first token comes.

    python benchmarks/bench_runtime.py blend [--models demo] [--prompts N] [--quick]

Three documents of 500 tokens and a question, of held-out texts: one text in three parts, and three
texts, each with a question about a fact and with one about all. What is compared follows the same
beginning of a chat: documents put together and nothing computed anew; CacheBlend's 15%, of the
tokens whose keys and values deviate most, in all layers; what `kvalloc.blend` computes anew, so
many that both take as many operations (tokens times layers, with what is computed to choose); and
all read. The loss is the KL of the greedy answer of a model that has read all, nats a token. The
time to the first token is that of 15% with the documents' files read, in turns with reading all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _common import Row, in_turns, parser_of, print_rows, ratio_of
from transformers import DynamicCache

import kvalloc
from kvalloc.extensions.answering import answer
from kvalloc.extensions.documents import CHECK_LAYER, DEFAULT_SHARE, DenseLayer, Documents
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import load_model, shape_of
from kvalloc.prompts.chat import DocumentForm, encode
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.tasks import find_tasks

DOCUMENTS, TOKENS = 3, 500


class Request(NamedTuple):
    """Tokens of a prompt: before the documents, of each document, and of the question."""

    before: torch.Tensor
    documents: list[torch.Tensor]
    question: torch.Tensor


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["demo"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=4, help="of each of the four kinds")
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5, help="rounds of the time")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts, arguments.repeats = 1, 1
    rows = (row for name in arguments.models for row in rows_of(name, arguments))
    return print_rows(rows, arguments, "kvalloc", "torch", "transformers")


def rows_of(name: str, arguments: argparse.Namespace) -> Iterator[Row]:
    loaded = load_model(name, dtype=arguments.dtype)
    prompts = request(loaded, arguments.prompts)
    where = f"{loaded.model_id}, {arguments.dtype}, {DOCUMENTS} documents of {TOKENS} tokens"
    yield time_row(loaded.model, prompts[0], where, arguments.repeats)
    table = np.array([losses(loaded.model, one, arguments.new_tokens) for one in prompts])
    means, of = table.mean(axis=0), f"{len(prompts)} prompts"
    for title, column in (("nothing computed anew", 0), ("CacheBlend's", 1), ("blend", 2)):
        yield {"name": f"{where}: nats a token, {title}", "figure": float(means[column]),
               **ends([table[:, column]]), "note": f"{of}; all read is 0"}  # fmt: skip
    less = int((table[:, 2] < table[:, 1]).sum())
    yield {"name": f"{where}: loss over CacheBlend's at as many operations",
           "figure": float(means[2] / means[1]), **ends([table], lambda one: one[:, 2] / one[:, 1]),
           "at_most": 0.5, "note": f"{of}, less on {less}"}  # fmt: skip


def ends(tasks: list[Any], *of: Any) -> Row:
    """Return the interval of a row, where there are enough prompts for one."""
    result = interval(tasks, *of)
    return {} if result is None else dict(zip(("low", "high"), result, strict=True))


def time_row(model: Any, request: Request, where: str, repeats: int) -> Row:
    """Return the time to the first token over that of reading all."""
    ids = torch.cat([request.before, *request.documents, request.question])
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{n}.kv" for n in range(DOCUMENTS)]
        for path, item in zip(paths, request.documents, strict=True):
            kvalloc.save_cache(document(model, item), path)

        def blended() -> list[int]:
            cache = kvalloc.blend(model, paths, question=request.question, before=request.before)
            return list(answer(model, cache, request.question, max_new_tokens=1, keep=True))

        def whole() -> None:
            with torch.no_grad():
                model(
                    ids[None], past_key_values=DynamicCache(config=model.config), logits_to_keep=1
                )

        result = in_turns({"blend": blended, "all": whole}, repeats=repeats)
    return {
        "name": f"{where}: time to the first token over reading all",
        **ratio_of(result, "blend", "all"),
        "at_most": 0.35,
        "note": f"{DEFAULT_SHARE:.0%} computed anew, files read",
    }


def losses(model: Any, request: Request, new: int) -> tuple[float, float, float]:
    """Return the KL of nothing computed anew, of CacheBlend's tokens and of blend's."""
    front = torch.cat([request.before, *request.documents])
    ids, n_front = torch.cat([front, request.question]), len(front)
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(ids[None], past_key_values=whole, logits_to_keep=1).logits[0]
    full = [(one.keys[:, :, :n_front].clone(), one.values[:, :, :n_front].clone())
            for one in whole.layers]  # fmt: skip
    expected, answered = [logits], []
    for _ in range(new - 1):
        answered.append(logits.argmax(dim=-1))
        with torch.no_grad():
            logits = model(answered[-1][None], past_key_values=whole).logits[0]
        expected.append(logits)
    reference = torch.cat(expected).float().log_softmax(dim=-1)
    tail = torch.cat([request.question, *answered])

    def loss(cache: Any) -> float:
        with torch.no_grad():
            result = model(tail[None], past_key_values=cache).logits[0, -new:]
        return float(Predictions(reference).divergences(result).mean())

    n_tokens, n_layers = n_front - len(request.before), len(full)
    share = DEFAULT_SHARE * (n_layers - 1) / n_layers - len(request.question) / n_tokens
    caches = [document(model, item) for item in request.documents]
    turned = kvalloc.blend(model, caches, before=request.before)
    ours = kvalloc.blend(
        model, caches, before=request.before, question=request.question, recompute=share
    )
    return loss(copied(turned, model)), loss(cacheblend(model, turned, request, full)), loss(ours)


def cacheblend(model: Any, turned: Any, request: Request, full: list[Any]) -> Any:
    """Return a cache with CacheBlend's tokens computed anew.

    Their keys and values deviate most at the check layer from a read of all documents. The layers
    before it are computed for all tokens.
    """
    item, n_before = turned.layers[CHECK_LAYER], len(request.before)
    pairs = zip(full[CHECK_LAYER], (item.keys, item.values), strict=True)
    change = sum((new - old).square().sum(dim=(0, 1, 3)) for new, old in pairs)[n_before:]
    count = int(DEFAULT_SHARE * len(change))
    places = (change.topk(count).indices + n_before).sort().values
    ids = torch.cat([request.before, *request.documents])
    layers = [DenseLayer.joined([layer], 0, 0, ids) for layer in turned.layers]
    subset = Documents(model=model, ids=ids, before=n_before, n_tokens=len(ids), layers=layers)
    subset.recompute(places)
    return copied(turned, model, [(layer.keys, layer.values) for layer in layers])


def copied(cache: Any, model: Any, states: list[Any] | None = None) -> DynamicCache:
    """Return a plain cache of the same keys and values, or of others."""
    result = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        keys, values = (layer.keys, layer.values) if states is None else states[index]
        result.update(keys.clone(), values.clone(), index)
    return result


def document(model: Any, ids: torch.Tensor) -> Any:
    """Return the whole cache of a document that was read alone."""
    shape = shape_of(model)
    profile = BudgetProfile(
        shape=shape, level="layer", context_tokens=len(ids),
        budgets=np.full((shape.n_layers, shape.n_kv_heads), len(ids)),
        policy=Policy(scorer="snapkv", scorer_parameters={"window": 32}, sinks=4, window=32),
    )  # fmt: skip
    cache = kvalloc.make_cache(model, profile)
    with torch.no_grad():
        model(ids[None], past_key_values=cache, logits_to_keep=1)
    cache.read_ids = ids[None]
    return cache


def request(loaded: Any, count: int) -> list[Request]:
    """Return ``count`` prompts of each kind."""
    tokenizer = loaded.tokenizer
    before = encode(tokenizer, DocumentForm.of(tokenizer).before)

    def made(name: str, n_cases: int, n_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        [task] = find_tasks([name])
        cases = task.make(tokenizer, n_cases, n_tokens, split="held-out", after=True)
        ids = [(case.input_ids, case.turns[0].question_ids) for case in cases]
        assert all(item[: len(before)] == before for item, _ in ids)
        return [
            (torch.tensor(item[len(before) :]), torch.tensor(question)) for item, question in ids
        ]

    start, result = torch.tensor(before), list[Request]()
    about_all = made("own", 1, TOKENS)[0][1]
    for text, question in made("qa", count, DOCUMENTS * TOKENS + 40):
        parts = list(text.tensor_split(DOCUMENTS))
        result += [Request(start, parts, question), Request(start, parts, about_all)]
    apart = made("qa", DOCUMENTS * count, TOKENS + 40)
    for n in range(count):
        three = apart[n::count]
        parts = [text for text, _ in three]
        result += [Request(start, parts, three[n % DOCUMENTS][1]), Request(start, parts, about_all)]
    return result


if __name__ == "__main__":
    raise SystemExit(main())
