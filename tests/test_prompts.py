"""The paper's prompt, and what the loader keeps, drops and says, on datasets small enough to count by hand."""

import json

import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from erpo_trl.prompts import FilterReport, load_math, load_prompts, load_questions, prepare_rows, to_messages


def math_row(problem, solution, level="Level 3"):
    return {"problem": problem, "level": level, "type": "Algebra", "solution": solution}


MATH = [
    math_row("What is 1 + 1?", r"Once \boxed{3}, but no: \boxed{2}."),
    math_row("What is $\\frac{1}{2}$?", r"It is \boxed{\frac{1}{2}}.", "Level 5"),
    math_row("Too easy?", r"\boxed{1}", "Level 2"),
    math_row("No level?", r"\boxed{1}", "Level ?"),
    math_row("No box?", "It is 7."),
    math_row("Unbalanced?", r"It is \boxed{7."),
    math_row("What  is\n1 + 1? ", r"Again \boxed{2}."),
    math_row("What is 1 +  1?", r"Otherwise \boxed{4}."),
    math_row("Held\tout?", r"\boxed{5}", "Level 4"),
    math_row("A question of rather many words that does not fit?", r"\boxed{6}"),
]
HELD_OUT = {"MATH500": ["Held out? ", "Never asked?"]}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tokenizer():
    """A token a word; the chat template adds one before the content and one after."""
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} assistant{% endif %}{% if think %} <think>{% endif %}"
    )
    return tokenizer


def test_the_prompt_is_appendix_a_s():
    assert to_messages(" What is {x}? \n") == [
        {
            "role": "user",
            "content": "What is {x}? You FIRST think about the reasoning process as an internal monologue and then "
            "provide the final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
            "answer MUST BE put in \\boxed{}.",
        }
    ]


def test_load_math_keeps_drops_and_counts(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "math.jsonl", MATH)
    instruction = len(to_messages("")[0]["content"].split())
    dataset, reports = load_math(path, held_out=HELD_OUT, tokenizer=tokenizer, max_prompt_length=2 + 5 + instruction)
    assert list(map(str, reports)) == [
        "levels: kept 8, dropped 2 (below level 3)",
        "questions: kept 8, dropped 0 (no text in 'problem')",
        "golds: kept 6, dropped 2 (no balanced boxed answer in 'solution')",
        "duplicates: kept 4, dropped 2 (asked in an earlier row, 1 with another gold)",
        "held out: MATH500: kept 3, dropped 1 (asked in that evaluation set)",
        f"prompt length: kept 2, dropped 1 (more than {2 + 5 + instruction} tokens)",
    ]
    assert dataset["question"][:] == ["What is 1 + 1?", "What is $\\frac{1}{2}$?"]
    assert dataset["solution"][:] == ["2", r"\frac{1}{2}"]
    assert dataset["prompt"][0] == to_messages("What is 1 + 1?")
    assert dataset["level"][:] == ["Level 3", "Level 5"]


def test_load_math_from_the_hub_holds_math500_out(monkeypatch):
    splits = {
        ("nlile/hendrycks-MATH-benchmark", "train"): [
            {"problem": f"q{level}?", "solution": "", "answer": f"{level}", "level": level} for level in range(1, 6)
        ],
        ("HuggingFaceH4/MATH-500", "test"): [{"problem": "q4?", "solution": "", "answer": "4", "level": 4}],
    }
    monkeypatch.setattr("erpo_trl.prompts.load_dataset", lambda name, _, split: Dataset.from_list(splits[name, split]))
    dataset, reports = load_math()
    assert dataset["question"][:] == ["q3?", "q5?"]
    assert [(report.name, report.dropped) for report in reports if report.dropped] == [
        ("levels", 2),
        ("held out: MATH500", 1),
    ]
    assert len(load_math(min_level=0)[0]) == 4


def test_the_prompt_length_counts_the_trainer_s_tokens(tokenizer):
    question = "How many words?"
    words = 2 + len(to_messages(question)[0]["content"].split())
    rows = Dataset.from_list([{"question": question, "answer": 3}])
    assert len(prepare_rows(rows, tokenizer=tokenizer, max_prompt_length=words)[0]) == 1
    with pytest.raises(ValueError, match="No row is left(.|\n)*prompt length: kept 0, dropped 1"):
        prepare_rows(rows, tokenizer=tokenizer, max_prompt_length=words - 1)
    with pytest.raises(ValueError, match="No row is left"):
        prepare_rows(
            rows, tokenizer=tokenizer, max_prompt_length=words, chat_template_kwargs={"think": True}
        )  # one token more
    with pytest.raises(ValueError, match="pass the `tokenizer`"):
        prepare_rows(rows, max_prompt_length=words)


def test_an_answer_column_goes_before_the_solution():
    rows = [math_row("q?", r"\boxed{1}") | {"answer": "2"}, math_row("r?", r"\boxed{1}") | {"answer": None}]
    dataset, reports = prepare_rows(Dataset.from_list(rows))
    assert dataset["solution"][:] == ["2"]
    assert FilterReport("golds", 1, 1, "no answer in 'answer'") in reports
    assert prepare_rows(Dataset.from_list(rows), answer_column="solution")[0]["solution"][:] == ["1", "1"]


@pytest.mark.parametrize(
    "answer, gold",
    [
        ("12", "12"),
        (" 12 ", "12"),
        (12, "12"),
        (0, "0"),
        (0.5, "0.5"),
        (r"so \boxed{\{1\}}", r"\{1\}"),
        ("3 * 4 = 12\n#### 1,200", "1,200"),
    ],
)
def test_golds_of_answer_columns(answer, gold):
    assert prepare_rows(Dataset.from_list([{"prompt": "q?", "answer": answer}]))[0]["solution"][:] == [gold]


def test_any_columns_by_option():
    rows = Dataset.from_list([{"text": "q?", "question": "other", "label": "1", "answer": "2"}])
    dataset, _ = prepare_rows(rows, question_column="text", answer_column="label")
    assert (dataset["question"][:], dataset["solution"][:]) == (["q?"], ["1"])
    assert dataset["prompt"][:] == [to_messages("q?")]


def test_conversations_are_left_as_they_are():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q?"}]
    dataset, _ = prepare_rows(Dataset.from_list([{"prompt": chat, "solution": "7"}]))
    assert (dataset["prompt"][:], dataset["solution"][:], dataset["question"][:]) == ([chat], ["7"], ["q?"])


@pytest.mark.parametrize("form", ["saved", "saved splits", "parquet", "jsonl", "folder"])
def test_prepared_rows_pass_unchanged(tmp_path, form):
    rows = [row | {"answer": "not the box", "ref_query_logps": [-1.0, -2.0]} for row in MATH[:2]]
    dataset, _ = prepare_rows(Dataset.from_list(rows), answer_column="solution")
    path = tmp_path / "rows"
    if form == "saved":
        dataset.save_to_disk(path)
    elif form == "saved splits":
        DatasetDict({"train": dataset}).save_to_disk(path)
    elif form == "parquet":
        path = tmp_path / "rows.parquet"
        dataset.to_parquet(path)
    elif form == "jsonl":
        path = tmp_path / "rows.jsonl"
        dataset.to_json(path)
    else:
        path.mkdir()
        dataset.to_json(path / "train.jsonl")
    again, reports = load_prompts(str(path))
    assert again.to_list() == dataset.to_list()
    assert sum(report.dropped for report in reports) == 0


def test_load_questions(tmp_path):
    path = write_jsonl(tmp_path / "test.jsonl", [{"question": "a?", "answer": "1"}, {"question": "b?", "answer": "2"}])
    assert load_questions(path) == ["a?", "b?"]
    with pytest.raises(ValueError, match="No column 'text'; there are: question, answer. Type --question_column"):
        load_questions(path, question_column="text")


def test_errors_say_what_to_type(tmp_path):
    rows = Dataset.from_list([{"text": "q?", "number": 1, "target": "1"}])
    with pytest.raises(ValueError, match="No column 'question'; there are: text, number, target. Type --question_col"):
        prepare_rows(rows)
    with pytest.raises(ValueError, match="No column 'answer'; there are: text, number, target. Type --answer_column"):
        prepare_rows(rows, question_column="text")
    with pytest.raises(ValueError, match="'number' holds Value.'int64'., expected text .* Type --question_column"):
        prepare_rows(rows, question_column="number")
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "q?", "answer": "1"}])
    with pytest.raises(ValueError, match="No column 'level'; there are: question, answer. Type --min_level 0"):
        load_prompts(path, min_level=3)
    with pytest.raises(FileNotFoundError, match="no file or folder .*trian.jsonl.*Type --dataset_name"):
        load_prompts(str(tmp_path / "trian.jsonl"))
    with pytest.raises(FileNotFoundError, match="no file or folder './data'"):
        load_prompts("./data")
    with pytest.raises(ValueError, match="Could not read the split 'dev'.*--dataset_train_split"):
        load_prompts(str(tmp_path), split="dev")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="Could not read the split 'train' of .*empty"):
        load_prompts(str(tmp_path / "empty"))
    DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="has no split 'dev'. Type --dataset_train_split <train>"):
        load_prompts(str(tmp_path / "saved"), split="dev")


def test_a_name_that_the_hub_does_not_know(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub.")

    monkeypatch.setattr("erpo_trl.prompts.load_dataset", load_dataset)
    with pytest.raises(ValueError, match="Could not read the split 'train' of 'nobody/nothing': .*Type --dataset_"):
        load_prompts("nobody/nothing")
