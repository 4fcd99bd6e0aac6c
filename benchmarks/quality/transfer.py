"""Budgets decided on some prompts and measured on others: what is measured, kept in cells.

A score profile is estimated (``--loss fast``, single heads) on few prompts at a time, kept in a
folder that git ignores, and any subset of them is put together to decide budgets. Then every
development prompt is read once, and the loss of its whole reduced cache is measured at each of the
budgets: the KL of its next tokens, teacher-forced, to the full cache's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kvalloc
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.sampling import choose_samples
from kvalloc.prompts.calibration import KINDS, calibration_prompts
from kvalloc.prompts.texts import Prompt

FOLDER = Path(__file__).resolve().parent
CELLS_FILE = FOLDER / "transfer.jsonl"
SCORES_FOLDER = FOLDER / "transfer-scores"
SCORER = "tova"
EQUAL = "equal budgets"
SHORT, USUAL, LONG, LONGEST = 512, 1000, 2048, 4096
TOGETHER = 8
"""Prompts of one score profile's file."""


class OutOfTime(Exception):
    """What is done is kept; the same command goes on."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Prompts that budgets are decided on: some of those that are made at a length.

    Attributes
    ----------
    kind : str
        A task, or ``all`` for every kind in turns.
    tokens : int
    picked : tuple of int
        Which ones.
    """

    kind: str
    tokens: int
    picked: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One question: which budgets, on which prompts.

    Attributes
    ----------
    name : str
    sources : dict of str to tuple of Source
        What each row of the table is decided on; `EQUAL` needs none.
    judged : tuple of (str, int, int)
        Task, tokens and number of the development prompts that they are measured on.
    shares : tuple of float
        Kept, of all entries.
    """

    name: str
    sources: Mapping[str, tuple[Source, ...]]
    judged: tuple[tuple[str, int, int], ...]
    shares: tuple[float, ...]


@dataclass(kw_only=True)
class Bench:
    """The model, and until when something new is begun."""

    loaded: Any
    until: float
    scores: dict[tuple[str, int, int], ScoreProfile] = field(default_factory=dict)

    def check_time(self) -> None:
        """Stop between two measurements."""
        if time.monotonic() > self.until:
            raise OutOfTime

    def chunk(self, kind: str, tokens: int, number: int) -> ScoreProfile:
        """Losses on the prompts ``TOGETHER * number`` and following, from the folder if there."""
        key = (kind, tokens, number)
        if key in self.scores:
            return self.scores[key]
        size = TOGETHER if tokens <= USUAL else TOGETHER // 2
        file = SCORES_FOLDER / f"{kind}-{tokens}-{number}.safetensors"
        if not file.exists():
            self.check_time()
            SCORES_FOLDER.mkdir(exist_ok=True)
            kinds = KINDS if kind == "all" else (kind,)
            prompts = calibration_prompts(
                self.loaded.tokenizer, size * (number + 1), tokens, kinds=kinds
            )[size * number :]
            kvalloc.profile(
                self.loaded.model,
                self.loaded.tokenizer,
                prompts,
                samples=size,
                context=tokens,
                scorer=SCORER,
                loss="fast",
                loss_level="head",
            ).save(file)
        self.scores[key] = ScoreProfile.load(file)
        return self.scores[key]

    def put_together(self, sources: Sequence[Source]) -> ScoreProfile:
        """A score profile of exactly those prompts."""
        picked = []
        for source in sources:
            size = TOGETHER if source.tokens <= USUAL else TOGETHER // 2
            for place in source.picked:
                picked.append((self.chunk(source.kind, source.tokens, place // size), place % size))
        names = ("curves", "masses", "sample_tokens", "losses", "loss_stderr")
        arrays = {
            name: np.stack([getattr(scores, name)[place] for scores, place in picked])
            for name in names
        }
        return picked[0][0].replace(**arrays)

    def decide(self, sources: Sequence[Source], share: float) -> BudgetProfile:
        """Budgets of least predicted loss; without sources the same budget everywhere."""
        if sources:
            scores = self.put_together(sources)
            return kvalloc.solve(scores, budget=share, level="head", objective="loss")
        scores = self.chunk("needle", SHORT, 0)
        return kvalloc.solve(scores, budget=share, objective="mean", solver="uniform")


def measure(bench: Bench, study: Study) -> None:
    """What the cells of a study lack, one line of the file a prompt."""
    known = {key_of(row): set(row["losses"]) for row in read_cells()}
    wanted = {
        label(name, share): (sources, share)
        for name, sources in study.sources.items()
        for share in study.shares
    }
    decided: dict[str, BudgetProfile] = {}
    for task, tokens, number, prompt in judged_prompts(bench.loaded.tokenizer, study):
        key = (study.name, task, tokens, number, digest_of(prompt))
        missing = [name for name in wanted if name not in known.get(key, ())]
        for name in missing:
            if name not in decided:
                sources, share = wanted[name]
                decided[name] = bench.decide(sources, share)
        if not missing:
            continue
        bench.check_time()
        losses = losses_of(bench.loaded, prompt, {name: decided[name] for name in missing})
        row = {
            **{"study": study.name, "task": task, "tokens": tokens, "number": number},
            **{"digest": digest_of(prompt), "losses": losses},
        }
        with CELLS_FILE.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def judged_prompts(tokenizer: Any, study: Study) -> Iterator[tuple[str, int, int, Prompt]]:
    """Development prompts that no budgets were decided on."""
    for task, tokens, count in study.judged:
        made = calibration_prompts(tokenizer, count, tokens, kinds=(task,), split="development")
        for number, prompt in enumerate(made):
            yield task, tokens, number, prompt


def losses_of(
    loaded: Any, prompt: Prompt, decided: Mapping[str, BudgetProfile]
) -> dict[str, float]:
    """Loss of the whole reduced cache of one prompt at each of the budgets, nats per token."""
    samples = choose_samples(
        [prompt], loaded.tokenizer, context_tokens=len(prompt.token_ids), least_tokens=1
    )
    measured = CacheLosses(loaded.model, samples.samples)
    return {name: float(f"{measured.loss(0, budgets):.6g}") for name, budgets in decided.items()}


def label(name: str, share: float) -> str:
    """Of one budget profile in a cell."""
    return f"{name} @ {share:.0%}"


def digest_of(prompt: Prompt) -> str:
    """A prompt that changed is measured again."""
    said = json.dumps([list(map(int, prompt.token_ids)), list(map(int, prompt.answer_ids))])
    return hashlib.sha256(said.encode()).hexdigest()[:12]


def read_cells() -> list[dict[str, Any]]:
    """One row a study and prompt: what all of its lines say; of a prompt that changed, the last."""
    if not CELLS_FILE.exists():
        return []
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in CELLS_FILE.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        before = found.get(key_of(row)[:-1])
        if before is not None and before["digest"] == row["digest"]:
            row["losses"] = {**before["losses"], **row["losses"]}
        found[key_of(row)[:-1]] = row
    return list(found.values())


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a line is about."""
    return row["study"], row["task"], row["tokens"], row["number"], row["digest"]
