"""``kvalloc generate``: answer a prompt, or questions about a document, with a reduced cache."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.cli.options import MODEL, takes
from kvalloc.cli.output import (
    SLID_OUT,
    duration,
    is_quiet,
    is_verbose,
    note,
    print_json,
    wants_json,
)
from kvalloc.cli.progress import load, slow
from kvalloc.cli.values import typed_options
from kvalloc.errors import InputError, option, plain
from kvalloc.files import near_file
from kvalloc.models.structure import input_device
from kvalloc.prompts.chat import DocumentForm, wants_chat, without_chat
from kvalloc.prompts.examples import chat_text
from kvalloc.units import Option, check_temperature, share_text, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel
    from kvalloc.shape import ModelShape

EXAMPLES = """\
  kvalloc generate demo --profile p.json --prompt-file prompt.txt
  kvalloc generate demo --target-retention 0.9 --prompt-file prompt.txt
  kvalloc generate demo --full --prompt "What is a KV cache?" --max-new-tokens 40
  kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
  kvalloc generate demo --budget 20% --temperature 0.7 --prompt-file prompt.txt
  cat prompt.txt | kvalloc generate demo --profile p.json --json

\b
  Read a long text once, ask about it as often as you like:
  kvalloc generate demo --profile p.json --prompt-file doc.txt --save-cache doc.kv
  kvalloc generate demo --cache doc.kv --question "Who speaks?" --question "To whom?"
  kvalloc generate demo --cache doc.kv --ask --keep-turns
"""

BUDGETS, KEPT = "Budgets", "Which entries stay"
PROMPT, QUESTIONS, ANSWER = "Prompt", "Questions about a document", "Answer"
"""Headings in the help."""

OF_A_PROMPT = (*(kind.keyword for kind in TARGETS if kind.keyword != "target_loss"), "level")
"""What of a request can be asked of one prompt: it has no loss curves."""

_REDUCING = (
    *OF_A_PROMPT,
    *("profile", "full", "solver"),
    *("policy", "policy_option", "decode_every", "bounded", "surrogate"),
)
"""Options that say how a prompt is reduced: a saved cache was reduced when it was saved."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of ``kvalloc generate``, as typed.

    Attributes
    ----------
    profile : str
        A budget profile, or the name of a shipped one.
    solver : str
        Who decides a target for the prompt.
    full : bool
        Use the full cache, to compare with.
    prompt : str
        The prompt.
    prompt_file : Path
        A file with the prompt; stdin without either.
    chat : bool
        Put the prompt into the model's chat form, or not. Where the model has one by default.
    question : sequence of str
        A question about the prompt, which is then a document. Each one follows the document alone.
    ask : bool
        Ask for questions; without a terminal, a line each.
    keep_turns : bool
        A conversation: each question follows the answers.
    save_cache : Path
        Save the cache with the document, for `cache`.
    cache : Path
        Take the document from a cache that was saved.
    max_new_tokens : int, default 128
        Length of an answer at most, tokens.
    temperature : float
        Draw each token of an answer at this temperature, such as 0.7; by default always the most
        likely one is taken.
    seed : int
        With `temperature`: draws the answer, the same one each time; 0 by default.
    policy : str
        Pick the entries in another way within the same budgets: a policy, or a scorer whose best
        stay; see 'kvalloc list policies'.
    policy_option : sequence of str
        A parameter of `policy`.
    decode_every : int
        Keep the budget while answering, too: go back to it every N tokens. By default the answer
        is never evicted.
    bounded : bool
        Where the policy looks at what follows the prompt: keep twice the budgets until then instead
        of the whole prompt. Where each prompt hands the budgets out and nothing is waited for, each
        layer hands out its own.
    surrogate : str
        With a budget and nothing else: what 'kvalloc fit-scorer' wrote for the model, which spares
        a second read of the prompt. By default the one that ships for the model, if any.
    allow_other_model : bool
        Accept a profile of a model of the same sizes.
    dtype : str
        Of weights and cache: float32, bfloat16 or float16. float32 by default, and with `cache`
        what it was saved in.
    device : str
        Such as cuda:0; the CPU by default.
    """

    model: str
    typed: Mapping[str, Any]
    """What was typed, options of a target too."""

    profile: Annotated[str | None, Option("P.json", BUDGETS)] = None
    solver: Annotated[str | None, Option("NAME", BUDGETS)] = None
    full: Annotated[bool, Option("", BUDGETS)] = False
    prompt: Annotated[str | None, Option("TEXT", PROMPT)] = None
    prompt_file: Annotated[Path | None, Option("FILE", PROMPT)] = None
    chat: Annotated[bool | None, Option("--chat/--no-chat", PROMPT)] = None
    question: Annotated[Sequence[str], Option("TEXT", QUESTIONS)] = ()
    ask: Annotated[bool, Option("", QUESTIONS)] = False
    keep_turns: Annotated[bool, Option("", QUESTIONS)] = False
    save_cache: Annotated[Path | None, Option("FILE", QUESTIONS)] = None
    cache: Annotated[Path | None, Option("FILE", QUESTIONS)] = None
    max_new_tokens: Annotated[int, Option("N", ANSWER, least=1)] = 128
    temperature: Annotated[float | None, Option("T", ANSWER)] = None
    seed: Annotated[int | None, Option("N", ANSWER, least=0)] = None
    policy: Annotated[str | None, Option("NAME", KEPT)] = None
    policy_option: Annotated[Sequence[str], Option("KEY=VALUE", KEPT)] = ()
    decode_every: Annotated[int | None, Option("N", KEPT, least=1)] = None
    bounded: Annotated[bool, Option("", KEPT)] = False
    surrogate: Annotated[Path | None, Option("FILE", KEPT)] = None
    allow_other_model: Annotated[bool, Option("", MODEL)] = False
    dtype: Annotated[str | None, Option("NAME", MODEL)] = None
    device: Annotated[str | None, Option("NAME", MODEL)] = None

    @property
    def target(self) -> RequestOptions:
        """What was typed of a request."""
        return {name: self.typed[name] for name in OF_A_PROMPT if name in self.typed}  # type: ignore[return-value]

    @property
    def default(self) -> bool:
        """Whether a budget is all that is said of how a prompt is reduced."""
        said = {*_REDUCING} & {*self.typed}
        own = {"budget", "memory", "decode_every", "bounded", "surrogate"}
        return "budget" in said and said <= own

    def given(self, *names: str) -> list[str]:
        """Those of some options that were typed, as flags."""
        return [option(name) for name in names if name in self.typed]


@takes(RequestOptions, Asked, only={RequestOptions: OF_A_PROMPT})
def generate(model: str, **typed: Any) -> None:
    """Answer a prompt, or questions about a long one, with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants, or what is decided for the
    prompt itself with --target-retention, --budget, --budget-tokens or --memory; the answer comes
    on top of it. A --budget and nothing else is a share of the bytes of a cache at 16 bits, kept in
    the best way that needs nothing measured; --memory beside it is what the cache may take
    meanwhile.
    Answers go to stdout, what they took to stderr; in a pipe or a file an empty line stands
    between two answers, and --json keeps them apart whatever is in them.
    """
    own = {name: value for name, value in typed.items() if name not in OF_A_PROMPT}
    asked = Asked(model=model, typed=typed, **own)
    if asked.cache is None:
        _check_reduction(asked)
    elif given := asked.given(*_REDUCING):
        raise InputError(
            f"{given[0]} says how a document is reduced, and the one in --cache was reduced when "
            "it was saved; leave it out"
        )
    _check_documents(asked)
    if asked.temperature is None and asked.seed is not None:
        raise InputError("--seed draws an answer, and without --temperature none is drawn; add it")
    check_temperature(asked.temperature)
    if asked.question or asked.ask or asked.save_cache or asked.cache:
        _ask_document(asked)
    else:
        _answer_prompt(asked)


def _check_reduction(asked: Asked) -> None:
    """Refuse ways of reducing a prompt that contradict each other."""
    reached = asked.given(*(kind.keyword for kind in TARGETS))
    decided = asked.given("level", "solver")
    if not reached and decided:
        raise InputError(
            f"{decided[0]} says how a target for each prompt is decided; give one, such as "
            "--target-retention 0.9"
        )
    if reached and asked.profile is not None:
        raise InputError(
            f"{reached[0]} decides for each prompt and --profile was decided before; give one of "
            "them"
        )
    if reached and asked.allow_other_model:
        raise InputError(
            "--allow-other-model accepts the stored profile of another model, and here the budgets "
            "are decided from the prompt; leave it out, or give a profile"
        )
    if not reached and asked.profile is None and not asked.full:
        raise InputError(
            "say which budgets to use with --profile P.json, decide them for the prompt with "
            "--target-retention 0.9, or take the full cache with --full"
        )
    if reached and asked.full:
        raise InputError(f"{reached[0]} reduces the cache and --full does not; give one of them")
    if asked.surrogate is not None and not asked.default:
        raise InputError(
            "--surrogate goes with --budget and nothing else; leave it out, or name the policy "
            "with --policy surrogate --policy-option file=FILE"
        )
    if asked.policy_option and asked.policy is None:
        raise InputError("--policy-option belongs to a policy; name it with --policy")
    if asked.full and (keeping := asked.given("policy", "decode_every", "bounded")):
        raise InputError(f"{keeping[0]} keeps to budgets; it does not go with --full")


def _check_documents(asked: Asked) -> None:
    """Refuse what contradicts itself about documents and questions, before anything is read."""
    for place, question in enumerate(asked.question, start=1):
        which = f"question {place}" if len(asked.question) > 1 else "the question"
        if not _check_text(question, which).strip():
            raise InputError(f"{which} is empty; ask something")
    prompted = asked.given("prompt", "prompt_file")
    if asked.keep_turns and not asked.given("question", "ask", "save_cache", "cache"):
        raise InputError("--keep-turns is about questions; give --question or --ask, too")
    if asked.question and asked.ask:
        raise InputError("--question and --ask both give the questions; choose one of them")
    if asked.cache is not None and prompted:
        raise InputError(
            "--cache holds the document already; ask about it with --question or --ask instead "
            "of giving a prompt"
        )
    if asked.cache is not None and asked.save_cache is not None:
        raise InputError("--cache is a saved cache already; leave out --save-cache")
    if asked.save_cache is not None:
        from kvalloc.files import check_writable

        if changing := asked.given("full", "decode_every"):
            raise InputError(
                f"--save-cache saves a reduced cache as it is after the document, which does "
                f"not go with {changing[0]}; leave one of them out"
            )
        check_writable(asked.save_cache)
    if asked.ask and asked.cache is None and not prompted:
        raise InputError(
            "with --ask the questions come from stdin, so the document has to come from "
            "--prompt-file, --prompt or --cache"
        )


def _check_text(text: str, where: str) -> str:
    """A text of the command line, which holds what was typed even where that is no text.

    Raises
    ------
    InputError
        If it was not typed in UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (character {error.start} cannot be read); convert it to "
            "UTF-8"
        ) from error
    return text


def _given_prompt(asked: Asked) -> tuple[str, str]:
    """The prompt, and where it came from: the command line, a file or stdin."""
    prompt, file = asked.prompt, asked.prompt_file
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file are two prompts at once; give one of them")
    if prompt is not None:
        text, where = _check_text(prompt, "--prompt"), "--prompt"
    elif file is not None:
        try:
            text, where = _decoded(file.read_bytes(), str(file)), file.name
        except FileNotFoundError:
            near = near_file(file)
            raise InputError(f"there is no file {file}; {near}check the path") from None
        except OSError as error:
            raise InputError(f"cannot read {file} ({error.strerror})") from error
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give --prompt TEXT, --prompt-file FILE or stdin")
        text, where = _decoded(sys.stdin.buffer.read(), "stdin"), "stdin"
    if not text.strip():
        raise InputError(f"the prompt from {where} is empty; give some text")
    return text, where


def _decoded(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error


def _load(asked: Asked) -> tuple[LoadedModel, Callable[[int], Any]]:
    """The model, and what makes an empty cache for so many tokens, after all checks without them.

    Raises
    ------
    KVAllocError
        If model and budgets do not fit, or the policy cannot be made.
    """
    from kvalloc.models.loading import require_run_packages

    budgets, target = _budgets(asked), asked.target
    if target and not asked.default:
        Request.parse(**target)
    require_run_packages()
    options = _policy_options(asked, budgets)
    if asked.default:
        from kvalloc.online.default import Default

        default = Default.parse(**target, surrogate=asked.surrogate)
        loaded = load(asked.model, asked.typed)
        kept: dict[str, Any] = {"decode_every": asked.decode_every, "bounded": asked.bounded}
        return loaded, lambda tokens: default.cache(loaded.model, tokens, **kept)
    loaded = load(asked.model, asked.typed)
    cache = _cache(asked, loaded, budgets, options)
    return loaded, lambda tokens: cache


def _cache(
    asked: Asked, loaded: LoadedModel, budgets: BudgetProfile | None, options: dict[str, Any]
) -> Any:
    """A cache that is the same for every prompt."""
    if asked.full:
        from transformers import DynamicCache

        return DynamicCache(config=loaded.model.config)
    picked: dict[str, Any] = {
        "policy": asked.policy,
        "policy_options": options,
        "decode_every": asked.decode_every,
        "bounded": asked.bounded,
    }
    if budgets is not None:
        other = asked.allow_other_model
        from kvalloc.runtime import make_cache

        return make_cache(loaded.model, budgets, allow_other_model=other, **picked)
    from kvalloc.online.per_prompt import PromptTarget, make_prompt_cache

    wanted = PromptTarget.parse(**asked.target, solver=asked.solver)
    return make_prompt_cache(loaded.model, wanted, **picked)


def _budgets(asked: Asked) -> BudgetProfile | None:
    """The stored budgets, if they are to be used."""
    if asked.profile is None:
        return None
    from kvalloc.formats.shipped_profiles import load_profile

    profile = load_profile(asked.profile)
    return None if asked.full else profile


def _policy_options(asked: Asked, budgets: BudgetProfile | None) -> dict[str, Any]:
    """The policy's parameters, each of its type; refused where it cannot be made of them."""
    if asked.policy is None:
        return {}
    from kvalloc.formats.budget_profile import Policy
    from kvalloc.problem.registry import SCORERS, names, plugin_options
    from kvalloc.runtime.policies import changed_policy, policy_class, policy_names, policy_of
    from kvalloc.scorers import scorer_class

    name, policies, options = asked.policy, policy_names(), {}
    if name in (*policies, *names(SCORERS)):
        known = plugin_options(policy_class(name) if name in policies else scorer_class(name))
        known.pop("scorer", None)
        options = typed_options("policy", name, known, [*asked.policy_option], example="seed=1")
    own = Policy(scorer="xkv", scorer_parameters={}, sinks=4, window=8)
    policy_of(changed_policy(own if budgets is None else budgets.policy, name, options))
    return options


def _shape(loaded: LoadedModel) -> ModelShape:
    from kvalloc.models.loading import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id)


def _note_way(cache: Any, asked: Asked) -> None:
    """Say which way was taken where nothing but a budget was asked for; --verbose has said it."""
    if asked.default and not is_verbose():
        note(cache.profile.detail)


def _note_whole(cache: Any, n_tokens: int) -> None:
    """Say why nothing of a prompt was evicted: it is too short, or too little has followed it."""
    if getattr(cache, "reduced", True):
        return
    if awaited := cache.awaited_tokens:
        note(
            f"note: nothing is evicted yet: these budgets wait until {awaited} more "
            f"token{'s have' if awaited > 1 else ' has'} followed the prompt"
        )
        return
    note(
        f"note: of a prompt of {n_tokens:,} token{'s' if n_tokens > 1 else ''} these budgets "
        "leave nothing out: everything is kept",
    )


def _decided_here(cache: Any) -> BudgetProfile | None:
    """Budgets that were decided for this prompt; None of stored ones and of a full cache."""
    decided = getattr(cache, "decision_seconds", None) is not None
    return getattr(cache, "profile", None) if decided else None


def _cache_facts(loaded: LoadedModel, cache: Any, prompt_tokens: int) -> dict[str, Any]:
    """What a cache holds, and what was asked for, as plain values for ``--json``.

    Parameters
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        After the prompt.
    prompt_tokens : int

    Returns
    -------
    dict
        ``policy``, ``scorer``, ``other_policies``: who picks the entries; ``requested``: the
        target of budgets that were decided for this prompt; ``retention``: what they reach of it,
        where that is known; ``granted_bytes``: what the budgets allow a prompt of this length;
        ``share``: what is stored of it, of a cache at 16 bits;
        ``retained_bytes``, ``full_bytes``: what is stored now, and what a full cache would store.
        None where there is none, as of a full cache.
    """
    from kvalloc.evaluate.caches import full_bytes, stored_bytes

    profile: BudgetProfile | None = getattr(cache, "profile", None)
    decided = _decided_here(cache)
    requested = {} if decided is None else decided.requested
    known = {name: requested[name] for name in ("target", "value") if name in requested}
    return {
        "policy": None if profile is None else profile.policy.name,
        "scorer": None if profile is None else profile.policy.scorer,
        "other_policies": [] if profile is None else [one.title for one in profile.other_policies],
        "requested": None if decided is None else known,
        "retention": None if decided is None else decided.retention,
        "granted_bytes": None if profile is None else profile.retained_bytes_at(prompt_tokens),
        "share": getattr(cache, "share", 1.0),
        "retained_bytes": stored_bytes(cache),
        "full_bytes": full_bytes(cache, _shape(loaded)),
    }


def _kept_text(cache: Any, share: float, retained_bytes: int, full_bytes: int) -> str:
    """What was asked for, what is kept of a prompt, and its bytes.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    share : float
        Of a cache at 16 bits; see `kvalloc.runtime.cache.BudgetCache.share`.
    retained_bytes, full_bytes : int
        Of the prompt alone, stored and by a full cache.
    """
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    if profile is None:
        since = f", since {SLID_OUT}" if retained_bytes > full_bytes else ""
        return f"everything, {size(retained_bytes)}{since}"
    asked = profile.asked
    if (decided := _decided_here(cache)) is not None and decided.retention is not None:
        asked = f"{asked} (retention {decided.retention:.4f} reached)"
    elif asked and profile.share_of_16_bits is None and decided is None:
        # decided at one length: sinks and window weigh more in a shorter prompt
        asked += f" at {profile.context_tokens:,} tokens"
    return f"{share_text(share, asked)}, {size(retained_bytes)} instead of {size(full_bytes)}"


def _answer_prompt(asked: Asked) -> None:
    """One prompt, one answer, as the model's own ``generate()`` gives it."""
    text, _ = _given_prompt(asked)
    loaded, make = _load(asked)
    inputs = _tokenized(loaded, text, asked.chat)
    n_tokens = int(inputs["input_ids"].shape[1])
    if n_tokens < 1:
        raise InputError("the prompt has no tokens; give some text")
    limit = _shape(loaded).max_context_tokens
    if limit is not None and n_tokens + asked.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {n_tokens:,} tokens and an answer of up to {asked.max_new_tokens:,} are "
            f"beyond the {limit:,} tokens of {loaded.model_id}; shorten the prompt or "
            "--max-new-tokens"
        )
    cache = make(n_tokens)
    _note_way(cache, asked)
    answer = _answered(loaded, inputs, cache, asked)
    _note_whole(cache, n_tokens)
    if wants_json():
        profile = None if asked.full else asked.profile
        print_json({"model": loaded.model_id, "profile": profile, **answer})
        return
    deciding, speed = answer["decision_seconds"], answer["decode_tokens_per_second"]
    times = f"prefill {duration(answer['prefill_seconds'])}"
    times += "" if deciding is None else f", {duration(deciding)} of it to decide the budgets"
    times += "" if speed is None else f", then {speed:.1f} tokens/s"
    sizes = answer["prompt_retained_bytes"], answer["prompt_full_bytes"]
    kept = _kept_text(cache, answer["share"], *sizes)
    with_answer = size(answer["retained_bytes"])
    many = f"{n_tokens:,} prompt and {answer['new_tokens']:,} new tokens"
    note(f"[{many}; {times}]")
    note(f"[cache of the prompt: {kept}, {with_answer} with the answer]")


def _tokenized(loaded: LoadedModel, text: str, chat: bool | None) -> dict[str, Any]:
    tokenizer, in_chat = loaded.tokenizer, wants_chat(loaded.tokenizer, chat)
    if in_chat:
        messages = [{"role": "user", "content": text}]
        text = chat_text(tokenizer, messages, way_out=without_chat())
    # a chat template writes the special tokens itself
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not in_chat)
    device = input_device(loaded.model)
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def _answered(loaded: LoadedModel, inputs: Any, cache: Any, asked: Asked) -> dict[str, Any]:
    """Generate and measure it; unknown is None."""
    from kvalloc.models.quiet import quiet_transformers
    from kvalloc.runtime.account import kept_bytes

    n_tokens = int(inputs["input_ids"].shape[1])
    with ExitStack() as waiting, quiet_transformers():
        waiting.enter_context(slow("reading the prompt"))
        clock = _clock(loaded.tokenizer, cache, stream=not wants_json(), waiting=waiting)
        try:
            ids = loaded.model.generate(
                **inputs,
                past_key_values=cache,
                **_drawing(asked),
                max_new_tokens=asked.max_new_tokens,
                streamer=clock,
            )
        except KeyboardInterrupt:
            clock.end()  # what is said next gets a line of its own
            raise
    new = ids[0, n_tokens:]
    begun, first, last = clock.seconds[0], clock.seconds[1], clock.seconds[-1]
    steps = len(clock.seconds) - 2
    apart = None if asked.full else kept_bytes(cache.layers)  # late eviction came after the prompt
    return {
        "answer": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": n_tokens,
        "new_tokens": int(new.shape[0]),
        **_cache_facts(loaded, cache, n_tokens),
        "share": clock.prompt_share if apart is None else cache.share,
        "prompt_retained_bytes": clock.prompt_retained_bytes if apart is None else apart,
        "prompt_full_bytes": _shape(loaded).full_bytes(n_tokens),
        "prefill_seconds": first - begun,
        "decision_seconds": getattr(cache, "decision_seconds", None),
        "decode_tokens_per_second": steps / (last - first) if steps > 0 else None,
    }


def _drawing(asked: Asked) -> dict[str, Any]:
    """How ``generate()`` picks tokens: as `kvalloc.runtime.answering.answer` does."""
    if asked.temperature is None:
        return {"do_sample": False}
    import torch

    torch.manual_seed(asked.seed or 0)
    return {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}


def _clock(tokenizer: Any, cache: Any, *, stream: bool, waiting: ExitStack) -> Any:
    """A streamer that notes when tokens came, and prints the answer as it grows if wanted.

    With the first token the waiting is over.
    """
    from transformers import TextStreamer

    from kvalloc.evaluate.caches import stored_bytes

    class Clock(TextStreamer):
        seconds: list[float]
        prompt_retained_bytes: int
        prompt_share: float

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())
            if len(self.seconds) == 2:  # the first token is chosen and has not been run
                waiting.close()
                self.prompt_retained_bytes = stored_bytes(cache)
                self.prompt_share = getattr(cache, "share", 1.0)
            if stream:
                super().put(value)  # type: ignore[no-untyped-call]

        def end(self) -> None:
            if stream:
                super().end()  # type: ignore[no-untyped-call]

    clock = Clock(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock.seconds = []
    return clock


def _ask_document(asked: Asked) -> None:
    """A document, read or loaded, saved or not, and any number of questions about it."""
    reading = _read(asked) if asked.cache is None else _loaded(asked, asked.cache)
    facts: dict[str, Any] = {
        "model": reading.loaded.model_id,
        "cache": asked.cache,
        "saved": asked.save_cache,
        "profile": asked.profile,
        **reading.as_dict(),
    }
    note(reading.summary(facts["retained_bytes"], facts["full_bytes"]))
    if asked.save_cache is not None:
        stored = _save(reading, asked.save_cache)
        note(f"saved as {asked.save_cache}, {size(stored)}")
    asker = _Asker(reading, asked)
    for question in asked.question:
        asker.check_room(question)  # all of them before the first answer
    rows = [asker.ask(question) for question in asked.question]
    if asked.ask or (asked.cache is not None and not asked.question):
        rows = _ask_typed(asker, keep_turns=asked.keep_turns)
    if wants_json():
        print_json({**facts, "answers": rows})


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """A document that questions can be asked about.

    Attributes
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        Holds the document.
    form : DocumentForm
        What stands around questions and answers.
    name : str
        Of the document, for people.
    read_seconds : float or None
        What reading took, now or when it was saved; None where that was not noted.
    load_seconds : float or None
        What loading took; None where it was read.
    """

    loaded: LoadedModel
    cache: Any
    form: DocumentForm
    name: str
    read_seconds: float | None
    load_seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was read and what it takes, before any question, as plain values."""
        tokens = int(self.cache.get_seq_length())
        return {
            "document": self.name,
            "document_tokens": tokens,
            **_cache_facts(self.loaded, self.cache, tokens),
            "read_seconds": self.read_seconds,
            "load_seconds": self.load_seconds,
            "decision_seconds": self._decision_seconds,
        }

    def summary(self, retained_bytes: int, full_bytes: int) -> str:
        """What was read and what it takes on one line."""
        if self.load_seconds is None:
            assert self.read_seconds is not None  # it was read just now
            how = f"read in {duration(self.read_seconds)}"
            if self._decision_seconds is not None:
                how += f", {duration(self._decision_seconds)} of it to decide the budgets"
        else:
            how = f"loaded in {duration(self.load_seconds)}"
            if self.read_seconds is not None:
                times = self.read_seconds / self.load_seconds
                how += f" (reading it took {duration(self.read_seconds)}, {times:,.0f}x as long)"
        share = getattr(self.cache, "share", 1.0)
        kept = _kept_text(self.cache, share, retained_bytes, full_bytes)
        return f"{self.name}: {self.cache.get_seq_length():,} tokens {how}; cache: {kept}"

    @property
    def _decision_seconds(self) -> float | None:
        """How much of reading was deciding the budgets; None where they were stored."""
        return getattr(self.cache, "decision_seconds", None) if self.load_seconds is None else None


def _read(asked: Asked) -> _Reading:
    """Let the model read the document into a new cache."""
    import torch

    from kvalloc.models.quiet import quiet_transformers

    text, name = _given_prompt(asked)
    loaded, make = _load(asked)
    form = DocumentForm.of(loaded.tokenizer, asked.chat)
    ids = form.document_ids(loaded.tokenizer, text)
    cache = make(len(ids))
    _note_way(cache, asked)
    with slow(f"reading {name}"):
        _check_room(loaded, len(ids), _room(form, loaded, asked))
        device = input_device(loaded.model)
        prompt = torch.tensor([ids], device=device)
        start = time.perf_counter()
        with torch.no_grad(), quiet_transformers():
            loaded.model(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
        if asked.save_cache is not None and hasattr(cache, "evict"):
            cache.evict()  # nobody asks before it is saved: the document's own end decides
        seconds = time.perf_counter() - start
    _note_whole(cache, len(ids))
    return _Reading(loaded=loaded, cache=cache, form=form, name=name, read_seconds=seconds)


def _loaded(asked: Asked, path: Path) -> _Reading:
    """Take the document from a file that `_save` wrote, in the type that it was read in."""
    from kvalloc.formats.saved_cache import SavedCacheHeader
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    start = time.perf_counter()
    header, tensors = SavedCacheHeader.read(path)  # before the model is loaded
    seconds = time.perf_counter() - start
    dtype, notes = header.dtype, header.notes
    if asked.dtype not in (None, dtype):
        raise InputError(
            f"{path} holds {dtype} entries, and --dtype is {asked.dtype}; leave out --dtype, or "
            "read the document again"
        )
    loaded = load(asked.model, {**asked.typed, "dtype": dtype})
    from kvalloc.runtime.loading import filled_cache

    form = DocumentForm.of(
        loaded.tokenizer, bool(notes.get("chat")) if asked.chat is None else asked.chat
    )
    start = time.perf_counter()
    cache = filled_cache(path, header, tensors, loaded.model, asked.allow_other_model)
    seconds += time.perf_counter() - start
    if cache.batch != 1:
        raise InputError(
            f"{path} holds {cache.batch} texts at once, and questions are about one; save a cache "
            "of one"
        )
    _check_room(loaded, int(cache.get_seq_length()), _room(form, loaded, asked))
    return _Reading(
        loaded=loaded,
        cache=cache,
        form=form,
        name=str(notes.get("document") or path),
        read_seconds=header.read_seconds,
        load_seconds=seconds,
    )


def _save(reading: _Reading, path: Path) -> int:
    """Save a document that was read; returns the bytes of the file."""
    from kvalloc.runtime.saving import save_cache

    chat = not reading.form.special
    notes = {"document": reading.name, "read_seconds": reading.read_seconds, "chat": chat}
    save_cache(reading.cache, path, notes=notes)
    return path.stat().st_size


def _room(form: DocumentForm, loaded: LoadedModel, asked: Asked) -> int:
    """Tokens that the longest question and its answer need; the shortest where none is known."""
    questions = asked.question or [""]
    longest = max(len(form.question_ids(loaded.tokenizer, one)) for one in questions)
    return longest + asked.max_new_tokens


def _check_room(loaded: LoadedModel, document_tokens: int, room_tokens: int) -> None:
    """Refuse a document after which questions have no room."""
    limit = _shape(loaded).max_context_tokens
    if limit is not None and document_tokens + room_tokens > limit:
        raise InputError(
            f"a document of {document_tokens:,} tokens leaves no room for a question and its "
            f"answer, {room_tokens:,} tokens, within the {limit:,} of {loaded.model_id}; shorten "
            "the document, the question or --max-new-tokens"
        )


class _Asker:
    """Asks questions about one document.

    Answers are written to stdout as they come, an empty line between two of them wherever nothing
    else is shown there; with ``--json`` nothing is.
    """

    def __init__(self, reading: _Reading, asked: Asked) -> None:
        from kvalloc.evaluate.caches import end_tokens

        self._reading, self._asked = reading, asked
        self._stream = not wants_json()
        self._quiet = is_quiet() or wants_json()
        self._ends = end_tokens(reading.loaded.model, reading.loaded.tokenizer)
        # Of the answer before: its last token was never fed, as nothing followed it.
        self._unfed: list[int] = []
        self._n_answers = 0
        self._answering = False  # whether there is an answer or the beginning of one

    def check_room(self, question: str) -> None:
        """Refuse a question for which the model's context has no room."""
        held = int(self._reading.cache.get_seq_length())
        needed = len(self._ids(question)) + self._asked.max_new_tokens
        _check_room(self._reading.loaded, held, needed)

    def ask(self, question: str, *, show: bool = True) -> dict[str, Any]:
        """Answer one question, and show it, too, where it was not typed in a terminal.

        Returns
        -------
        dict
            Of plain values, for ``--json``.

        Raises
        ------
        InputError
            If there is no room for it.
        """
        self.check_room(question)
        # in a terminal the question, on stderr, stands between the answers on stdout
        shown_together = sys.stdout.isatty() and sys.stderr.isatty()
        if self._answering and self._stream and (self._quiet or not shown_together):
            print()
        self._answering = True
        if show and not self._quiet:
            _say("")
            _say(f"> {question.strip()}", "bold")
        ids = self._ids(question)
        start = time.perf_counter()
        found, seconds = self._answered(ids)
        self._n_answers += 1
        if self._asked.keep_turns:
            self._unfed = [token for token in found[-1:] if token not in self._ends]
        first, steps = seconds[0] - start, len(found) - 1
        speed = steps / (seconds[-1] - seconds[0]) if steps else None
        if not self._quiet:
            then = "" if speed is None else f", then {speed:.1f} tokens/s"
            many = "s" if len(found) > 1 else ""
            _say(f"{len(found):,} token{many}; the first after {duration(first)}{then}", "dim")
        return {
            "question": question.strip(),
            "answer": self._reading.loaded.tokenizer.decode(found, skip_special_tokens=True),
            "question_tokens": len(ids),
            "new_tokens": len(found),
            "first_token_seconds": first,
            "decode_tokens_per_second": speed,
        }

    def _ids(self, question: str) -> list[int]:
        turn = self._asked.keep_turns and self._n_answers > 0
        form, tokenizer = self._reading.form, self._reading.loaded.tokenizer
        return [*self._unfed, *form.question_ids(tokenizer, question, turn=turn)]

    def _answered(self, ids: list[int]) -> tuple[list[int], list[float]]:
        """The answer's tokens, and when each of them came."""
        import torch
        from transformers import TextStreamer

        from kvalloc.models.quiet import quiet_transformers
        from kvalloc.runtime.answering import answer

        loaded = self._reading.loaded
        streamer: Any = TextStreamer(loaded.tokenizer, skip_special_tokens=True)
        found: list[int] = []
        seconds: list[float] = []
        with quiet_transformers():
            tokens = answer(
                loaded.model,
                self._reading.cache,
                ids,
                max_new_tokens=self._asked.max_new_tokens,
                ends=self._ends,
                keep=self._asked.keep_turns,
                temperature=self._asked.temperature,
                seed=self._asked.seed or 0,
            )
            try:
                for token in tokens:
                    seconds.append(time.perf_counter())
                    found.append(token)
                    if self._stream:
                        streamer.put(torch.tensor([token]))
            finally:
                if self._stream:  # what is said next gets a line of its own
                    streamer.end()
        return found, seconds


def _ask_typed(asker: _Asker, *, keep_turns: bool) -> list[dict[str, Any]]:
    """Answer questions as they are typed; in a terminal a mistake or Ctrl-C ends no more than one.

    Raises
    ------
    InputError
        If there was no question in a stdin that is no terminal, or one cannot be asked.
    """
    rows = []
    interactive = sys.stdin is not None and sys.stdin.isatty()
    for question in _typed_questions():
        try:
            rows.append(asker.ask(_check_text(question, "the question"), show=not interactive))
        except InputError as error:
            if not interactive:
                raise
            _say(str(error), "red")
        except KeyboardInterrupt:
            if not interactive or keep_turns:  # the conversation would go on from half an answer
                raise
            _say("broken off", "dim")
    if not rows and not interactive:
        raise InputError(
            "there is no question; give --question TEXT, or questions on stdin, a line each"
        )
    return rows


def _typed_questions() -> Iterator[str]:
    """Questions from stdin, a line each: prompted for in a terminal, where an empty line ends."""
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        try:
            yield from (line.strip() for line in sys.stdin if line.strip())
        except UnicodeDecodeError as error:
            raise InputError(
                f"stdin is not UTF-8 text (byte {error.start} cannot be read); give questions as "
                "text, a line each"
            ) from error
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and a history for input())
    if not (is_quiet() or wants_json()):
        _say("Ask; an empty line or Ctrl-D ends.", "dim")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _say("")
            return
        if not line:
            return
        yield line


def _say(text: str, style: str | None = None) -> None:
    """A line on stderr, as it stands: nothing in it is read as rich's marks or as emoji."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text(plain(text)), style=style)
