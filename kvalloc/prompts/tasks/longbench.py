"""User prompts: JSONL in LongBench's fields, or plain prompts with answers.

References
----------
Y. Bai et al., LongBench (2023): metrics from Table 1; answers' lengths and datasets that count only
the first line from its code.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvalloc.errors import InputError, one_of, option
from kvalloc.prompts.cases import Case
from kvalloc.prompts.examples import Example, Question, prompt_ids, render
from kvalloc.prompts.metrics import METRICS
from kvalloc.prompts.tasks.task import PromptRequest, Task
from kvalloc.prompts.texts import Fields, Prompt, read_objects


@dataclass(frozen=True, kw_only=True)
class Kind(Question):
    """Question and metric of a dataset's records; ``{input}`` is the record's field.

    Attributes
    ----------
    chat : bool
        See `Example`.
    """

    text: str = "{input}"
    chat: bool = True


_QA = "Answer the question from the text above in a few words.\n\nQuestion: {input}\nAnswer:"
_SUM = "Summarise the text above. {input}"
_WHICH = (
    "Which paragraph above is this a summary of?\n\n{input}\n\n"
    "Answer with 'Paragraph' and its number."
)
_COUNT = "How many different paragraphs are above? Answer with the number only. {input}"

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("narrativeqa", "qasper"), Kind(metric="f1", max_new_tokens=128, text=_QA)),
    "multifieldqa_en": Kind(metric="f1", max_new_tokens=64, text=_QA),
    **dict.fromkeys(
        ("hotpotqa", "2wikimqa", "musique"), Kind(metric="f1", max_new_tokens=32, text=_QA)
    ),
    **dict.fromkeys(
        ("gov_report", "qmsum", "multi_news"),
        Kind(metric="rouge-l", max_new_tokens=512, text=_SUM),
    ),
    "trec": Kind(metric="classification", max_new_tokens=64, first_line=True, chat=False),
    "triviaqa": Kind(metric="f1", max_new_tokens=32, first_line=True, chat=False),
    "samsum": Kind(metric="rouge-l", max_new_tokens=128, first_line=True, chat=False),
    "passage_retrieval_en": Kind(metric="retrieval", max_new_tokens=32, text=_WHICH),
    "passage_count": Kind(metric="count", max_new_tokens=32, text=_COUNT),
    **dict.fromkeys(("lcc", "repobench-p"), Kind(metric="edit", max_new_tokens=64, chat=False)),
}
"""LongBench's English and code datasets; those of LongBench-E (``_e``) are scored alike."""

OTHER = Kind(metric="f1", max_new_tokens=64)
"""A dataset of another name, or none."""
PLAIN = Kind()
"""A prompt without LongBench's fields."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of a task file; the example's context is empty for a plain prompt."""

    prompt: Prompt
    example: Example


def read_records(path: str | Path, *, metric: str | None = None) -> list[Record]:
    """Read a task file, one JSON object a line.

    Parameters
    ----------
    path : str or Path
        Lines with LongBench's ``context``, ``input``, ``answers``, ``dataset``, ``all_classes``, or
        with ``prompt``, ``text`` or ``messages`` and ``answer`` or ``answers``.
    metric : str, optional
        Replaces the dataset's.

    Raises
    ------
    InputError
        Names file, line and field.
    """
    if metric is not None:
        one_of("metric", metric, METRICS)
    return [_record(prompt, fields, metric) for prompt, fields in read_objects(path)]


def file_task(path: Path, records: Sequence[Record], *, cut: bool) -> Task:
    """Return a task of a file's prompts, in its order.

    Parameters
    ----------
    path : Path
        Names the task.
    records : sequence of Record
    cut : bool
        Whether prompts beyond ``n_tokens`` lose the context's middle, as in LongBench.
    """

    def build(request: PromptRequest) -> list[Case]:
        return [
            _case(request, record, request.n_tokens if cut else None)
            for record in records[: request.n_cases]
        ]

    return Task(name=path.name, build=build)


def _record(prompt: Prompt, fields: Fields, metric: str | None) -> Record:
    where, is_longbench = prompt.where, fields.has("context") or fields.has("input")
    kind = _kind(fields, where) if is_longbench else PLAIN
    metric, classes = metric or kind.metric, tuple(fields.all_classes or ())
    if metric == "classification" and not classes:
        raise InputError(
            f"{where} has no field 'all_classes', which the metric classification needs; give "
            f"the list of labels, or choose another {option('metric')}"
        )
    answers = fields.answers or fields.answer
    if not answers:
        raise InputError(
            f"{where} has no answer; give 'answer' a right one as a string, or 'answers' a list"
        )
    if is_longbench:
        fields.require_context(where)
    if is_longbench and not fields.has("input"):
        raise InputError(f"{where} has no field 'input'; give it the question, or an empty string")
    text = kind.text.format(input=fields.input.strip()).strip()
    question = replace(kind, text=text, answers=answers, metric=metric, classes=classes)
    example = Example(
        context=fields.context.strip(),
        questions=(question,),
        source=where,
        joint="\n\n" if kind.chat else "\n",
        chat=kind.chat,
    )
    return Record(prompt=prompt, example=example)


def _kind(fields: Fields, where: str) -> Kind:
    if fields.language == "zh":
        raise InputError(
            f"{where}: 'language' is 'zh', whose words LongBench cuts with a package of its own; "
            "kvalloc scores English and code"
        )
    return KINDS.get(fields.dataset.removesuffix("_e"), OTHER)


def _case(request: PromptRequest, record: Record, longest: int | None) -> Case:
    example = record.example
    if not example.context:
        return _plain_case(request, record)

    def made(context: str) -> Case:
        where = {"after": request.after, "opened": request.opened}
        return render(request.tokenizer, replace(example, context=context), **where)

    case = made(example.context)
    if longest is None or case.n_tokens <= longest:
        return case
    words = example.context.split(" ")

    def without_middle(kept: int) -> Case:
        """Return the case with the first and last words alone."""
        return made(" ".join([*words[:kept], *words[-kept:]]).strip())

    kept = bisect_right(
        range(1, len(words) // 2 + 1), longest, key=lambda kept: without_middle(kept).n_tokens
    )
    if kept < 1:
        raise InputError(
            f"{record.prompt.where}: the question alone has more than {longest} tokens; ask for a "
            f"longer {option('context')}"
        )
    return without_middle(kept)


def _plain_case(request: PromptRequest, record: Record) -> Case:
    prompt, tokenizer = record.prompt, request.tokenizer
    if request.after or request.opened:
        where = "after" if request.after else "second-turn"
        raise InputError(
            f"{prompt.where} has no field 'context' beside 'input', so no question can come after "
            f"the compression; give both, or leave out {option('question_at', where)}"
        )
    ids = prompt_ids(tokenizer, prompt)
    return Case(input_ids=ids, turns=(record.example.questions[0].turn(()),), source=prompt.where)
