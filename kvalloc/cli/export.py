"""``kvalloc export``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from kvalloc.accounting.engine_formats import ENGINES
from kvalloc.cli.options import takes
from kvalloc.cli.output import note, print_result
from kvalloc.errors import InputError, one_of, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.engine_choice import EngineChoice
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_file
from kvalloc.interop import exporting
from kvalloc.interop.engines import SYNTAX, write_choice
from kvalloc.interop.tables import CSV, curve_table
from kvalloc.interop.target import lost
from kvalloc.report.engines import choice_facts, choice_fields
from kvalloc.units import Option, size


@dataclass(frozen=True)
class ExportOptions:
    """Profile, target and accepted losses."""

    profile: Annotated[str, Option()]
    """A budget profile, or a shipped one's name; a file of 'kvalloc solve --engine'; for csv and
    parquet also a score profile."""

    _: KW_ONLY

    to: Annotated[str | None, Option("TARGET")] = None
    """The engine or tool."""

    output: Annotated[Path | None, Option("FILE")] = None
    """Where to write it."""

    accept: Annotated[str | None, Option("NAMES")] = None
    """Losses to accept, such as heads-to-layers,engine-policy."""

    context: Annotated[int | None, Option("N", minimum=1)] = None
    """Length of the prompt, tokens, for targets with a fixed number of entries."""

    restricted: Annotated[Path | None, Option("OUT.json")] = None
    """Also write the remaining budgets as a budget profile, for 'kvalloc eval'."""


@takes()
def export(options: ExportOptions) -> None:
    r"""Write budgets, or formats of keys and values, for another engine or tool, or a table.

    Without --to, the targets are listed, with the losses of this profile in each. Each loss has a
    name, which --accept takes; none is silent. An engine choice is written for its engine: flags,
    JSON or YAML.

    Examples
    --------
    kvalloc export p.json                      what each target can say of it
    kvalloc export p.json --to lu-kv -o p.npy
    kvalloc export p.json --to tensorrt-llm --context 4096 --accept engine-policy,heads-to-layers \
        -o config.yaml --restricted r.json
    kvalloc eval demo --profile p.json --profile r.json   what the loss costs
    kvalloc export choice.json -o mlx-lm.json
    """
    profile, to, output = options.profile, options.to, options.output
    record = load_file(profile, (BudgetProfile, ScoreProfile, EngineChoice))
    if isinstance(record, EngineChoice):
        if about := [n for n in ("accept", "context", "restricted") if getattr(options, n)]:
            raise InputError(f"{option(about[0])} is about budgets, and {profile} has none")
        _export_choice(profile, record, to, output)
        return
    if to in ENGINES and to not in exporting.TARGETS:
        raise InputError(
            f"{to} evicts nothing, so no budgets are for it; 'kvalloc advise MODEL' says in which "
            "formats it stores keys and values best"
        )
    if isinstance(record, ScoreProfile):
        _export_curves(profile, record, to, output)
        return
    if to is None:
        _list(profile, record)
        return
    target = one_of("target", to, exporting.TARGETS)
    if output is None:
        raise InputError(f"--to {to} writes a file; name it with -o, such as -o out{target.suffix}")
    names = [name.strip() for name in (options.accept or "").split(",") if name.strip()]
    left = exporting.export(record, to, output, accept=names, context=options.context)
    if (restricted := options.restricted) is not None:
        left.save(restricted)
    before, after, is_less = record.retained_bytes, left.retained_bytes, left != record
    keeps = f"{size(before)} of {record.context_tokens:,} tokens"
    if is_less:
        keeps += f" -> {size(after)} of {left.context_tokens:,} tokens"
    facts = {"target": to, "bytes": before, "bytes_left": after, "restricted": is_less}
    lost = left.detail if is_less else "nothing"
    shown = {"written": str(output), "keeps": keeps, "lost": lost}
    print_result({"output": output, **facts}, shown)
    if is_less and restricted is not None:
        pair = f"--profile {profile} --profile {restricted}"
        note(f"what the loss costs: kvalloc eval MODEL {pair}")


def _export_choice(name: str, choice: EngineChoice, to: str | None, output: Path | None) -> None:
    engine = choice.engine
    if to not in (None, engine):
        raise InputError(
            f"{name} is for {engine}; decide for {to} with 'kvalloc solve FILE --engine {to}'"
        )
    if output is not None:
        write_choice(choice, output)
    file = output or f"FILE{SYNTAX[engine].suffix}"
    use = SYNTAX[engine].use.format(file=file, model=choice.shape.model_id)
    shown = {**choice_fields(choice), "written": str(output or "")}
    notes = [] if output else [f"write it: kvalloc export {name} -o {file}"]
    lines = ["", use] if use else []
    facts = {**choice_facts(choice), "use": use, "output": output}
    print_result(facts, shown, lines=lines, notes=notes)


def _export_curves(name: str, scores: ScoreProfile, to: str | None, output: Path | None) -> None:
    target = exporting.TARGETS.get(to or "")
    if not isinstance(target, CSV) or output is None:
        raise InputError(
            f"{name} is a score profile: its curves are written with --to csv or --to parquet and "
            "-o FILE; solve it first to export budgets"
        )
    table = curve_table(scores)
    target.write_table(table, output)
    rows = len(table["value"])
    shown = {"written": str(output), "points": f"{rows:,} of score curves"}
    print_result({"output": str(output), "rows": rows}, shown)


def _list(name: str, profile: BudgetProfile) -> None:
    rows, shown = [], {}
    for target in exporting.TARGETS.values():
        summary, says, losses = target.summary, target.says, lost(profile, target)
        rows.append({"name": target.name, "summary": summary, "says": says, "lost": losses})
        listed = "; ".join(f"{key} ({words})" for key, words in losses.items()) or "nothing"
        shown[target.name] = f"{summary}; says {says}; would lose {listed}"
    notes = [
        f"write one: kvalloc export {name} --to TARGET -o FILE",
        f"formats of keys and values for {', '.join(ENGINES)}: kvalloc advise MODEL",
    ]
    print_result(rows, shown, notes=notes)
