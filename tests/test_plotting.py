"""What the figures draw, read back from the axes."""

import json
import sys

import numpy as np
import pytest

from erpo_trl import plotting


pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch):
    """The figures saved during the test."""
    saved = []
    save = plotting._save
    monkeypatch.setattr(plotting, "_save", lambda figure, path: (saved.append(figure), save(figure, path)))
    return saved


def log(n=5, **changes):
    entries = [
        {"step": s, "reward": s / n, "query_kl": 1e-3 * s, "entropy": 1.0 - s / n} | changes for s in range(1, n)
    ]
    return [*entries, {"step": n, "train_runtime": 1.0}]


def lines(ax):
    return {line.get_label(): line.get_xydata().tolist() for line in ax.lines if not line.get_label().startswith("_")}


def test_training_figure_of_one_run(figures, tmp_path):
    plotting.plot_training(log(), tmp_path / "a" / "training.png")
    (figure,) = figures
    assert [ax.get_title() for ax in figure.axes] == ["Reward", "Query-KL", "Entropy"]
    assert all(ax.get_xlabel() == "optimizer step" and ax.get_ylabel() for ax in figure.axes)
    np.testing.assert_allclose(lines(figure.axes[0])["run"], [[s, s / 5] for s in range(1, 5)])
    assert not figure.legends and (tmp_path / "a" / "training.png").stat().st_size > 0


def test_training_figure_of_several_runs(figures, tmp_path):
    plotting.plot_training({"GRPO": log(kl=0.5), "ERPO": log(policy_kl=0.1, kl=9.0)}, tmp_path / "t.png")
    (figure,) = figures
    assert [ax.get_title() for ax in figure.axes] == ["Reward", "Query-KL", "Policy-KL", "Entropy"]
    policy = lines(figure.axes[2])
    assert policy["GRPO"][0] == [1, 0.5] and policy["ERPO"][0] == [1, 0.1]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["GRPO", "ERPO"]


def test_kl_is_logarithmic_only_over_decades(figures, tmp_path):
    wide = [{"step": s, "reward": 0.5, "query_kl": 0.0 if s == 1 else 10.0**-s} for s in range(1, 7)]
    plotting.plot_training(wide, tmp_path / "wide.png")
    plotting.plot_training(log(), tmp_path / "narrow.png")
    assert [figure.axes[1].get_yscale() for figure in figures] == ["log", "linear"]


def test_log_history_of_a_folder(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": step}]}))
    assert plotting.load_log_history(tmp_path) == [{"step": 10}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 12}]}))
    assert plotting.load_log_history(tmp_path) == [{"step": 12}]
    assert plotting.load_log_history(tmp_path / "checkpoint-9" / "trainer_state.json") == [{"step": 9}]
    with pytest.raises(FileNotFoundError, match="output_dir of a training run"):
        plotting.load_log_history(tmp_path / "nowhere")


def test_a_resumed_run_counts_the_later_entry():
    steps, values = plotting.series([{"step": 1, "kl": 1}, {"step": 2, "kl": 2}, {"step": 2, "kl": 5}], "kl")
    assert steps.tolist() == [1, 2] and values.tolist() == [1, 5]


def test_smooth():
    values = np.array([1.0, 2.0, 6.0, 3.0])
    assert plotting.smooth(values, 1).tolist() == values.tolist()
    assert plotting.smooth(values, 3).tolist() == [1.5, 3.0, 11 / 3, 4.5]


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="none of the keys reward, query_kl, policy_kl, kl, entropy"):
        plotting.plot_training([{"step": 1, "loss": 0.1}], tmp_path / "t.png")


def test_accuracy_temperature(figures, tmp_path):
    curves = {"Avg@4": {"GRPO": {1.0: (0.5, 0.4, 0.6), 0.1: (0.7, 0.6, 0.8)}, "ERPO": {0.1: (0.9, 0.8, 1.0)}}}
    plotting.plot_accuracy_temperature(curves, tmp_path / "t.png")
    (ax,) = figures[0].axes
    np.testing.assert_allclose(lines(ax)["GRPO"], [[0.1, 70], [1.0, 50]])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("sampling temperature", "accuracy (%)")
    assert ax.collections[0].get_paths()[0].vertices[:, 1].min() == pytest.approx(40)


def test_checkpoints(figures, tmp_path):
    plotting.plot_checkpoints(
        {"GRPO": {0.1: {40: 0.5, 0: 0.25}, 1.5: {0: 0.0}}, "ERPO": {0.1: {0: 1}}}, tmp_path / "c.png"
    )
    grpo, erpo = figures[0].axes
    assert lines(grpo)["T = 0.1"] == [[0, 25], [40, 50]] and lines(erpo)["T = 0.1"] == [[0, 100]]
    assert (grpo.get_title(), grpo.get_xlabel()) == ("GRPO", "optimizer step")
    assert grpo.get_ylim() == erpo.get_ylim() and grpo.get_ylim()[0] == 0 and grpo.get_ylim()[1] > 100


def test_nll_correlation(figures, tmp_path):
    x = np.arange(100.0)
    plotting.plot_nll_correlation(x, 2 * x, {"all": 1.0, "without_tail": 0.5, "tail_bound": 95.0}, tmp_path / "n.png")
    ax = figures[0].axes[0]
    assert "1.00" in ax.get_title() and "0.50" in ax.get_title()
    assert ax.get_xlabel() == "prompt NLL (nats)" and ax.lines[0].get_xdata()[0] == 95.0


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'erpo-trl\[plot\]'"):
        plotting.plot_training(log(), tmp_path / "t.png")
    with pytest.raises(ImportError, match=r"pip install 'erpo-trl\[plot\]'"):
        plotting.plot_checkpoints({"run": {0.1: {0: 0.5}}}, tmp_path / "t.png")
