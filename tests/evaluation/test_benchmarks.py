"""Benchmarks from local copies with the columns of the published data sets."""

import json

import datasets
import pytest

from erpo_trl.evaluation.benchmarks import SOURCES, gold_text, load_benchmark, load_benchmark_file


# A row as published, every column there, and what becomes of it
PUBLISHED = {
    "aime24": (
        {
            "id": 60,
            "problem": "Every morning Aya goes for a walk.",
            "solution": "204",
            "answer": "204",
            "url": "-",
            "year": "2024",
        },
        ("Every morning Aya goes for a walk.", "204"),
    ),
    "aime25": (
        {"problem": "Find the sum of all bases $b>9$.", "answer": "70", "id": "0"},
        ("Find the sum of all bases $b>9$.", "70"),
    ),
    "amc": (
        {"id": 0, "problem": "What is $m+n$?", "answer": 142.0, "url": "-"},
        ("What is $m+n$?", "142"),
    ),
    "math500": (
        {
            "problem": "Convert $(0,3)$ to polar.",
            "solution": "We have …",
            "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        ("Convert $(0,3)$ to polar.", "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ),
    "minerva": (
        {"question": "Each of the two Magellan telescopes …", "answer": "4.5e33"},
        ("Each of the two Magellan telescopes …", "4.5e33"),
    ),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "Find $a$ and $b$.",
            "solution": ["…"],
            "final_answer": ["$2$", "$-\\frac{1}{3}$"],
            "context": "Let $T = 3$.",
            "image_1": None,
            "modality": "Text-only",
            "difficulty": "Competition",
            "is_multiple_answer": True,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
            "question_type": "Open-ended",
            "subfield": "Algebra",
            "subject": "Math",
            "language": "English",
        },
        ("Let $T = 3$.\nFind $a$ and $b$.", "2, -\\frac{1}{3}"),
    ),
}


@pytest.fixture(autouse=True)
def private_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_copy(folder, source, rows):
    """A folder as the Hub has it: parquet data, and a card that says which configuration and split they are."""
    folder.mkdir(parents=True)
    config = source.config or "default"
    datasets.Dataset.from_list(rows).to_parquet(folder / "data" / config / "rows.parquet")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n  - split: {source.split}\n"
        f"    path: data/{config}/*.parquet\n---\n"
    )


@pytest.mark.parametrize("name", SOURCES)
def test_local_copy_of_the_published_schema(name, tmp_path):
    row, (question, answer) = PUBLISHED[name]
    write_copy(tmp_path / name, SOURCES[name], [row])
    benchmark = load_benchmark(name, data_dir=tmp_path)
    assert benchmark.name == name and benchmark.rows == [{"question": question, "answer": answer}]


def test_the_hub_is_asked_for_the_right_thing(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or [row])
    row = PUBLISHED["olympiadbench"][0]
    load_benchmark("olympiadbench")
    row = PUBLISHED["math500"][0]
    load_benchmark("math500")
    assert asked == [
        (("Hothan/OlympiadBench", "OE_TO_maths_en_COMP"), {"split": "train"}),
        (("HuggingFaceH4/MATH-500", None), {"split": "test"}),
    ]


def test_jsonl_copy_without_gold_and_repeated_questions(tmp_path):
    rows = [
        {"problem": " a ", "answer": "1"},
        {"problem": "b", "answer": None},
        {"problem": "a", "answer": "2"},
        {"problem": "c", "answer": " "},
    ]
    (tmp_path / "aime25.jsonl").write_text("\n".join(map(json.dumps, rows)))
    benchmark = load_benchmark("aime25", data_dir=tmp_path)
    assert benchmark.rows == [{"question": "a", "answer": "1"}, {"question": "a", "answer": "2"}]
    assert (benchmark.without_gold, benchmark.repeated) == (2, 1)


def test_own_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"q": "1+1", "a": 2}\n')
    benchmark = load_benchmark_file(path, "q", "a")
    assert (benchmark.name, benchmark.rows) == ("mine", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(ValueError, match=r"Row 0 of .*mine.jsonl has no column 'answer', 'question'; it has 'q', 'a'"):
        load_benchmark_file(path)
    with pytest.raises(FileNotFoundError, match="other.jsonl"):
        load_benchmark_file(tmp_path / "other.jsonl")


def test_errors_say_what_to_type(tmp_path):
    with pytest.raises(ValueError, match="Unknown benchmark 'math50'.*'math500'.*--benchmark file.jsonl"):
        load_benchmark("math50")
    with pytest.raises(FileNotFoundError, match="hf download --repo-type dataset HuggingFaceH4/MATH-500 --local-dir"):
        load_benchmark("math500", data_dir=tmp_path)
    (tmp_path / "amc.jsonl").write_text('{"problem": "a", "answer": null}\n')
    with pytest.raises(ValueError, match="no row with an answer"):
        load_benchmark("amc", data_dir=tmp_path)
    (tmp_path / "amc.jsonl").write_text('{"problem": "", "answer": 1}\n')
    with pytest.raises(ValueError, match="Row 0 .* empty question"):
        load_benchmark("amc", data_dir=tmp_path)


@pytest.mark.parametrize(
    "answer, text",
    [
        (142.0, "142"),
        (0.5, "0.5"),
        (7, "7"),
        ("$\\frac{1}{2}$", "\\frac{1}{2}"),
        ("\\$32,348", "\\$32,348"),
        (["$1$"], "1"),
        ([], None),
        (["", None], None),
        ("", None),
        (None, None),
        ("025", "025"),
    ],
)
def test_gold_text(answer, text):
    assert gold_text(answer) == text


def test_arithmetic():
    benchmark = load_benchmark("arithmetic")
    assert len(benchmark.rows) > 0 and benchmark.without_gold == 0
    assert benchmark.rows[0].keys() == {"question", "answer"}
