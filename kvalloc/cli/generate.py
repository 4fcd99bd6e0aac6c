"""``kvalloc generate``: answer a prompt with a reduced cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.cli import generate_options as options
from kvalloc.cli import targets
from kvalloc.cli.asking import check_questions
from kvalloc.cli.cache_choice import CacheChoice
from kvalloc.cli.one_answer import (
    answer_prompt,
    as_json,
    check_length,
    policy_names,
    summary,
    tokenise,
)
from kvalloc.cli.options import Device, Json, ModelName, Quiet
from kvalloc.cli.output import note, print_json, size
from kvalloc.cli.progress import load
from kvalloc.cli.prompts import given_prompt
from kvalloc.cli.reading import Reading, check_room, load_document, read_document, save_document
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.cli.form import Form
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc generate demo --profile p.json --prompt-file prompt.txt
  kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
  kvalloc generate demo --full --prompt "What is a KV cache?" --max-new-tokens 40
  kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
  cat prompt.txt | kvalloc generate demo --profile p.json --json

\b
  Read a long text once, ask about it as often as you like:
  kvalloc generate demo --profile p.json --prompt-file doc.txt --save-cache doc.kv
  kvalloc generate demo --cache doc.kv --question "Who speaks?" --question "To whom?"
  kvalloc generate demo --cache doc.kv --ask --keep-turns
"""


def generate(
    model: ModelName,
    profile: options.Profile = None,
    target_retention: targets.TargetRetention = None,
    budget: targets.Budget = None,
    budget_tokens: targets.BudgetTokens = None,
    memory: options.Memory = None,
    level: options.Level = None,
    solver: options.Solver = None,
    adapt: options.Adapt = None,
    measured_tokens: options.MeasuredTokens = None,
    hold: options.Hold = False,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    question: options.Question = None,
    ask: options.Ask = False,
    keep_turns: options.KeepTurns = False,
    save_cache: options.SaveCache = None,
    cache: options.Cache = None,
    max_new_tokens: options.MaxNewTokens = 128,
    chat: options.Chat = None,
    full: options.Full = False,
    policy: options.Policy = None,
    policy_option: options.PolicyOption = None,
    decode_every: options.DecodeEvery = None,
    allow_other_model: options.AllowOtherModel = False,
    dtype: options.OwnDtype = None,
    device: Device = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt, or questions about a long one, with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants, or what is decided for the
    prompt itself with --target-retention, --budget, --budget-tokens or --memory.
    Answers go to stdout, what they took to stderr; in a pipe or a file an empty line stands
    between two answers, and --json keeps them apart whatever is in them. Always the most likely
    token is taken, so that answers can be compared.
    """
    target = {
        "target_retention": target_retention,
        "budget": budget,
        "budget_tokens": budget_tokens,
        "memory": memory,
        "level": level,
        "solver": solver,
    }
    choice = {
        "profile": profile,
        "full": full,
        "target": {name: value for name, value in target.items() if value is not None},
        "adapt": adapt,
        "measured_tokens": measured_tokens,
        "hold": hold,
        "policy": policy,
        "policy_option": policy_option or [],
        "decode_every": decode_every,
    }
    wanted = _Wanted(
        model=model,
        choice=_choice(cache, choice, allow_other_model=allow_other_model),
        cache=cache,
        save_cache=save_cache,
        prompt=prompt,
        prompt_file=prompt_file,
        questions=question or [],
        ask=ask,
        keep_turns=keep_turns,
        max_new_tokens=max_new_tokens,
        chat=chat,
        allow_other_model=allow_other_model,
        dtype=dtype,
        device=device,
        json=json,
        quiet=quiet,
    )
    wanted.check()
    if wanted.document:
        _ask_document(wanted)
    else:
        _answer_prompt(wanted)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Everything that was asked for; `choice` is None where the document comes from a file."""

    model: str
    choice: CacheChoice | None
    cache: Path | None
    save_cache: Path | None
    prompt: str | None
    prompt_file: Path | None
    questions: list[str]
    ask: bool
    keep_turns: bool
    max_new_tokens: int
    chat: bool | None
    allow_other_model: bool
    dtype: str | None
    device: str | None
    json: bool
    quiet: bool

    @property
    def document(self) -> bool:
        """Whether the prompt is a document to be saved or asked about."""
        return bool(self.questions or self.ask or self.save_cache or self.cache)

    def check(self) -> None:
        """Refuse what contradicts itself, before anything is read or loaded."""
        check_questions(self.questions)
        if self.keep_turns and not self.document:
            raise InputError("--keep-turns is about questions; give --question or --ask, too")
        if self.questions and self.ask:
            raise InputError("--question and --ask both give the questions; choose one of them")
        if self.cache is not None and (self.prompt is not None or self.prompt_file is not None):
            raise InputError(
                "--cache holds the document already; ask about it with --question or --ask instead "
                "of giving a prompt"
            )
        if self.cache is not None and self.save_cache is not None:
            raise InputError("--cache is a saved cache already; leave out --save-cache")
        if self.save_cache is not None and self.choice is not None:
            from kvalloc.files import check_writable

            if self.choice.full or self.choice.decode_every is not None:
                flag = "--full" if self.choice.full else "--decode-every"
                raise InputError(
                    f"--save-cache saves a reduced cache as it is after the document, which does "
                    f"not go with {flag}; leave one of them out"
                )
            check_writable(self.save_cache)
        if self.ask and self.cache is None and self.prompt is None and self.prompt_file is None:
            raise InputError(
                "with --ask the questions come from stdin, so the document has to come from "
                "--prompt-file, --prompt or --cache"
            )

    def load(self) -> LoadedModel:
        """The model, in the type of a saved cache where there is one."""
        dtype = self.dtype or "float32"
        if self.cache is not None:
            from kvalloc.formats.saved_cache import read_header

            dtype = str(read_header(self.cache)["dtype"])  # before the model is loaded
            if self.dtype not in (None, dtype):
                raise InputError(
                    f"{self.cache} holds {dtype} entries, and --dtype is {self.dtype}; leave out "
                    "--dtype, or read the document again"
                )
        return load(self.model, dtype=dtype, device=self.device, quiet=self.quiet)


def _choice(
    cache: Path | None, choice: dict[str, Any], *, allow_other_model: bool
) -> CacheChoice | None:
    if cache is None:
        return CacheChoice(**choice, allow_other_model=allow_other_model)
    given = [*choice["target"], *(name for name in choice if choice[name] and name != "target")]
    if given:
        flag = given[0].replace("_", "-")
        raise InputError(
            f"--{flag} says how a document is reduced, and the one in --cache was reduced when it "
            "was saved; leave it out"
        )
    return None


def _prepared(choice: CacheChoice) -> BudgetProfile | None:
    """The stored budgets, after all checks that need no model."""
    budgets = choice.budgets()
    choice.check_target()
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    choice.check_policy(budgets)
    return budgets


def _answer_prompt(wanted: _Wanted) -> None:
    """One prompt, one answer, as the model's own ``generate()`` gives it."""
    choice = wanted.choice
    assert choice is not None  # without a saved cache there is one
    text, _ = given_prompt(wanted.prompt, wanted.prompt_file)
    budgets = _prepared(choice)
    loaded = wanted.load()
    cache = choice.cache(loaded, budgets)
    inputs = tokenise(loaded, text, wanted.chat)
    check_length(loaded, int(inputs["input_ids"].shape[1]), wanted.max_new_tokens)
    answer = answer_prompt(
        loaded,
        inputs,
        cache,
        wanted.max_new_tokens,
        stream=not wanted.json,
        quiet=wanted.quiet,
    )
    _note_short(cache, answer.prompt_tokens, quiet=wanted.quiet)
    if wanted.json:
        print_json(as_json(answer, loaded, None if choice.full else choice.profile, cache))
    else:
        for line in summary(answer, cache):
            note(line, quiet=wanted.quiet)


def _ask_document(wanted: _Wanted) -> None:
    """A document, saved or loaded or both not, and any number of questions about it."""
    from kvalloc.cli.asking import Asker, ask_all, ask_typed

    reading = _loaded_document(wanted) if wanted.choice is None else _read_document(wanted)
    told: dict[str, Any] = {
        "model": reading.loaded.model_id,
        "cache": None if wanted.cache is None else str(wanted.cache),
        "saved": None if wanted.save_cache is None else str(wanted.save_cache),
        "profile": None if wanted.choice is None else wanted.choice.profile,
        **policy_names(reading.cache),
        **reading.as_dict(),
    }
    quiet = wanted.quiet or wanted.json
    note(reading.summary(), quiet=quiet)
    if wanted.save_cache is not None:
        stored = save_document(reading, wanted.save_cache, chat=not reading.form.special)
        note(f"saved as {wanted.save_cache}, {size(stored)}", quiet=quiet)
    asker = Asker(
        reading,
        max_new_tokens=wanted.max_new_tokens,
        keep_turns=wanted.keep_turns,
        stream=not wanted.json,
        quiet=wanted.quiet,
    )
    rows = ask_all(asker, wanted.questions)
    if wanted.ask or (wanted.cache is not None and not wanted.questions):
        rows = ask_typed(asker, quiet=quiet, keep_turns=wanted.keep_turns)
    if wanted.json:
        print_json({**told, "answers": rows})


def _loaded_document(wanted: _Wanted) -> Reading:
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    assert wanted.cache is not None  # the caller has looked
    loaded = wanted.load()
    reading = load_document(
        loaded, wanted.cache, chat=wanted.chat, allow_other_model=wanted.allow_other_model
    )
    check_room(loaded, reading.tokens, _room(reading.form, loaded, wanted))
    return reading


def _read_document(wanted: _Wanted) -> Reading:
    from kvalloc.cli.form import Form
    from kvalloc.cli.progress import slow

    assert wanted.choice is not None  # the caller has looked
    text, name = given_prompt(wanted.prompt, wanted.prompt_file)
    budgets = _prepared(wanted.choice)
    loaded = wanted.load()
    form = Form.of(loaded.tokenizer, loaded.model_id, wanted.chat)
    cache = wanted.choice.cache(loaded, budgets)
    room = _room(form, loaded, wanted)
    with slow(f"reading {name}", quiet=wanted.quiet):
        reading = read_document(loaded, text, name, form, cache, room_tokens=room)
    _note_short(cache, reading.tokens, quiet=wanted.quiet)
    return reading


def _room(form: Form, loaded: LoadedModel, wanted: _Wanted) -> int:
    """Tokens that the longest question and its answer need; the shortest where none is known."""
    longest = [form.question_ids(loaded.tokenizer, one).size for one in wanted.questions or [""]]
    return int(max(longest)) + wanted.max_new_tokens


def _note_short(cache: Any, n_tokens: int, *, quiet: bool) -> None:
    if not getattr(cache, "reduced", True):
        note(
            f"note: of a prompt of {n_tokens:,} token{'s' if n_tokens > 1 else ''} these budgets "
            "leave nothing out: everything is kept",
            quiet=quiet,
        )
