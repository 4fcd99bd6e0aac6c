"""``kvalloc advise``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Unpack

from kvalloc.accounting.engine_formats import formats_for
from kvalloc.allocation.engine_choice import TARGETS, choose, read_target
from kvalloc.allocation.request import RequestOptions, Target
from kvalloc.cli.options import LoadOptions, SolverOptions, takes
from kvalloc.cli.output import ProgressBar, note, print_result
from kvalloc.errors import KVAllocError
from kvalloc.files import make_folder
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.record import kind_of
from kvalloc.formats.shipped_profiles import (
    find_fitted,
    find_formats,
    formats_file,
    load_file,
    shipped_formats,
)
from kvalloc.interop.engines import SYNTAX, by_format, write_choice
from kvalloc.online.solved import LossTarget, grid_length, share_for_loss, solve_share
from kvalloc.report.engines import HEADINGS, KL_NOTE, cells, choice_facts, size_cells
from kvalloc.report.terminal import hanging, table_text
from kvalloc.shape import ModelShape
from kvalloc.units import Option, parse_tokens

OWN_NOTE = (
    "its loss is that of prompts made by 'kvalloc fit', and the engines' that of running text"
)


@dataclass(frozen=True)
class AdviseOptions(LoadOptions):
    """The model, and where files go."""

    model: Annotated[str, Option()]
    """A hub id, a local folder, a .gguf file, 'demo', or a file of 'kvalloc profile --formats'."""

    _: KW_ONLY

    output: Annotated[Path | None, Option("FOLDER")] = None
    """Where to write the file of each engine: flags, JSON or YAML."""


class Row(NamedTuple):
    """An engine's row; its line is a command or a refusal."""

    name: str
    mean: float
    cells: list[str]
    line: str
    facts: dict[str, Any]


@takes(
    only={RequestOptions: (*TARGETS, "context", "batch"), SolverOptions: ["solver", "time_limit"]}
)
def advise(
    options: AdviseOptions, solving: SolverOptions, **request_options: Unpack[RequestOptions]
) -> None:
    """Show in which formats llama.cpp, mlx-lm, vLLM and other engines lose least.

    Each engine has a row: the command to type, bytes at the context, and predicted losses.
    kvalloc's own cache has a row if the model has a fitted file. Losses are measured once for a
    model, which takes minutes, and stored in kvalloc's cache folder.

    Examples
    --------
    kvalloc advise demo --memory 64MiB --context 8k
    kvalloc advise demo --bits 5.5 -o advice
    kvalloc advise m.formats.safetensors --target-loss 0.01 --context 32k
    """
    target: dict[str, Any] = dict(request_options)
    context, batch = target.pop("context", None), target.pop("batch", 1)
    goal, _, requested = read_target(target)  # refuses before anything is measured
    if options.output is not None:
        make_folder(options.output)
    losses = _losses(options)
    longest = losses.shape.max_context_tokens or losses.context_tokens
    context = longest if context is None else parse_tokens(context)
    how = {**target, "solver": solving.solver, "time_limit": solving.time_limit}
    rows, refused, full = list[Row](), dict[str, KVAllocError](), 1
    for name, syntax in SYNTAX.items():
        try:
            choice = choose(losses, name, context=context, batch=batch, **how)
        except KVAllocError as error:
            refused[name] = error
            continue
        full, line, where = choice.full_bytes, syntax.line(choice), syntax.suffix[1:].upper()
        if options.output is not None:
            where = str(options.output / f"{name}{syntax.suffix}")
            write_choice(choice, where)
        if syntax.line is by_format:
            line = f"{where}: {by_format(choice, brief=True)}"
        rows.append(Row(name, choice.mean, cells(choice, full), line, choice_facts(choice)))
    if not rows:
        raise min(refused.values(), key=lambda error: getattr(error, "nearest", None) or 0)
    rows += _kvalloc_row(options, losses.shape, goal, full, (context, batch))
    rows.sort(key=lambda row: row.facts["cache_bytes"] if goal.kind == "loss" else row.mean)
    rows += [
        Row(name, 0, ["-"] * 5, str(why), {"refused": str(why)}) for name, why in refused.items()
    ]
    texts = {"kvalloc": OWN_NOTE, **{name: one.note for name, one in SYNTAX.items()}}
    measured = f"{KL_NOTE}; measured on texts of {losses.context_tokens:,} tokens"
    notes = [measured, *(f"{row.name}: {texts[row.name]}" for row in rows if texts[row.name])]
    if options.output is None:
        notes.append("-o FOLDER writes the files that engines read")
    facts = {row.name: row.facts for row in rows}
    heading = f"{losses.shape.model_id}, {requested}, {context:,} tokens"
    print_result(facts, lines=_lines(heading, rows), notes=notes, always=True)


def _is_file(source: str) -> bool:
    return kind_of(source) not in ("", "model") or source in shipped_formats()


def _losses(options: AdviseOptions) -> FormatLosses:
    if _is_file(options.model):
        losses: FormatLosses = load_file(options.model, [FormatLosses])
        return losses
    from kvalloc.measure import default_texts
    from kvalloc.measure.format_profile import CONTEXT_TOKENS, profile_formats
    from kvalloc.models.loading import shape_of

    loaded = options.load(options.model)
    shape = shape_of(loaded.model)
    if (source := find_formats(shape)) is not None:
        note(f"measured before: {source}")
        return _losses(replace(options, model=source))
    file = formats_file(shape)
    note(f"engine formats were not measured on {shape.model_id} yet; measuring them into {file}")
    make_folder(file.parent)
    with ProgressBar("measuring", unit="layers") as progress:
        return profile_formats(
            loaded.model,
            loaded.tokenizer,
            default_texts(),
            formats=formats_for(shape),
            output=file,
            resume=True,
            progress=progress,
            model_id=loaded.model_id,
            context=min(CONTEXT_TOKENS, shape.max_context_tokens or CONTEXT_TOKENS),
        )


def _kvalloc_row(
    options: AdviseOptions, shape: ModelShape, goal: Target, full: int, size: tuple[int, int]
) -> Iterator[Row]:
    if (file := find_fitted(shape)) is None:
        return
    tokens, share = grid_length(size[0]), goal.value / (full if goal.kind == "memory" else 1)
    if goal.kind == "loss":
        share = share_for_loss(file, LossTarget(nats=goal.value), tokens)
    decided = solve_share(file, share, tokens) if share < 1 else None
    if decided is not None and (loss := decided.expected_loss) is not None:
        stored = decided.retained_bytes_at(*size)
        model = shape.model_id if _is_file(options.model) else options.model
        whole = math.ceil if goal.kind == "loss" else math.floor
        line = f"kvalloc generate {model} --budget {whole(1000 * share) / 10:g}%"
        facts = {"cache_bytes": stored, "mean": loss, "fitted": file, "run": line}
        yield Row(
            "kvalloc", loss, [*size_cells(stored, full), f"{loss:.2g}", "-", "-"], line, facts
        )


def _lines(heading: str, rows: list[Row]) -> Iterator[str]:
    table = table_text(["engine", *HEADINGS], [[row.name, *row.cells] for row in rows])
    first, *lines = table.splitlines()
    yield from (heading, "", first)
    for line, row in zip(lines, rows, strict=True):
        yield from (line, f"  {hanging(row.line, 2)}")
