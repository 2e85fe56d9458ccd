"""Tables and figures of the report against numbers computed by hand; consistency and correlation likewise."""

import json

import numpy as np
import pytest
import torch

from erpo_trl.evaluation import consistency, correlation, storage
from erpo_trl.evaluation.metrics import bootstrap_interval
from erpo_trl.evaluation.report import build_report, load_evaluation, render_markdown, write_report


def write(folder, verdicts, temperatures=(0.1, 1.0, 1.5), golds="g", **changes):
    """A finished evaluation; `verdicts[benchmark][temperature]` is (questions, samples) of 1, 0 or None."""
    for benchmark, by_temperature in verdicts.items():
        for temperature, rows in by_temperature.items():
            samples = [
                {
                    "question": q,
                    "sample": j,
                    "question_text": "?",
                    "gold": "4",
                    "completion": "…",
                    "answer": "4" if verdict else "5",
                    "correct": verdict,
                    "format": 1.0,
                    "tokens": 10 + j,
                    "truncated": j == 1,
                }
                for q, row in enumerate(rows)
                for j, verdict in enumerate(row)
            ]
            settings = {"benchmark": benchmark, "temperature": temperature, "k": len(rows[0]), "golds": golds}
            settings |= {"questions": len(rows), "without_gold": 1, "repeated": 0, "model": "m"} | changes
            storage.write_cell(storage.cell_path(folder, benchmark, temperature), samples, settings)
    return folder


BASE = {
    "math500": {0.1: [[1, 1], [0, 0], [0, 1]], 1.0: [[1, 0], [0, 0], [1, 1]], 1.5: [[0, 0], [0, 1], [0, 0]]},
    "aime24": {0.1: [[0, 0], [1, 1]], 1.0: [[0, 1], [0, 1]], 1.5: [[0, 0], [0, 0]]},
}
BETTER = {
    "math500": {0.1: [[1, 1], [0, 1], [1, 1]], 1.0: [[1, 0], [0, 0], [1, 1]], 1.5: [[1, 0], [0, 1], [0, 1]]},
    "aime24": {0.1: [[0, 0], [1, 1]], 1.0: [[0, 1], [1, 1]], 1.5: [[0, 0], [0, 0]]},
}


@pytest.fixture
def evaluations(tmp_path):
    return [
        load_evaluation(write(tmp_path / "base", BASE), "Base"),
        load_evaluation(write(tmp_path / "erpo", BETTER), "ERPO"),
    ]


def test_table_1(evaluations):
    report = build_report(evaluations)
    assert report["benchmarks"] == ["aime24", "math500"] and report["k"] == 2  # the paper's order of columns
    base = report["table1"]["avg@k"]["Base"]
    math = np.mean([[1, 0, 0.5], [0.5, 0, 1], [0, 0.5, 0]], axis=0)  # temperatures averaged per question
    aime = np.mean([[0, 1], [0.5, 0.5], [0, 0]], axis=0)
    assert base["math500"] == pytest.approx([math.mean(), *bootstrap_interval(math)])
    assert base["average"] == pytest.approx([(math.mean() + aime.mean()) / 2, *bootstrap_interval(aime, math)])
    pass_at_2 = np.mean([[1, 0, 1], [1, 0, 1], [0, 1, 0]])
    assert report["table1"]["pass@k"]["Base"]["math500"][0] == pytest.approx(pass_at_2)
    assert report["table1"]["pass@1"]["Base"]["math500"][0] == pytest.approx(3 / 9)
    assert report["table1"]["majority@k"]["Base"]["math500"][0] == pytest.approx(3.5 / 9)  # a tie counts half


def test_table_2_and_bands(evaluations):
    row = build_report(evaluations)["table2"]["math500"]["ERPO"]
    assert {name: value for name, (value, *_) in row.items()} == pytest.approx(
        {"0.1": 5 / 6, "1": 0.5, "1.5": 0.5, "≤ 1.0": 2 / 3, "1.2-1.5": 0.5}
    )


def test_differences_are_paired(evaluations):
    difference = build_report(evaluations)["differences"]["avg@k"]["ERPO"]
    per_question = np.mean([[0, 0.5, 0.5], [0, 0, 0], [0.5, 0, 0.5]], axis=0)
    assert difference["math500"] == pytest.approx([per_question.mean(), *bootstrap_interval(per_question)])


def test_greedy_is_shown_and_not_averaged(tmp_path):
    verdicts = {"mine": {0: [[1], [0]], 0.6: [[0, 0], [0, 1]]}}
    report = build_report([load_evaluation(write(tmp_path, verdicts))])
    assert report["temperatures"] == [0.6] and report["k"] == 2
    assert report["table1"]["avg@k"][tmp_path.name]["mine"][0] == 0.25
    assert report["table2"]["mine"][tmp_path.name]["0"][0] == 0.5
    only_greedy = {"mine": {0: [[1], [0]]}}
    report = build_report([load_evaluation(write(tmp_path / "greedy", only_greedy))])
    assert report["k"] == 1 and report["table1"]["pass@k"]["greedy"]["mine"][0] == 0.5
    assert report["bands"] == {}


def test_ungraded_questions(tmp_path):
    verdicts = {"mine": {0.6: [[1, 1], [None, None], [0, 1]]}}
    report = build_report([load_evaluation(write(tmp_path, verdicts), "m")])
    assert report["table1"]["avg@k"]["m"]["mine"][0] == 0.75
    assert report["samples"]["m"]["mine"]["0.6"] == {
        "questions": 3,
        "without_gold": 1,
        "repeated": 0,
        "ungraded": 1,
        "samples": 6,
        "truncated": 3,
        "format": 1.0,
        "tokens": 10.5,
    }


def test_only_what_is_common_is_compared(tmp_path, evaluations):
    part = {"math500": {1.0: BASE["math500"][1.0], 0.6: BASE["math500"][1.0]}}
    other = load_evaluation(write(tmp_path / "part", part), "part")
    report = build_report([evaluations[0], other])
    assert report["benchmarks"] == ["math500"] and report["temperatures"] == [1.0]
    stranger = load_evaluation(write(tmp_path / "none", {"mine": {0.3: [[1, 1]]}}), "none")
    with pytest.raises(ValueError, match="no benchmark with a temperature in common"):
        build_report([evaluations[0], stranger])
    with pytest.raises(ValueError, match="different names"):
        build_report([other, other])
    changed = load_evaluation(write(tmp_path / "changed", BASE, golds="other"), "changed")
    with pytest.raises(ValueError, match="different versions of"):
        build_report([evaluations[0], changed])


def test_markdown(evaluations):
    markdown = render_markdown(build_report(evaluations))
    assert "| Method | aime24 | math500 | average |\n| --- | ---: | ---: | ---: |" in markdown
    assert "### Avg@2\n" in markdown and "### Pass@2\n" in markdown
    assert "Temperatures averaged: ≤ 1.0: 0.1, 1; 1.2-1.5: 1.5." in markdown
    line = next(line for line in markdown.splitlines() if line.startswith("| ERPO"))
    cells = [cell.split(" [")[0].strip() for cell in line.strip("|").split("|")]
    assert cells == ["ERPO", "**0.417**", "**0.611**", "**0.514**"]
    tables = [block for block in markdown.split("\n\n") if block.startswith("|")]
    assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)


def test_write_report(evaluations, tmp_path):
    folder = tmp_path / "report"
    markdown = write_report(evaluations, folder)
    assert {path.name for path in folder.iterdir()} == {
        "report.md",
        "report.json",
        "accuracy_temperature.png",
        "accuracy_temperature_by_benchmark.png",
    }
    assert (folder / "report.md").read_text() == markdown
    stored = json.loads((folder / "report.json").read_text())
    assert stored["table1"] == build_report(evaluations)["table1"]


def test_one_question_has_no_interval(tmp_path):
    write_report([load_evaluation(write(tmp_path, {"mine": {0.6: [[1, 0]]}}), "m")], tmp_path, figures=False)
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["table1"]["avg@k"]["m"]["mine"] == [0.5, None, None]
    assert "| m | 0.500 |" in (tmp_path / "report.md").read_text()


def test_load_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="recipes/evaluate.py"):
        load_evaluation(tmp_path)
    path = storage.cell_path(write(tmp_path, BASE), "aime24", 0.1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="not a whole result file"):
        load_evaluation(tmp_path)


# Appendix C


def test_train_accuracy():
    log = [{"step": s, consistency.TRAIN_ACCURACY: s / 100} for s in range(1, 41)] + [{"step": 40, "train_loss": 0.1}]
    accuracy = consistency.train_accuracy(log, [0, 20, 40], window=4)
    assert accuracy == pytest.approx({0: 0.01, 20: 0.185, 40: 0.385})
    with pytest.raises(ValueError, match="checkpoint 60; the log covers steps 1 to 40"):
        consistency.train_accuracy(log, [60])
    with pytest.raises(ValueError, match="rewards/accuracy_reward/mean"):
        consistency.train_accuracy([{"step": 1, "loss": 0.0}], [0])


def test_gap_tables_of_the_paper():
    """Table 5's trajectories: its averages come out as printed, and the gaps by the definition of Table 4."""
    steps = range(0, 241, 40)
    grpo = (
        dict(zip(steps, (0.4448, 0.7641, 0.7609, 0.7829, 0.7895, 0.7944, 0.7670), strict=True)),
        {
            "TP1": dict(zip(steps, (0.3120, 0.7320, 0.76, 0.734, 0.722, 0.736, 0.584), strict=True)),
            "TP2": dict(zip(steps, (0.3060, 0.74, 0.748, 0.742, 0.766, 0.758, 0.662), strict=True)),
        },
    )
    erpo = (
        dict(zip(steps, (0.4455, 0.7563, 0.7653, 0.7866, 0.8063, 0.7841, 0.8146), strict=True)),
        {
            "TP1": dict(zip(steps, (0.3120, 0.74, 0.772, 0.77, 0.784, 0.786, 0.784), strict=True)),
            "TP2": dict(zip(steps, (0.3060, 0.726, 0.77, 0.766, 0.774, 0.786, 0.802), strict=True)),
        },
    )
    summary = consistency.gap_summary(*grpo)
    assert summary["train"] == pytest.approx(0.776467, abs=1e-6)
    assert summary["gap"] == pytest.approx({"TP1": 0.065133, "TP2": 0.0404667}, abs=1e-6)
    assert summary["average_gap"] == pytest.approx((0.065133 + 0.0404667) / 2, abs=1e-6)
    text = consistency.render_gap_tables({"GRPO": grpo, "ERPO": erpo})
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    averages = [row[-1] for row in rows if row[0] in ("Train", "Eval, TP1", "Eval, TP2")]
    assert averages == ["72.91", "65.43", "67.46", "73.70", "70.69", "70.43"]
    assert next(row for row in rows if row[0] == "GRPO") == ["GRPO", "77.6", "71.1", "73.6", "6.5", "4.0", "5.3"]
    improvement = next(row for row in rows if row[0] == "Improvement")
    assert improvement == ["Improvement", "–", "–", "–", "↓ 5.2 (80 %)", "↓ 2.6 (63 %)", "↓ 3.9 (74 %)"]


def test_checkpoints_are_loaded_by_step(tmp_path):
    for step, verdict in ((40, 1), (0, 0), (120, 1)):
        write(tmp_path / f"checkpoint-{step}", {"mine": {1.0: [[verdict, 0], [verdict, 1]]}})
    accuracy = consistency.checkpoint_accuracy(consistency.load_checkpoints(tmp_path), [1.0])
    assert list(accuracy.items()) == [(0, 0.25), (40, 0.75), (120, 0.75)]
    with pytest.raises(FileNotFoundError, match="--checkpoints"):
        consistency.load_checkpoints(tmp_path / "checkpoint-0")
    with pytest.raises(ValueError, match="TP2 was evaluated at steps"):
        consistency.gap_summary(accuracy, {"TP2": {0: 0.1}})


# Appendix D


def test_nll_correlation():
    rng = np.random.default_rng(0)
    prompt = np.concatenate([rng.uniform(10, 300, 950), rng.uniform(400, 900, 50)])
    response = np.concatenate([2 * prompt[:950] + 1, rng.uniform(0, 100, 50)])
    result = correlation.nll_correlation(prompt, response)
    assert result["without_tail"] == pytest.approx(1.0) and result["questions"] == 1000
    assert result["all"] == pytest.approx(np.corrcoef(prompt, response)[0, 1]) and result["all"] < 0.5
    assert np.sum(prompt > result["tail_bound"]) == 50
    assert np.isnan(correlation.nll_correlation([1, 2, 3], [5, 5, 5])["all"])
    with pytest.raises(ValueError, match="at least 3"):
        correlation.nll_correlation([1, 2], [3, 4])


def test_prompt_response_nlls_are_those_of_a_plain_forward(tokenizer):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=11, num_key_value_heads=1, eos_token_id=1, **shape)).eval()
    prompts = [[3, 4, 5, 6, 3], [6, 3], [4, 4, 4]]
    sampled = dict(
        correlation.TransformersSampler(model, tokenizer, 2).sample(
            prompts, n=1, temperature=1.0, seed=0, max_new_tokens=6
        )
    )
    prompt_nll, response_nll = correlation.prompt_response_nlls(
        model, tokenizer, prompts, max_new_tokens=6, batch_size=2
    )
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *sampled[i][0].token_ids]])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert prompt_nll[i] == pytest.approx(-logps[: len(prompt) - 1].sum().item(), rel=1e-5)
        assert response_nll[i] == pytest.approx(-logps[len(prompt) - 1 :].sum().item(), rel=1e-5)
