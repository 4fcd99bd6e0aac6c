"""``kvalloc generate``: answer a prompt with a reduced cache."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli import targets
from kvalloc.cli.options import Device, Json, ModelName, Quiet, from_fields
from kvalloc.cli.output import SLID_OUT, duration, note, print_json, size
from kvalloc.cli.progress import load, slow
from kvalloc.errors import InputError, nearest
from kvalloc.units import parse_fraction

if TYPE_CHECKING:
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

_TARGETS = ("target_retention", "budget", "budget_tokens", "memory")
_WITH_TARGET = ("level", "solver")
_REDUCING = (
    *_TARGETS,
    *_WITH_TARGET,
    *("profile", "full", "adapt", "measured_tokens", "hold"),
    *("policy", "policy_option", "decode_every"),
)
"""Options that say how a prompt is reduced: a saved cache was reduced when it was saved."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of ``kvalloc generate``, as typed."""

    model: ModelName
    profile: Annotated[
        str | None,
        typer.Option(metavar="P.json", help="A budget profile, or the name of a shipped one."),
    ] = None
    target_retention: targets.TargetRetention = None
    budget: targets.Budget = None
    budget_tokens: targets.BudgetTokens = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="At most this much for the prompt's cache, such as 512MiB; the answer comes on "
            "top.",
        ),
    ] = None
    level: Annotated[
        str | None,
        typer.Option(metavar="layer|head", help="With a target: what gets a budget."),
    ] = None
    solver: Annotated[
        str | None, typer.Option(metavar="NAME", help="With a target: who decides.")
    ] = None
    adapt: Annotated[
        float | None,
        typer.Option(
            parser=parse_fraction,
            metavar="SHARE",
            help="Let the prompt move the profile's budgets by at most this share, such as 0.25, "
            "at the same total.",
        ),
    ] = None
    measured_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --adapt or a target: measure only N tokens of a longer prompt, from both "
            "of its ends.",
        ),
    ] = None
    hold: Annotated[
        bool,
        typer.Option(
            "--hold",
            help="With --adapt or a target: hold the prompt's full cache and decide from it, "
            "instead of reading the prompt twice.",
        ),
    ] = False
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the prompt; stdin without either."),
    ] = None
    question: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="A question about the prompt, which is then a document; may be repeated. Each "
            "one follows the document alone.",
        ),
    ] = None
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask for questions; without a terminal, a line each.")
    ] = False
    keep_turns: Annotated[
        bool,
        typer.Option("--keep-turns", help="A conversation: each question follows the answers."),
    ] = False
    save_cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the cache with the document, for --cache."),
    ] = None
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the document from a cache that was saved."),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Length of an answer at most, tokens.")
    ] = 128
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat form, or not. Where the model has one by "
            "default.",
            show_default=False,
        ),
    ] = None
    full: Annotated[bool, typer.Option("--full", help="Use the full cache, to compare with.")] = (
        False
    )
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pick the entries in another way within the same budgets: a policy, or a scorer "
            "whose best stay; see 'kvalloc policies'.",
        ),
    ] = None
    policy_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A parameter of --policy; may be repeated."),
    ] = None
    decode_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Keep the budget while answering, too: go back to it every N tokens. By default "
            "the answer is never evicted.",
        ),
    ] = None
    allow_other_model: Annotated[
        bool,
        typer.Option("--allow-other-model", help="Accept a profile of a model of the same sizes."),
    ] = False
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of weights and cache: float32, bfloat16 or float16. float32 by default, and with "
            "--cache what it was saved in.",
        ),
    ] = None
    device: Device = None
    json: Json = False
    quiet: Quiet = False

    @property
    def questions(self) -> list[str]:
        """Questions that were typed beforehand."""
        return self.question or []

    @property
    def target(self) -> dict[str, Any]:
        """What each prompt is to reach, and how that is decided, as far as it was typed."""
        return {name: getattr(self, name) for name in self.given(*_TARGETS, *_WITH_TARGET)}

    def given(self, *names: str) -> list[str]:
        """Those of some options that were typed."""
        unset = (None, False)
        return [name for name in names if not any(getattr(self, name) is one for one in unset)]


@from_fields(Asked)
def generate(asked: Asked) -> None:
    """Answer a prompt, or questions about a long one, with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants, or what is decided for the
    prompt itself with --target-retention, --budget, --budget-tokens or --memory.
    Answers go to stdout, what they took to stderr; in a pipe or a file an empty line stands
    between two answers, and --json keeps them apart whatever is in them. Always the most likely
    token is taken, so that answers can be compared.
    """
    if asked.cache is None:
        _check_reduction(asked)
    elif given := asked.given(*_REDUCING):
        raise InputError(
            f"{_flag(given[0])} says how a document is reduced, and the one in --cache was reduced "
            "when it was saved; leave it out"
        )
    _check_documents(asked)
    if asked.questions or asked.ask or asked.save_cache or asked.cache:
        from kvalloc.cli.generate_document import ask_document

        ask_document(asked)
    else:
        _answer_prompt(asked)


def _check_reduction(asked: Asked) -> None:
    """Refuse ways of reducing a prompt that contradict each other."""
    reached = [_flag(name) for name in asked.given(*_TARGETS)]
    if not reached and asked.target:
        raise InputError(
            f"{_flag(next(iter(asked.target)))} says how a target for each prompt is decided; "
            "give one, such as --target-retention 0.9"
        )
    if reached and asked.profile is not None:
        raise InputError(
            f"{reached[0]} decides for each prompt and --profile was decided before; give one of "
            "them (--adapt moves a profile by the prompt)"
        )
    if not reached and asked.profile is None and not asked.full:
        raise InputError(
            "say which budgets to use with --profile P.json, decide them for the prompt with "
            "--target-retention 0.9, or take the full cache with --full"
        )
    if reached and asked.full:
        raise InputError(f"{reached[0]} reduces the cache and --full does not; give one of them")
    if asked.policy_option and asked.policy is None:
        raise InputError("--policy-option belongs to a policy; name it with --policy")
    if asked.full and (asked.policy is not None or asked.decode_every is not None):
        raise InputError("--policy and --decode-every keep to budgets; they do not go with --full")
    if asked.adapt is not None and (asked.profile is None or asked.full):
        raise InputError("--adapt moves the budgets of a --profile; give one")
    of_prompt = asked.given("hold", "measured_tokens")
    if of_prompt and asked.adapt is None and not reached:
        raise InputError(
            f"{_flag(of_prompt[0])} is about budgets for each prompt; give it with --adapt or a "
            "target"
        )


def _check_documents(asked: Asked) -> None:
    """Refuse what contradicts itself about documents and questions, before anything is read."""
    for place, question in enumerate(asked.questions, start=1):
        which = f"question {place}" if len(asked.questions) > 1 else "the question"
        if not check_text(question, which).strip():
            raise InputError(f"{which} is empty; ask something")
    documents = bool(asked.questions or asked.ask or asked.save_cache or asked.cache)
    if asked.keep_turns and not documents:
        raise InputError("--keep-turns is about questions; give --question or --ask, too")
    if asked.questions and asked.ask:
        raise InputError("--question and --ask both give the questions; choose one of them")
    prompted = asked.prompt is not None or asked.prompt_file is not None
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
                f"not go with {_flag(changing[0])}; leave one of them out"
            )
        check_writable(asked.save_cache)
    if asked.ask and asked.cache is None and not prompted:
        raise InputError(
            "with --ask the questions come from stdin, so the document has to come from "
            "--prompt-file, --prompt or --cache"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_text(text: str, where: str) -> str:
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


def given_prompt(asked: Asked) -> tuple[str, str]:
    """The prompt, and where it came from: the command line, a file or stdin."""
    prompt, file = asked.prompt, asked.prompt_file
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file are two prompts at once; give one of them")
    if prompt is not None:
        text, where = check_text(prompt, "--prompt"), "--prompt"
    elif file is not None:
        try:
            text, where = _decoded(file.read_bytes(), str(file)), file.name
        except FileNotFoundError:
            raise InputError(f"there is no file {file}; check the path") from None
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


def load_with_cache(asked: Asked) -> tuple[LoadedModel, Any]:
    """The model and an empty cache for it, after all checks that need no model.

    Raises
    ------
    KVAllocError
        If model and budgets do not fit, or the policy cannot be made.
    """
    from kvalloc.models.loading import require_run_packages

    budgets = _budgets(asked)
    if target := asked.target:
        from kvalloc.allocation.request import Request

        Request.parse(**{name: value for name, value in target.items() if name != "solver"})
    require_run_packages()
    _check_policy(asked, budgets)
    loaded = load(
        asked.model, dtype=asked.dtype or "float32", device=asked.device, quiet=asked.quiet
    )
    if asked.full:
        from transformers import DynamicCache

        return loaded, DynamicCache(config=loaded.model.config)
    picked: dict[str, Any] = {
        "policy": asked.policy,
        "policy_options": _policy_options(asked),
        "decode_every": asked.decode_every,
    }
    by_prompt: dict[str, Any] = {"measured_tokens": asked.measured_tokens, "hold": asked.hold}
    if budgets is not None:
        other = asked.allow_other_model
        return loaded, budgets.cache(
            loaded.model, allow_other_model=other, adapt=asked.adapt, **by_prompt, **picked
        )
    from kvalloc.online.per_prompt import PromptTarget, make_prompt_cache

    return loaded, make_prompt_cache(
        loaded.model, PromptTarget.parse(**target, **by_prompt), **picked
    )


def _budgets(asked: Asked) -> BudgetProfile | None:
    """The stored budgets, if they are to be used."""
    if asked.profile is None:
        return None
    from kvalloc.formats.shipped_profiles import load_profile

    found = load_profile(asked.profile)
    if asked.adapt is not None:
        from kvalloc.online.adaptation import check_adapt

        check_adapt(found, asked.adapt)
    return None if asked.full else found


def _check_policy(asked: Asked, budgets: BudgetProfile | None) -> None:
    """Refuse a policy that cannot be made, before the model is loaded."""
    if asked.policy is None:
        return
    from kvalloc.formats.budget_profile import Policy
    from kvalloc.runtime.policies import changed_policy, policy_of

    own = Policy(scorer="xkv", scorer_parameters={}, sinks=4, window=8)
    given = own if budgets is None else budgets.policy
    policy_of(changed_policy(given, asked.policy, _policy_options(asked)))


def _policy_options(asked: Asked) -> dict[str, Any]:
    """The policy's parameters, each of its type."""
    if asked.policy is None:
        return {}
    from kvalloc.problem.registry import SCORERS, names
    from kvalloc.runtime.policies import policy_class, policy_names
    from kvalloc.scorers import scorer_class

    name, policies, scorers = asked.policy, policy_names(), names(SCORERS)
    if name not in policies and name not in scorers:
        if near := nearest(name, [*policies, *scorers]):
            raise InputError(
                f"there is no policy or scorer {name!r}; {near}'kvalloc policies' and 'kvalloc "
                "scorers' list them"
            )
        return {}  # making it lists those there are
    known = targets.plugin_options(policy_class(name) if name in policies else scorer_class(name))
    known.pop("scorer", None)
    return targets.typed_options("policy", name, known, asked.policy_option or [], example="seed=1")


def _answer_prompt(asked: Asked) -> None:
    """One prompt, one answer, as the model's own ``generate()`` gives it."""
    text, _ = given_prompt(asked)
    loaded, cache = load_with_cache(asked)
    inputs = _tokenized(loaded, text, asked.chat)
    n_tokens = int(inputs["input_ids"].shape[1])
    if n_tokens < 1:
        raise InputError("the prompt has no tokens; give some text")
    limit = context_limit(loaded)
    if limit is not None and n_tokens + asked.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {n_tokens:,} tokens and an answer of up to {asked.max_new_tokens:,} are "
            f"beyond the {limit:,} tokens of {loaded.model_id}; shorten the prompt or "
            "--max-new-tokens"
        )
    answer = _answered(loaded, inputs, cache, asked)
    note_short(cache, n_tokens, quiet=asked.quiet)
    if asked.json:
        profile = None if asked.full else asked.profile
        print_json({"model": loaded.model_id, "profile": profile, **policies_of(cache), **answer})
        return
    deciding, speed = answer["decision_seconds"], answer["decode_tokens_per_second"]
    times = f"prefill {duration(answer['prefill_seconds'])}"
    times += "" if deciding is None else f", {duration(deciding)} of it to decide the budgets"
    times += "" if speed is None else f", then {speed:.1f} tokens/s"
    kept = kept_text(cache, answer["prompt_retained_bytes"], answer["prompt_full_bytes"])
    with_answer = size(answer["retained_bytes"])
    many = f"{n_tokens:,} prompt and {answer['new_tokens']:,} new tokens"
    note(f"[{many}; {times}]", quiet=asked.quiet)
    note(f"[cache of the prompt {kept}, {with_answer} with the answer]", quiet=asked.quiet)


def _tokenized(loaded: LoadedModel, text: str, chat: bool | None) -> dict[str, Any]:
    tokenizer, in_chat = loaded.tokenizer, wants_chat(loaded, chat)
    if in_chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    # a chat template writes the special tokens itself
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not in_chat)
    device = device_of(loaded)
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def wants_chat(loaded: LoadedModel, chat: bool | None) -> bool:
    """Whether the model's chat form is used; where it has one by default.

    Raises
    ------
    InputError
        If it is wanted and there is none.
    """
    has_form = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_form:
        raise InputError(f"{loaded.model_id} has no chat form; leave out --chat")
    return has_form if chat is None else chat


def _answered(loaded: LoadedModel, inputs: Any, cache: Any, asked: Asked) -> dict[str, Any]:
    """Generate, the most likely token each time, and measure it; unknown is None."""
    from kvalloc.models.loading import shape_of
    from kvalloc.models.quiet import quiet_transformers

    n_tokens = int(inputs["input_ids"].shape[1])
    with ExitStack() as waiting, quiet_transformers():
        waiting.enter_context(slow("reading the prompt", quiet=asked.quiet))
        clock = _clock(loaded.tokenizer, cache, stream=not asked.json, waiting=waiting)
        try:
            ids = loaded.model.generate(
                **inputs,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=asked.max_new_tokens,
                streamer=clock,
            )
        except KeyboardInterrupt:
            clock.end()  # what is said next gets a line of its own
            raise
    new = ids[0, n_tokens:]
    begun, first, last = clock.seconds[0], clock.seconds[1], clock.seconds[-1]
    steps = len(clock.seconds) - 2
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    return {
        "answer": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": n_tokens,
        "new_tokens": int(new.shape[0]),
        **granted_fields(cache, n_tokens),
        "prompt_retained_bytes": clock.prompt_retained_bytes,
        "prompt_full_bytes": shape.full_bytes(n_tokens),
        **bytes_of(loaded, cache),
        "prefill_seconds": first - begun,
        "decision_seconds": getattr(cache, "decision_seconds", None),
        "decode_tokens_per_second": steps / (last - first) if steps > 0 else None,
    }


def _clock(tokenizer: Any, cache: Any, *, stream: bool, waiting: ExitStack) -> Any:
    """A streamer that notes when tokens came, and prints the answer as it grows if wanted.

    With the first token the waiting is over.
    """
    from transformers import TextStreamer

    from kvalloc.evaluate.caches import stored_bytes

    class Clock(TextStreamer):
        seconds: list[float]
        prompt_retained_bytes: int

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())
            if len(self.seconds) == 2:  # the first token is chosen and has not been run
                waiting.close()
                self.prompt_retained_bytes = stored_bytes(cache)
            if stream:
                super().put(value)  # type: ignore[no-untyped-call]

        def end(self) -> None:
            if stream:
                super().end()  # type: ignore[no-untyped-call]

    clock = Clock(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock.seconds = []
    return clock


def context_limit(loaded: LoadedModel) -> int | None:
    """The longest context of a model, tokens; None if it does not say."""
    from kvalloc.models.loading import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens


def device_of(loaded: LoadedModel) -> Any:
    """Where a model wants its tokens."""
    return loaded.model.get_input_embeddings().weight.device


def bytes_of(loaded: LoadedModel, cache: Any) -> dict[str, int]:
    """What a cache stores now, and what a full one would."""
    from kvalloc.evaluate.caches import full_bytes, stored_bytes
    from kvalloc.models.loading import shape_of

    shape = shape_of(loaded.model, model_id=loaded.model_id)
    return {"retained_bytes": stored_bytes(cache), "full_bytes": full_bytes(cache, shape)}


def policies_of(cache: Any) -> dict[str, Any]:
    """Who picks the entries of a reduced cache."""
    profile = getattr(cache, "profile", None)
    if profile is None:
        return {"policy": None, "scorer": None, "other_policies": []}
    others = [policy.title for policy in profile.other_policies]
    own = profile.policy
    return {"policy": own.name, "scorer": own.scorer, "other_policies": others}


def note_short(cache: Any, n_tokens: int, *, quiet: bool) -> None:
    """Say so where a prompt was too short to be reduced."""
    if not getattr(cache, "reduced", True):
        note(
            f"note: of a prompt of {n_tokens:,} token{'s' if n_tokens > 1 else ''} these budgets "
            "leave nothing out: everything is kept",
            quiet=quiet,
        )


def _decided_here(cache: Any) -> BudgetProfile | None:
    """Budgets that were decided for this prompt; None of stored ones and of a full cache."""
    decided = getattr(cache, "decision_seconds", None) is not None
    return getattr(cache, "profile", None) if decided else None


def granted_fields(cache: Any, prompt_tokens: int) -> dict[str, Any]:
    """What was asked for as plain values, for ``--json``; all None of a full cache.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    prompt_tokens : int

    Returns
    -------
    dict
        ``requested``: the target of budgets that were decided for this prompt; ``retention``:
        what they reach of it, where that is known; ``granted_bytes``: what the budgets allow a
        prompt of this length.
    """
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    decided = _decided_here(cache)
    requested = {} if decided is None else decided.requested
    known = {name: requested[name] for name in ("target", "value", "adapt") if name in requested}
    return {
        "requested": None if decided is None else known,
        "retention": None if decided is None else decided.retention,
        "granted_bytes": None if profile is None else profile.retained_bytes_at(prompt_tokens),
    }


def kept_text(cache: Any, retained_bytes: int, full_bytes: int) -> str:
    """How much of a prompt is kept, and how much was asked for, in a few words.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    retained_bytes, full_bytes : int
        Of the prompt alone, stored and by a full cache.
    """
    share = f"{retained_bytes / full_bytes:.1%}"
    granted = _granted_text(cache, share)
    beside = f"{share}; {granted}" if granted else share
    since = f", since {SLID_OUT}" if retained_bytes > full_bytes else ""  # a full cache
    return f"{size(retained_bytes)} of {size(full_bytes)} ({beside}){since}"


def _granted_text(cache: Any, share: str) -> str:
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    if profile is None:
        return ""
    target = profile.requested.get("target")
    if _decided_here(cache) is None or "adapt" in profile.requested or target is None:
        # Budgets that were decided at one length have another share at others: sinks and window
        # weigh more in a short prompt.
        elsewhere = f"{profile.retained_bytes / profile.full_bytes:.1%}"
        same = elsewhere == share
        return "" if same else f"the profile: {elsewhere} of {profile.context_tokens:,} tokens"
    value = profile.requested["value"]
    if target == "retention":
        reached = "" if profile.retention is None else f"retention {profile.retention:.4f}, "
        return f"{reached}asked for {value:g} in the fewest bytes"
    text = {
        "budget": f"{100 * value:g}%",
        "budget_tokens": f"{value:,} tokens per KV head",
        "memory": size(value),
    }[str(target)]
    return f"asked for {text} at most"
