"""The user's own task files: LongBench's fields, plain prompts, and what is refused of both."""

import json

import pytest
from letters import Letters, read

from kvalloc.errors import InputError
from kvalloc.prompts.tasks.longbench import file_task, read_records

RECORD = {
    "context": "Ada wrote the note. Bert read it.",
    "input": "Who wrote the note?",
    "answers": ["Ada", "Ada L."],
    "length": 7,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "1",
}


@pytest.fixture
def write(tmp_path):
    def written(*records, name="own.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
        return path

    return written


def cases(path, n_tokens=10**6, n_cases=9, *, metric=None, cut=False, **options):
    task = file_task(path, read_records(path, metric=metric), cut=cut)
    return task.make(Letters(), n_cases, n_tokens, 0, **options)


def changed(**fields):
    return {**RECORD, **fields}


def test_a_dataset_is_asked_and_scored_as_it_is_known(write):
    path = write(
        RECORD,
        changed(dataset="trec", all_classes=["City", "Date"], answers=["City"]),
        changed(dataset="gov_report_e"),
        changed(dataset="mine", answers="Ada"),
    )
    qa, few_shot, report, own = cases(path)
    assert "<user>Ada wrote the note. Bert read it." in read(qa.input_ids)
    assert "Question: Who wrote the note?" in read(qa.input_ids)
    assert qa.turns[0].metric == "f1"
    assert qa.turns[0].score("the Ada") == 1.0
    assert read(few_shot.input_ids[1:]) == f"{RECORD['context']}\n{RECORD['input']}"
    assert few_shot.turns[0].classes == ("City", "Date")
    assert few_shot.turns[0].score("City\nDate") == 1.0
    assert (report.turns[0].metric, report.turns[0].max_new_tokens) == ("rouge-l", 512)
    assert (own.turns[0].metric, own.turns[0].answers) == ("f1", ("Ada",))
    assert qa.source == "own.jsonl, line 1"


def test_the_context_alone_is_compressed_where_the_question_comes_after(write):
    [case] = cases(write(RECORD), after=True)
    assert read(case.input_ids).endswith(RECORD["context"])
    assert "Who wrote the note?" in read(case.turns[0].question_ids)
    with pytest.raises(InputError, match="line 1 has no field 'context' beside 'input'"):
        cases(write({"prompt": "Say yes.", "answer": "yes"}), after=True)
    with pytest.raises(InputError, match="leave out question_at='second-turn'"):
        cases(write({"prompt": "Say yes.", "answer": "yes"}), opened=True)


def test_a_metric_can_be_chosen(write):
    [case] = cases(write(RECORD), metric="exact")
    assert case.turns[0].score("Ada and Bert") == 0.0
    with pytest.raises(InputError, match="no metric 'bleu'"):
        cases(write(RECORD), metric="bleu")


def test_what_is_too_long_loses_its_middle(write):
    long = " ".join(f"word{number}" for number in range(400))
    path = write(changed(context=long))
    [whole] = cases(path, 800)
    assert whole.n_tokens > 3000
    [case] = cases(path, 800, cut=True)
    said = read(case.input_ids)
    assert 780 <= case.n_tokens <= 800
    assert "word0 word1 " in said
    assert "word398 word399\n" in said
    assert "word200" not in said
    assert RECORD["input"] in said
    with pytest.raises(InputError, match="line 1: the question alone has more than 60 tokens"):
        cases(path, 60, cut=True)


def test_plain_prompts_and_chats_are_taken_too(write):
    text, chat = cases(
        write(
            {"prompt": "Say yes.", "answers": ["yes", "yeah"]},
            {"messages": [{"role": "user", "content": "Say no."}], "answer": "no"},
        )
    )
    assert read(text.input_ids[1:]) == "Say yes."
    assert text.turns[0].answers == ("yes", "yeah")
    assert read(chat.input_ids) == "<user>Say no.</><assistant>"
    assert chat.turns[0].score("No.") == 1.0


def test_a_chat_form_that_fails_is_one_line(write):
    class Broken(Letters):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            raise ValueError("no such role")

    path = write({"messages": [{"role": "oracle", "content": "Say."}], "answer": "no"})
    (task, said) = (file_task(path, read_records(path), cut=False), "line 1: .*no such role.*text")
    with pytest.raises(InputError, match=said):
        task.make(Broken(), 1, 100)
