"""``kvalloc generate``: answer a prompt with a reduced cache."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.models import Device, Dtype, ModelName
from kvalloc.cli.output import Json, Quiet, duration, note, print_json, size
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.budget_profile import BudgetProfile
    from kvalloc.models import LoadedModel

EXAMPLES = """\
  kvalloc generate demo --profile p.json --prompt-file prompt.txt
  kvalloc generate demo --full --prompt "What is a KV cache?" --max-new-tokens 40
  kvalloc generate demo --profile p.json --policy tova --prompt-file prompt.txt
  cat prompt.txt | kvalloc generate demo --profile p.json --json
"""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What generating gave; seconds per token are None where no second token came."""

    text: str
    prompt_tokens: int
    new_tokens: int
    retained_bytes: int
    full_bytes: int
    prefill_seconds: float
    decode_tokens_per_second: float | None


def generate(
    model: ModelName,
    profile: Annotated[
        str | None,
        typer.Option(metavar="P.json", help="A budget profile, or the name of a shipped one."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with the prompt; stdin without either."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Length of the answer at most, tokens.")
    ] = 128,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat form, or not. Where the model has one by "
            "default.",
            show_default=False,
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Use the full cache, to compare with.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Pick the entries in another way within the same budgets: a policy, or a scorer "
            "whose best stay; see 'kvalloc policies'.",
        ),
    ] = None,
    policy_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A parameter of --policy; may be repeated."),
    ] = None,
    decode_every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Keep the budget while answering, too: go back to it every N tokens. By default "
            "the answer is never evicted.",
        ),
    ] = None,
    allow_other_model: Annotated[
        bool,
        typer.Option("--allow-other-model", help="Accept a profile of a model of the same sizes."),
    ] = False,
    dtype: Dtype = "float32",
    device: Device = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a prompt with a reduced cache.

    The cache keeps of the prompt only what the budget profile grants.
    The answer goes to stdout, what it took to stderr. Always the most likely token is taken, so
    that answers can be compared.
    """
    budgets = _budgets(profile, full=full)
    if policy_option and policy is None:
        raise InputError("--policy-option belongs to a policy; name it with --policy")
    if (policy is not None or decode_every is not None) and budgets is None:
        raise InputError("--policy and --decode-every keep to budgets; they do not go with --full")
    text = _prompt(prompt, prompt_file)
    from kvalloc.models import load_model, require_run_packages

    require_run_packages()
    from kvalloc.cli.progress import slow

    if budgets is not None and policy is not None:
        budgets = _with_policy(budgets, policy, policy_option or [])
    with slow(f"loading {model}", quiet=quiet):
        loaded = load_model(
            model, dtype=dtype, device=device, notify=lambda line: note(line, quiet=quiet)
        )
    cache = _cache(loaded, budgets, allow_other_model=allow_other_model, decode_every=decode_every)
    inputs = _tokenise(loaded, text, chat)
    n_tokens = int(inputs["input_ids"].shape[1])
    _check_length(loaded, n_tokens, max_new_tokens)
    if budgets is not None and int(budgets.budgets_for(n_tokens).min()) >= n_tokens:
        note(
            f"note: the prompt of {n_tokens} tokens is too short to leave anything out: "
            "everything is kept",
            quiet=quiet,
        )
    answer = _generate(loaded, inputs, cache, max_new_tokens, stream=not json)
    if json:
        print_json(_as_json(answer, loaded, profile if budgets is not None else None, budgets))
    else:
        note(_summary(answer), quiet=quiet)


def _budgets(profile: str | None, *, full: bool) -> BudgetProfile | None:
    if profile is None:
        if full:
            return None
        raise InputError(
            "say which budgets to use with --profile P.json, or take the full cache with --full"
        )
    from kvalloc.library import load_profile

    found = load_profile(profile)
    if full:
        return None
    return found


def _with_policy(budgets: BudgetProfile, name: str, pairs: list[str]) -> BudgetProfile:
    from kvalloc.cli.targets import plugin_options, typed_options
    from kvalloc.registry import SCORERS
    from kvalloc.registry import names as registered
    from kvalloc.runtime.policies import changed_policy, policy_class, policy_names, policy_of
    from kvalloc.scorers import scorer_class

    options = {}
    if pairs:
        a_scorer = name not in policy_names() and name in registered(SCORERS)
        known = dict(plugin_options(scorer_class(name) if a_scorer else policy_class(name)))
        known.pop("scorer", None)
        options = typed_options("policy", name, known, pairs, example="seed=1")
    policy = changed_policy(budgets.policy, name, options)
    policy_of(policy)  # refused before the model is loaded
    return budgets.with_policy(policy)


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise InputError("--prompt and --prompt-file are two prompts at once; give one of them")
    if prompt is not None:
        text, where = prompt, "--prompt"
    elif file is not None:
        text, where = _read_file(file), str(file)
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("there is no prompt; give --prompt TEXT, --prompt-file FILE or stdin")
        text, where = _decode(sys.stdin.buffer.read(), "stdin"), "stdin"
    if not text.strip():
        raise InputError(f"the prompt from {where} is empty; give some text")
    return text


def _read_file(file: Path) -> str:
    try:
        return _decode(file.read_bytes(), str(file))
    except FileNotFoundError:
        raise InputError(f"there is no file {file}; check the path") from None
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror})") from error


def _decode(data: bytes, where: str) -> str:
    if b"\0" in data:
        raise InputError(f"{where} is not text (it holds zero bytes); give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start} cannot be read); convert it to UTF-8"
        ) from error


def _cache(
    loaded: LoadedModel,
    budgets: BudgetProfile | None,
    *,
    allow_other_model: bool,
    decode_every: int | None,
) -> Any:
    if budgets is not None:
        return budgets.cache(
            loaded.model, allow_other_model=allow_other_model, decode_every=decode_every
        )
    from transformers import DynamicCache

    return DynamicCache(config=loaded.model.config)


def _tokenise(loaded: LoadedModel, text: str, chat: bool | None) -> Any:
    tokenizer = loaded.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise InputError(f"{loaded.model_id} has no chat form; leave out --chat")
    if has_template if chat is None else chat:
        written = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        # the template writes the special tokens
        inputs = tokenizer(written, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(text, return_tensors="pt")
    device = loaded.model.get_input_embeddings().weight.device
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def _check_length(loaded: LoadedModel, n_tokens: int, max_new_tokens: int) -> None:
    from kvalloc.models import shape_of

    if n_tokens < 1:
        raise InputError("the prompt has no tokens; give some text")
    limit = shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens
    if limit is not None and n_tokens + max_new_tokens > limit:
        raise InputError(
            f"a prompt of {n_tokens} tokens and an answer of up to {max_new_tokens} are beyond the "
            f"{limit} tokens of {loaded.model_id}; shorten the prompt or --max-new-tokens"
        )


def _generate(
    loaded: LoadedModel, inputs: Any, cache: Any, max_new_tokens: int, *, stream: bool
) -> _Answer:
    from kvalloc.evaluate.caches import stored_bytes
    from kvalloc.models import shape_of
    from kvalloc.quiet import quiet_transformers

    n_tokens = int(inputs["input_ids"].shape[1])
    clock = _clock(loaded.tokenizer, stream=stream)
    with quiet_transformers():
        ids = loaded.model.generate(
            **inputs,
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            streamer=clock,
        )
    new = ids[0, n_tokens:]
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    first, last = clock.seconds[1], clock.seconds[-1]
    steps = len(clock.seconds) - 2
    return _Answer(
        text=loaded.tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=n_tokens,
        new_tokens=int(new.shape[0]),
        retained_bytes=stored_bytes(cache),
        full_bytes=shape.full_bytes(int(cache.get_seq_length())),
        prefill_seconds=first - clock.seconds[0],
        decode_tokens_per_second=steps / (last - first) if steps > 0 else None,
    )


def _clock(tokenizer: Any, *, stream: bool) -> Any:
    """A streamer that notes when tokens came, and prints the answer as it grows if wanted."""
    from transformers import TextStreamer

    class Clock(TextStreamer):
        seconds: list[float]

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())
            if stream:
                super().put(value)  # type: ignore[no-untyped-call]

        def end(self) -> None:
            if stream:
                super().end()  # type: ignore[no-untyped-call]

    clock = Clock(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock.seconds = []
    return clock


def _as_json(
    answer: _Answer, loaded: LoadedModel, profile: str | None, budgets: BudgetProfile | None
) -> dict[str, Any]:
    return {
        "model": loaded.model_id,
        "profile": profile,
        "policy": None if budgets is None else budgets.policy.name,
        "scorer": None if budgets is None else budgets.policy.scorer,
        "other_policies": [] if budgets is None else [p.title for p in budgets.other_policies],
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        "retained_bytes": answer.retained_bytes,
        "full_bytes": answer.full_bytes,
        "prefill_seconds": answer.prefill_seconds,
        "decode_tokens_per_second": answer.decode_tokens_per_second,
    }


def _summary(answer: _Answer) -> str:
    speed = ""
    if answer.decode_tokens_per_second is not None:
        speed = f", then {answer.decode_tokens_per_second:.1f} tokens/s"
    share = answer.retained_bytes / answer.full_bytes
    return (
        f"[{answer.prompt_tokens:,} prompt and {answer.new_tokens:,} new tokens; cache "
        f"{size(answer.retained_bytes)} of {size(answer.full_bytes)} ({share:.1%}); prefill "
        f"{duration(answer.prefill_seconds)}{speed}]"
    )
