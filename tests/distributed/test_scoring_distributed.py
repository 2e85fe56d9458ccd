"""`score_queries` in two real processes: every row gets its own score."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk


TESTS = Path(__file__).parents[1]

SCRIPT = textwrap.dedent(
    """
    import json, os, signal, sys, time
    import accelerate, datasets, torch
    state = accelerate.PartialState(cpu=True)
    out, n_rows, slow_rank, fail_on = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    sys.path.insert(0, {tests!r})
    from helpers import make_model, make_tokenizer
    from erpo_trl import score_queries

    model, calls = make_model(), []
    def hook(module, args, kwargs):
        calls.append(tuple(kwargs["input_ids"].shape))
        if state.process_index == slow_rank:
            time.sleep(0.05)
        if fail_on and len(calls) == fail_on:
            os.kill(os.getpid(), signal.SIGKILL)
    model.register_forward_pre_hook(hook, with_kwargs=True)
    questions = [f"{{i}} plus {{i * i}} {{'x' * (i * 7 % 11)}}" for i in range(n_rows)]
    train = datasets.Dataset.from_dict({{"prompt": questions, "row": list(range(n_rows))}})
    splits = datasets.DatasetDict(train=train, test=train.select(range(n_rows - 1, n_rows // 2, -1)))
    scored = score_queries(splits, model, make_tokenizer(), batch_tokens=60)
    n_first = len(calls)
    again = score_queries(splits, model, make_tokenizer(), batch_tokens=60)
    assert len(calls) == n_first and again["train"][:] == scored["train"][:]
    scored.save_to_disk(f"{{out}}/rank{{state.process_index}}")
    with open(f"{{out}}/calls{{state.process_index}}", "w") as file:
        json.dump(calls, file)
    state.wait_for_everyone()
    state.destroy_process_group()
    """
).format(tests=str(TESTS))


def run(tmp_path, cache, n_rows, processes, slow_rank=-1, fail_on=0):
    out = tmp_path / f"out{processes}_{slow_rank}_{fail_on}"
    out.mkdir()
    script = tmp_path / "score.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ERPO_TRL_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    done = subprocess.run(
        [*launcher, str(script), str(out), str(n_rows), str(slow_rank), str(fail_on)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode != 0) == bool(fail_on), done.stderr[-3000:]
    return out


def assert_same_scores(found, want):
    for split in ("train", "test"):
        assert found[split]["row"][:] == want[split]["row"][:]
        assert found[split]["prompt"][:] == want[split]["prompt"][:]
        for a, b in zip(found[split]["ref_query_logps"], want[split]["ref_query_logps"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[split]["query_weight"], want[split]["query_weight"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n_rows, slow_rank", [(37, 0), (10, 1), (3, 0)])
def test_every_row_gets_its_own_score(tmp_path, n_rows, slow_rank):
    want = load_from_disk(run(tmp_path, tmp_path / "one", n_rows, processes=1) / "rank0")
    totals = want["train"]["ref_query_logp"][:]
    assert len(set(totals)) == n_rows  # so that no two rows could be mistaken for each other
    assert np.diff(np.sort(totals)).min() > 1e-3
    out = run(tmp_path, tmp_path / "two", n_rows, 2, slow_rank)
    ranks = [load_from_disk(out / f"rank{rank}") for rank in range(2)]
    calls = [json.loads((out / f"calls{rank}").read_text()) for rank in range(2)]
    assert len(calls[0]) == len(calls[1])  # as a sharded model needs it
    assert n_rows <= sum(rows for shapes in calls for rows, _ in shapes) <= n_rows + max(r for r, _ in calls[1])
    for split in ("train", "test"):
        assert ranks[0][split][:] == ranks[1][split][:]
    assert_same_scores(ranks[0], want)


@pytest.mark.slow
def test_a_killed_launch_goes_on_where_it_stopped(tmp_path):
    cache, n_rows = tmp_path / "two", 37
    run(tmp_path, cache, n_rows, 2, fail_on=5)
    done = sum(len(np.load(part)["keys"]) for part in cache.glob("*/*.npz"))
    assert 4 <= done < n_rows
    out = run(tmp_path, cache, n_rows, 2)
    calls = [json.loads((out / f"calls{rank}").read_text()) for rank in range(2)]
    scored = sum(rows for shapes in calls for rows, _ in shapes)
    assert n_rows - done <= scored <= n_rows - done + max(rows for rows, _ in calls[1])
    want = load_from_disk(run(tmp_path, tmp_path / "one", n_rows, processes=1) / "rank0")
    assert_same_scores(load_from_disk(out / "rank1"), want)
