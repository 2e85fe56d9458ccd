"""The quickstart notebook runs from top to bottom, and shows a figure, tables and progress as such."""

import json
from pathlib import Path

import pytest


NOTEBOOK = Path(__file__).parent.parent / "recipes" / "notebooks" / "erpo_quickstart.ipynb"


def test_outputs_are_stripped():
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
        assert cell["metadata"] == {}


@pytest.mark.slow
def test_notebook_runs(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[2]))
    monkeypatch.setenv("ERPO_TRL_CACHE", str(tmp_path / "scores"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = {i: cell.outputs for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}
    shown = {i: [out.data for out in found if "data" in out] for i, found in outputs.items()}
    assert not any(out.output_type == "error" for found in outputs.values() for out in found)

    def cells_with(mime, text=""):
        return [i for i, found in shown.items() for data in found if text in data.get(mime, "")]

    figure = next(data["image/png"] for found in shown.values() for data in found if "image/png" in data)
    assert len(figure) > 10_000
    assert cells_with("text/html", "query_weight") and cells_with("text/html", "Avg@4 after")
    assert cells_with("text/html", "<progress")  # the Trainer's own bar and table of logs
    assert cells_with("application/vnd.jupyter.widget-view+json")  # tqdm's and rich's bars
    assert cells_with("text/markdown", "Query-KL coefficient")
    log = json.loads((tmp_path / "erpo_quickstart" / "trainer_state.json").read_text())["log_history"]
    kl = [entry["query_kl"] for entry in log if "query_kl" in entry]
    assert len(kl) == 40 and kl[0] < 1e-6 < kl[-1]
