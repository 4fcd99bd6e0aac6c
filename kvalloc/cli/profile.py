"""``kvalloc profile``: from a model and text to a score profile."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.calibrating import Lengths, Question, TaskNames, read_recipe
from kvalloc.cli.models import Device, Dtype, ModelName
from kvalloc.cli.output import Json, Quiet, duration, note, print_fields, print_json, size
from kvalloc.cli.targets import bit_widths
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.measure import Document, Prompt
    from kvalloc.models import LoadedModel
    from kvalloc.score_profile import ScoreProfile
    from kvalloc.scorers import Scorer

EXAMPLES = """\
  kvalloc profile demo --samples 4 --context 1024 -o s.safetensors
  kvalloc profile ./my-model --text docs/ --context 8192 --resume -o s.safetensors
  kvalloc profile Qwen/Qwen3-0.6B --prompts prompts.jsonl --scorer snapkv -o s.safetensors
  kvalloc profile demo --samples 8 --loss fast --loss-level head -o s.safetensors
  kvalloc profile demo --scorer snapkv --window 32 --loss fast --loss-level head \\
      --loss-policies usual -o s.safetensors
"""

DEFAULT_SINKS = 4
DEFAULT_RATIO = 0.1
DEFAULT_KINDS = ("needle", "pairs", "kl", "code")
"""`kvalloc.evaluate.calibration.KINDS`, which is not imported without need."""
EACH_TASK = 2
"""Prompts of each kind that are made."""


def profile(
    model: ModelName,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT.safetensors", help="The score profile to write."
        ),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Running text, cut into samples; can be repeated. Public-domain texts that ship "
            "with kvalloc by default.",
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Prompts, one JSON object a line with 'prompt', 'text', 'messages', or 'context' "
            "and 'input'; can be repeated.",
        ),
    ] = None,
    tasks: TaskNames = None,
    question: Question = None,
    lengths: Lengths = None,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Samples to measure; see --sampling-ratio. With --tasks two of each by default.",
        ),
    ] = None,
    sampling_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Without --samples: share of all samples there are; 0.1 by default.",
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Reference context, tokens.")
    ] = 1024,
    scorer: Annotated[
        str, typer.Option(metavar="NAME", help="What is measured; see 'kvalloc scorers'.")
    ] = "xkv",
    window: Annotated[
        int | None,
        typer.Option(metavar="N", help="The scorer's window, tokens; its own by default."),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(metavar="N", help="The scorer's pooling width, tokens; its own by default."),
    ] = None,
    group_reduce: Annotated[
        str | None,
        typer.Option(metavar="mean|max", help="How query heads that share a KV head are reduced."),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(metavar="N", help="First tokens that are never evicted; 4 by default."),
    ] = None,
    count_sinks: Annotated[
        bool, typer.Option("--count-sinks", help="Count the sinks as evictable, as XKV does.")
    ] = False,
    bits: Annotated[
        str | None,
        typer.Option(
            metavar="16,8,4",
            help="Measure what these bit widths do to the attention output too, for "
            "'kvalloc solve --bits'.",
        ),
    ] = None,
    share_length: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Also measure what runs of 2 to N adjacent layers keep when they share the kept "
            "entries, for 'kvalloc solve --share-groups'; 4 at most, 1 measures nothing.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the choice of samples.")] = 0,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="[measured|fast]",
            help="Also measure what reducing each unit alone does to the next-token distribution: "
            "a forward for every unit and level, or a second-order estimate at the price of a few "
            "prefills.",
        ),
    ] = None,
    loss_level: Annotated[
        str, typer.Option(metavar="layer|head", help="What is reduced alone for --loss.")
    ] = "layer",
    probes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --loss measured: estimate everything first, then measure only the N figures "
            "a sample whose measurement may change the solution; all by default.",
        ),
    ] = None,
    loss_policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Policies or scorers whose losses are measured beside the scorer's, so that "
            "'kvalloc solve' chooses one for each unit with its budget; options after a colon, "
            "such as tova,critical,snapkv:window=4:pool=1; 'usual' for a set that does well.",
        ),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what a killed command had finished.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are kept in OUT.safetensors.partial until the profile is complete. With --loss, and no
    text or prompts given, prompts are made as by --tasks needle,pairs,kl,code.
    """
    given = {"window": window, "pool": pool, "group_reduce": group_reduce}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    # Everything that can be refused without the model is refused before it is loaded.
    chosen, folder = _check(output, scorer, options, resume=resume)
    if sinks is not None and count_sinks:
        raise InputError("--sinks and --count-sinks contradict each other; give one of them")
    policies = tuple(loss_policies.split(",")) if loss_policies else ()
    _check_probes(probes, loss)
    _check_loss(loss, loss_level, policies, chosen, DEFAULT_SINKS if sinks is None else sinks)
    recipe = read_recipe(
        *(tasks, question, lengths),
        context=context,
        given=bool(text or prompts),
        default=DEFAULT_KINDS if loss is not None else (),
    )
    if recipe is not None and sampling_ratio is not None:
        raise InputError(
            "--sampling-ratio is a share of the text that is given, and prompts are made here; "
            "say how many with --samples"
        )
    texts = [] if recipe else _read(text or [], prompts or [])
    options |= {
        "samples": samples,
        "sampling_ratio": DEFAULT_RATIO if sampling_ratio is None else sampling_ratio,
        "context": context,
        "scorer": scorer,
        "sinks": DEFAULT_SINKS if sinks is None else sinks,
        "count_sinks": count_sinks,
        "share_length": share_length,
        "seed": seed,
        "loss": loss,
        "loss_level": loss_level,
        "probes": probes,
        "loss_policies": policies,
        "bits": bit_widths(bits),
        "resume": resume,
    }
    from kvalloc.cli.progress import slow
    from kvalloc.models import load_model

    start = time.perf_counter()
    with slow(f"loading {model}", quiet=quiet):
        loaded = load_model(
            model, dtype=dtype, device=device, notify=lambda line: note(line, quiet=quiet)
        )
    if recipe:
        texts = [
            *recipe.make(
                loaded.tokenizer, samples=samples, each=EACH_TASK, context=context, seed=seed
            )
        ]
        options["samples"] = len(texts)
    measured = _measure(loaded, texts, output, folder, options, quiet=quiet)
    _report(measured, output, time.perf_counter() - start, json=json, quiet=quiet)


def _check(
    output: Path, scorer: str, parameters: dict[str, Any], *, resume: bool
) -> tuple[Scorer, Path]:
    """Refuse what is wrong with output and scorer; that and the folder for finished samples."""
    from kvalloc.files import check_writable
    from kvalloc.models import require_run_packages
    from kvalloc.scorers import get_scorer

    check_writable(output)
    chosen = get_scorer(scorer, **parameters)
    require_run_packages()
    return chosen, _partial_folder(output, resume=resume)


def _check_probes(probes: int | None, loss: str | None) -> None:
    from kvalloc.measure.loss_plan import LossPlan

    if probes is None:
        return
    if loss is None:
        raise InputError("--probes are of measured losses; add --loss")
    LossPlan(method=loss, probes=probes)  # type: ignore[arg-type]  # it checks them


def _check_loss(
    loss: str | None, level: str, policies: tuple[str, ...], scorer: Scorer, sinks: int
) -> None:
    from kvalloc.measure.loss_plan import LossPlan

    if loss is not None:
        plan = LossPlan(method=loss, level=level, policies=policies)  # type: ignore[arg-type]
        plan.named_policies(scorer, sinks=sinks)
    elif policies:
        raise InputError("--loss-policies are measured by their losses; add --loss measured|fast")


def _measure(
    loaded: LoadedModel,
    texts: list[Document | Prompt],
    output: Path,
    folder: Path,
    options: dict[str, Any],
    *,
    quiet: bool,
) -> ScoreProfile:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.measure import profile_to_file

    try:
        with ProgressBar("profiling", unit="layers", quiet=quiet) as progress:
            return profile_to_file(
                loaded.model,
                loaded.tokenizer,
                texts,
                output,
                progress=progress,
                model_id=loaded.model_id,
                **options,
            )
    except KeyboardInterrupt:
        if _drop_if_empty(folder):
            raise
        raise KeyboardInterrupt(
            f"interrupted; the finished samples are in {folder}: go on with the same command and "
            "--resume"
        ) from None
    finally:
        _drop_if_empty(folder)


def _read(text: list[Path], prompts: list[Path]) -> list[Document | Prompt]:
    from kvalloc.measure import default_texts, read_prompts, read_texts

    texts: list[Document | Prompt] = [*read_texts(text)]
    for file in prompts:
        texts += read_prompts(file)
    return texts or [*default_texts()]


def _partial_folder(output: Path, *, resume: bool) -> Path:
    from kvalloc.measure.checkpoint import checkpoint_folder

    folder = checkpoint_folder(output)
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise InputError(
            f"{folder} holds an unfinished measurement; go on with --resume, or delete the folder "
            "to start over"
        )
    return folder


def _drop_if_empty(folder: Path) -> bool:
    """Remove a checkpoint without any finished sample: nothing is lost, nothing is left over."""
    if folder.is_dir() and not any(folder.glob("sample_*")):
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()


def _report(
    measured: ScoreProfile, output: Path, seconds: float, *, json: bool, quiet: bool
) -> None:
    file_bytes = output.stat().st_size
    facts: dict[str, Any] = {
        "output": str(output),
        "model": measured.shape.model_id,
        "scorer": measured.scorer,
        "scorer_parameters": measured.scorer_parameters,
        "samples": measured.n_samples,
        "context_tokens": measured.context_tokens,
        "sinks": measured.sinks,
        "window": measured.window,
        "interpolation_error": measured.interpolation_error,
        "text_description": measured.text_description,
        "loss_policies": [policy.title for policy in measured.policies]
        if measured.has_losses
        else None,
        "loss_tokens": None if measured.loss_tokens is None else measured.loss_tokens.tolist(),
        "loss_probes": None if measured.loss_probed is None else int(measured.loss_probed.sum()),
        "seconds": seconds,
        "file_bytes": file_bytes,
    }
    if json:
        print_json(facts)
        return
    if quiet:
        return
    print_fields(
        {
            "model": measured.shape.model_id,
            "measured": f"{_counted(measured.n_samples)} of up to {measured.context_tokens:,} "
            f"tokens with {measured.scorer}, {measured.sinks} sinks, window {measured.window}",
            "text": measured.text_description,
            "time": f"{duration(seconds)}, loading included",
            "written": f"{output} ({size(file_bytes)})",
        }
    )


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"
