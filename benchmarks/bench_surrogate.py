"""The scorer surrogate: one read of a prompt against two, and what it costs.

    python benchmarks/bench_surrogate.py [--surrogate FILE] [--prompts 2]

Fits a surrogate of SmolLM2-135M (`kvalloc fit-scorer`), unless one is given. Then, on prompts of
other texts, KL(full cache || reduced cache) of 64 tokens after the eviction, for several ways to
choose the entries within the default's shares of a 16-bit cache, handed out by the prompt: of
running text, and of an answer to a question for one of eight needles that is asked after the
eviction. Last, the time of a prefill over that of a plain one, in turns. Some ten minutes on two
cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import describe_where, ratios, timed_in_turns, where_it_ran
from transformers import DynamicCache

import kvalloc
from kvalloc.formats.surrogate import FittedSurrogate
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.online.default import Default, Way
from kvalloc.prompts.calibration import calibration_prompts
from kvalloc.scorers import get_scorer

NEW, TARGET = 64, 1.10
SHARES = {"20%": 0.2, "10%": 0.1}
TASKS = {"text": ("kl", "inside"), "needles, asked after": ("needle-keys", "after")}
MATCHED: dict[str, Way] = {"surrogate": "surrogate", "reconstruction": "twice"}
WAYS = {
    "20%": ("snapkv", "expected_attention", "surrogate", "reconstruction"),
    "10%": ("snapkv", "surrogate", "reconstruction"),
}


def main() -> int:
    arguments = parse_arguments()
    loaded = load_model("demo")
    print(describe_where(where_it_ran("kvalloc", "torch", "transformers")))
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.surrogate or Path(folder) / "surrogate.safetensors"
        if arguments.surrogate is None:
            print(fitted(loaded, file, arguments))
        print(quality(FittedSurrogate.load(file)))
        for line in harm(loaded, str(file), arguments):
            print(line, flush=True)
        row = speed(loaded, str(file), arguments)
    print(
        f"prefill of {arguments.tokens:,} tokens at 20%, over a plain one: surrogate "
        f"{row['surrogate']['ratio']:.3f} [{row['surrogate']['ratio_quartile_1']:.3f}, "
        f"{row['surrogate']['ratio_quartile_3']:.3f}] (target {TARGET:.2f}), reconstruction "
        f"{row['reconstruction']['ratio']:.3f}"
    )
    return int(row["surrogate"]["ratio"] > TARGET)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the scorer surrogate")
    parser.add_argument("--surrogate", type=Path)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def fitted(loaded: LoadedModel, file: Path, arguments: argparse.Namespace) -> str:
    begun = time.perf_counter()
    prompts = calibration_prompts(loaded.tokenizer, arguments.samples, arguments.context)
    kvalloc.fit_scorer(
        loaded.model, loaded.tokenizer, prompts, output=file, samples=len(prompts),
        context=arguments.context,
    )  # fmt: skip
    return (
        f"fitted on {len(prompts)} prompts of up to {arguments.context} tokens in "
        f"{time.perf_counter() - begun:.0f} s: {file.stat().st_size / 1e6:.2f} MB"
    )


def quality(surrogate: FittedSurrogate) -> str:
    ranks, explained = surrogate.rank_correlation, surrogate.r_squared
    return (
        f"on the half of the prompts left out: rank correlation with reconstruction "
        f"{ranks.mean():.3f} ({ranks.min():.3f} to {ranks.max():.3f} by layer), R² of the log "
        f"{explained.mean():.3f} ({explained.min():.3f} to {explained.max():.3f}); ridge "
        f"{surrogate.ridge:g}"
    )


def ways(loaded: LoadedModel, share: str, file: str) -> dict[str, Any]:
    """Profiles of the same share, and another way to choose the entries each."""
    default = Default(share=SHARES[share], surrogate=file)
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    budgets = default.profile(shape, None, "twice")
    own, found = budgets.policy, {}
    for name in WAYS[share]:
        more = {"file": file} if name == "surrogate" else {}
        scorer = get_scorer(name, window=own.window, **more)
        ranked = own.replace(
            name="score",
            parameters={},
            label="",
            scorer=name,
            scorer_parameters=scorer.parameters(),
        )
        found[name] = budgets.with_policy(ranked)
        if name in MATCHED:
            found[f"{name}, matched"] = default.profile(shape, None, MATCHED[name])
    return found


@torch.inference_mode()
def harm(loaded: LoadedModel, file: str, arguments: argparse.Namespace) -> Iterator[str]:
    made = {share: ways(loaded, share, file) for share in SHARES}
    for task, (kind, question) in TASKS.items():
        found: dict[tuple[str, str], list[float]] = {}
        for sample in samples(loaded, kind, question, arguments):
            asked, answer, truth = spoken(loaded.model, sample)
            for share, profiles in made.items():
                for way, profile in profiles.items():
                    cache = kvalloc.make_cache(loaded.model, profile)
                    logits = after(loaded.model, cache, sample.token_ids, asked, answer)
                    terms = truth.exp() * (truth - logits)
                    found.setdefault((share, way), []).append(float(terms.sum(-1).mean()))
        for share, profiles in made.items():
            yield f"KL at {share} of the bytes, {task}, nats a token, and by prompt:"
            for way in profiles:
                own = found[share, way]
                yield f"  {way:<24}{np.mean(own):8.4f}   {' '.join(f'{one:.4f}' for one in own)}"


def samples(loaded: LoadedModel, kind: str, question: str, arguments: argparse.Namespace) -> Any:
    """Prompts of texts and words that the surrogate was not fitted on."""
    prompts = calibration_prompts(
        loaded.tokenizer, arguments.prompts, arguments.tokens, kinds=(kind,), question=question,
        split="development", seed=arguments.prompts,
    )  # fmt: skip
    return choose_samples(
        prompts, loaded.tokenizer, context_tokens=arguments.tokens, least_tokens=100,
        samples=len(prompts),
    ).samples  # fmt: skip


def spoken(model: Any, sample: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The question, `NEW` tokens of an answer, and what the full cache says of each.

    What the data has of the answer, then what the model says itself.
    """
    asked, answer = (
        torch.from_numpy(np.empty(0, np.int64) if ids is None else ids)[None]
        for ids in (sample.question_ids, sample.answer_ids)
    )
    cache = DynamicCache(config=model.config)
    prompt = torch.from_numpy(sample.token_ids)[None]
    last = model(prompt, past_key_values=cache, logits_to_keep=1).logits
    answer, logits = answer[:, :NEW], []
    for ids in (asked, answer):
        if ids.numel():
            last = model(ids, past_key_values=cache).logits
            logits = [*logits, last[0]] if ids is answer else []
    while answer.shape[1] < NEW:
        new = last[:, -1:].argmax(-1)
        last = model(new, past_key_values=cache).logits
        answer, logits = torch.cat([answer, new], dim=1), [*logits, last[0]]
    return asked, answer, torch.cat(logits).float().log_softmax(-1)


def after(
    model: Any, cache: Any, prompt: Any, asked: torch.Tensor, answer: torch.Tensor
) -> torch.Tensor:
    """Log probabilities of what follows each token of an answer, (n_answer, vocabulary)."""
    model(torch.from_numpy(prompt)[None], past_key_values=cache, logits_to_keep=1)
    cache.evict()
    assert cache.reduced
    if asked.numel():
        model(asked, past_key_values=cache, logits_to_keep=1)
    return model(answer, past_key_values=cache).logits[0].float().log_softmax(-1)


@torch.inference_mode()
def speed(loaded: LoadedModel, file: str, arguments: argparse.Namespace) -> dict[str, Any]:
    model, found = loaded.model, ways(loaded, "20%", file)
    ids = torch.from_numpy(samples(loaded, "kl", "inside", arguments)[0].token_ids)[None]

    def run(make: Any) -> None:
        cache = make()
        model(ids, past_key_values=cache, logits_to_keep=1)
        if not isinstance(cache, DynamicCache):
            cache.evict()

    calls = {"plain": lambda: run(lambda: DynamicCache(config=model.config))}
    for name in ("surrogate", "reconstruction"):
        calls[name] = lambda name=name: run(lambda: kvalloc.make_cache(model, found[name]))
    seconds = timed_in_turns(calls, repeats=arguments.repeats, warm_up=0)
    return {name: ratios(seconds, name, "plain") for name in calls if name != "plain"}


if __name__ == "__main__":
    sys.exit(main())
