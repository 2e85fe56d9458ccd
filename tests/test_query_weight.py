import pytest
import torch

from erpo_trl.query_weight import query_weight


def test_against_a_loop():
    logp = torch.tensor([-19.0, -60.0, -80.0, -247.0], dtype=torch.float64)
    s = [19.0, 60.0, 80.0, 247.0]
    mean = sum(s) / 4
    want = [min(max(mean / x, 0.5), 2.0) for x in s]
    assert query_weight(logp).tolist() == pytest.approx(want, rel=1e-12)
    assert want[0] == 2.0 and want[3] == 0.5  # both clips are exercised


def test_likelier_prompts_never_weigh_less():
    logp = -torch.rand(1000, generator=torch.Generator().manual_seed(0)).sort().values * 100
    weight = query_weight(logp, weight_min=1e-3, weight_max=1e3)
    assert (weight[:-1] >= weight[1:]).all()


def test_scale_of_the_likelihood_cancels():
    logp = -torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 0.1
    torch.testing.assert_close(query_weight(logp), query_weight(logp * 7))


def test_given_mean_and_range():
    assert query_weight(torch.tensor([-10.0]), mean_nll=15.0).item() == 1.5
    assert query_weight(torch.tensor([-10.0]), mean_nll=15.0, weight_max=1.2).item() == pytest.approx(1.2)


def test_normalized_to_mean_one():
    logp = torch.tensor([-1.0, -10.0, -100.0], dtype=torch.float64)
    weight = query_weight(logp)
    torch.testing.assert_close(query_weight(logp, normalize=True), weight * 3 / weight.sum())


def test_a_certain_prompt_gets_the_upper_clip_and_equal_prompts_get_one():
    assert query_weight(torch.tensor([0.0, -3.0])).tolist() == [2.0, 0.5]
    assert query_weight(torch.tensor([0.0, 0.0])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_bad_range(bounds):
    with pytest.raises(ValueError, match="weight_min="):
        query_weight(torch.tensor([-1.0]), weight_min=bounds[0], weight_max=bounds[1])
