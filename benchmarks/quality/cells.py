"""Measure cells: one method on one held-out prompt at one share of its entries.

    .venv-kvpress/bin/python benchmarks/quality/cells.py --profiles NAME NAME -o cells.jsonl

Runs in the environment with kvpress, peers and kvalloc's profiles side by side in one process.
Every cell is a line of the output; cells that stand there already are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quality.digests import digest_of_case
from quality.tables import HELD_OUT, SEED, read_rows

import kvalloc
from kvalloc.evaluate.kl import divergence
from kvalloc.evaluate.methods import CacheMethod, answer_greedily
from kvalloc.evaluate.scoring import read_turns
from kvalloc.interop.kvpress import KvpressMethod, PeerName, read_peer_name
from kvalloc.models.loading import load_model
from kvalloc.prompts.tasks import TASKS

PEERS = (
    *("SnapKV", "PyramidKV", "StreamingLLM", "TOVA", "ExpectedAttention", "KeyDiff"),
    *("CriticalKV(SnapKV)", "AdaKV(SnapKV)", "CriticalAdaKV(SnapKV)"),
    *("AdaKV(ExpectedAttention)", "KVzip"),
)
TASK_NAMES = ("needle", "pairs", "labels", "kl", "code")
ASKING = ("needle", "pairs", "labels")
"""Tasks whose answers are held against the right ones; of the others the loss counts."""
AFTER = ("needle", "pairs")
"""Tasks that are also asked after the compression (context only)."""
SHARES = (0.5, 0.2, 0.1)
AFTER_SHARES = (0.4, 0.2)
AFTER_PEERS = ("SnapKV", "CriticalAdaKV(SnapKV)", "KVzip")
"""Context only is asked of fewer."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A held-out prompt: where it stands in its task, and its case."""

    task: str
    after: bool
    number: int
    context: int
    split: str
    seed: int
    case: Any

    @property
    def digest(self) -> str:
        return digest_of_case(self.case)


def main() -> int:
    asked = parse_arguments()
    loaded = load_model("demo")
    profiles = {
        after: [profile_of(name) for name in names]
        for after, names in ((False, asked.profiles), (True, asked.after_profiles))
    }
    done = {key_of(row) for row in read_rows(asked.output)}
    until = time.monotonic() + asked.seconds
    with asked.output.open("a", encoding="utf-8") as out:
        for prompt in prompts(loaded.tokenizer, asked):
            methods = dict(methods_for(loaded, profiles[prompt.after], prompt, asked))
            for row in measured(loaded, prompt, methods, done):
                out.write(json.dumps(row) + "\n")
                out.flush()
            if time.monotonic() > until:
                print(f"stopped after {asked.seconds:.0f} s; run again to go on", file=sys.stderr)
                return 3
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="quality cells on held-out prompts")
    parser.add_argument("--profiles", nargs="*", default=[], help="budget profiles, one a share")
    parser.add_argument("--after-profiles", nargs="*", default=[], help="the same, context only")
    parser.add_argument("--tasks", nargs="*", default=list(TASK_NAMES))
    parser.add_argument("--after", nargs="*", default=list(AFTER), help="asked after, too")
    parser.add_argument("--peers", nargs="*", default=list(PEERS))
    parser.add_argument("--after-peers", nargs="*", default=list(AFTER_PEERS))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--after-shares", nargs="*", type=float, default=list(AFTER_SHARES))
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--of", type=int, default=6, help="prompts that are drawn at once")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED, help="of the prompts")
    parser.add_argument("--split", default=HELD_OUT, help="held-out, or development")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no prompt after these")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def profile_of(name: str) -> tuple[str, Any]:
    """A budget profile, called by its name and a digest: a changed one is measured again."""
    profile = kvalloc.load_profile(name)
    return f"{Path(name).stem}#{digest_of(profile)}", profile


def digest_of(profile: Any) -> str:
    """Of the budgets, policies and their weights, whatever else a profile says."""
    units = None if profile.unit_policies is None else profile.unit_policies.tolist()
    records = [policy.record() for policy in profile.policies]
    records = [{k: v for k, v in one.items() if v or k != "label"} for one in records]
    weights = [] if profile.unit_weights is None else [profile.unit_weights.tolist()]
    decided = json.dumps([profile.budgets.tolist(), units, records, *weights], sort_keys=True)
    return hashlib.sha256(decided.encode()).hexdigest()[:8]


def prompts(tokenizer: Any, asked: argparse.Namespace) -> Iterator[Prompt]:
    """Held-out prompts, the first of every task, then the second, ..."""
    wanted = [(name, False) for name in asked.tasks] + [(name, True) for name in asked.after]
    made = {
        (name, after): TASKS[name].make(
            tokenizer,
            max(asked.of, asked.prompts),
            asked.context,
            seed=asked.seed,
            split=asked.split,
            after=after,
        )
        for name, after in wanted
    }
    for number in range(asked.prompts):
        for (name, after), cases in made.items():
            yield Prompt(
                task=name,
                after=after,
                number=number,
                context=asked.context,
                split=asked.split,
                seed=asked.seed,
                case=cases[number],
            )


def methods_for(
    loaded: Any, profiles: list[tuple[str, Any]], prompt: Prompt, asked: argparse.Namespace
) -> Iterator[tuple[tuple[str, float], Any]]:
    """Methods by name and share."""
    for share in asked.after_shares if prompt.after else asked.shares:
        for peer in asked.after_peers if prompt.after else asked.peers:
            name = read_peer_name(f"kvpress:{peer}")
            yield (
                (peer, share),
                KvpressMethod(
                    name=PeerName(press=name.press, inner=name.inner, share=share),
                    tokenizer_path=loaded.tokenizer.name_or_path,
                ),
            )
    for name, profile in profiles:
        share = profile.retained_tokens / (profile.budgets.size * profile.context_tokens)
        make = CacheMethod(make_cache=lambda one=profile: one.cache(loaded.model))
        yield (name, round(share, 3)), make


def measured(
    loaded: Any, prompt: Prompt, methods: dict[tuple[str, float], Any], done: set[Any]
) -> Iterator[dict[str, Any]]:
    missing = {
        key: method
        for key, method in methods.items()
        if (prompt.task, prompt.after, prompt.digest, *key) not in done
    }
    if not missing:
        return
    full = CacheMethod(make_cache=lambda: DynamicCache(config=loaded.model.config))
    compressed = full.compress(loaded.model, prompt.case.input_ids)
    full_bytes = compressed.stored_bytes
    yardstick = read_turns(compressed, loaded.tokenizer, prompt.case)
    if (prompt.task, prompt.after, prompt.digest, "full", 1.0) not in done:
        yield row_of(
            prompt, ("full", 1.0), 0.0, 1.0, score_of(prompt, yardstick[0].answer.text), 1.0, 1.0
        )
    for key, method in missing.items():
        reduced = method.compress(loaded.model, prompt.case.input_ids)
        kept, stored = reduced.kept_bytes / full_bytes, reduced.stored_bytes / full_bytes
        kl, agree, score = judged(loaded, prompt, reduced, yardstick[0])
        yield row_of(prompt, key, kl, agree, score, kept, stored)


def judged(
    loaded: Any, prompt: Prompt, reduced: Any, right: Any
) -> tuple[float, float, float | None]:
    """Loss, agreement and the answer's score.

    Where every token of the full cache's answer is also this cache's first choice, the greedy
    answer is that answer, and it need not be decoded again.
    """
    question = prompt.case.turns[0].question_ids
    asks = prompt.task in ASKING
    spare = reduced.fork() if asks else None
    n_predicted = len(right.continuation_ids) - (0 if question else 1)
    found = divergence(
        right.logits, reduced.feed(question, right.continuation_ids[:-1], last=n_predicted)
    )
    if spare is None:
        return found.kl, found.top1_agreement, None
    if found.top1_agreement == 1.0:
        return found.kl, 1.0, score_of(prompt, right.answer.text)
    turn = prompt.case.turns[0]
    answer = answer_greedily(spare, loaded.tokenizer, question, turn.max_new_tokens)
    return found.kl, found.top1_agreement, score_of(prompt, answer.text)


def score_of(prompt: Prompt, answer: str) -> float | None:
    return prompt.case.turns[0].score(answer) if prompt.task in ASKING else None


def row_of(
    prompt: Prompt,
    key: tuple[str, float],
    kl: float,
    agree: float,
    score: float | None,
    kept: float,
    stored: float,
) -> dict[str, Any]:
    method, share = key
    return {
        "task": prompt.task,
        "after": prompt.after,
        "number": prompt.number,
        "context": prompt.context,
        "split": prompt.split,
        "seed": prompt.seed,
        "digest": prompt.digest,
        "method": method,
        "share": share,
        "kl": kl,
        "agree": agree,
        "score": score,
        "kept": kept,
        "stored": stored,
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["task"], row["after"], row["digest"], row["method"], row["share"]


if __name__ == "__main__":
    sys.exit(main())
