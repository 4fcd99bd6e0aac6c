"""What ``kvalloc generate`` is asked for: its options, the prompt, and the model with a cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.allocation.request import TARGETS, Request, RequestOptions
from kvalloc.cli.options import Device, Json, ModelName, Quiet
from kvalloc.cli.progress import load
from kvalloc.cli.targets import plugin_options, typed_options
from kvalloc.errors import InputError, nearest
from kvalloc.units import parse_fraction

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel

OF_A_PROMPT = (*(kind.keyword for kind in TARGETS if kind.keyword != "target_loss"), "level")
"""What of a request can be asked of one prompt: it has no loss curves."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of ``kvalloc generate``, as typed."""

    model: ModelName
    profile: Annotated[
        str | None,
        typer.Option(metavar="P.json", help="A budget profile, or the name of a shipped one."),
    ] = None
    target: RequestOptions = field(default_factory=RequestOptions)
    """Of a request what was typed; `kvalloc.cli.targets.takes` adds its flags."""
    solver: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who decides a target for the prompt.")
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

    def given(self, *names: str) -> list[str]:
        """Those of some options that were typed."""
        values = {**vars(self), **self.target}
        return [name for name in names if not any(values.get(name) is one for one in (None, False))]


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
    target: dict[str, Any] = {
        name: value for name, value in asked.target.items() if value is not None
    }
    if target:
        Request.parse(**asked.target)
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
        loaded.model, PromptTarget.parse(**target, solver=asked.solver, **by_prompt), **picked
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
    known = plugin_options(policy_class(name) if name in policies else scorer_class(name))
    known.pop("scorer", None)
    return typed_options("policy", name, known, asked.policy_option or [], example="seed=1")
