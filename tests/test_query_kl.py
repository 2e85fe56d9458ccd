import math

import pytest
import torch

from erpo_trl.query_kl import ESTIMATORS, k2, k3, query_kl


DELTAS = [0.0, 1e-6, -1e-6, 1.0, -1.0, 30.0, -30.0, 300.0, -300.0]
LEVELS = ["token", "sequence", "sequence_mean"]


def naive_k(delta: float, estimator: str) -> float:
    if estimator == "k2":
        return delta * delta / 2
    if delta > 20:
        return math.exp(20) * (1 + delta - 20) - delta - 1
    return math.expm1(delta) - delta


def naive_slope(delta: float, estimator: str) -> float:
    """dk/dℓ_policy, from the gradients printed in the method's description: 1 - e^Δ and -Δ."""
    return -delta if estimator == "k2" else 1 - math.exp(min(delta, 20.0))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("delta", DELTAS)
def test_value_and_slope_by_hand(estimator, delta):
    logp = torch.tensor([-0.7 - delta], dtype=torch.float64, requires_grad=True)
    value = ESTIMATORS[estimator](torch.tensor([-0.7], dtype=torch.float64) - logp)
    value.sum().backward()
    exact = -0.7 - logp.item()  # Δ as the floating-point subtraction gives it
    assert math.isfinite(value.item()) and math.isfinite(logp.grad.item())
    assert value.item() == pytest.approx(naive_k(exact, estimator), rel=1e-12, abs=1e-24)
    assert logp.grad.item() == pytest.approx(naive_slope(exact, estimator), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("delta", [10.0, 20.0, 21.0, 300.0])
def test_k3_never_lets_go(delta):
    """A clamped k3 has no gradient once drift is large; this one pulls at least as hard as at any smaller drift."""
    x = torch.tensor(delta, dtype=torch.float64, requires_grad=True)
    k3(x).backward()
    assert x.grad.item() >= math.exp(10) - 1


def test_float32_is_finite_everywhere():
    x = torch.tensor(DELTAS + [1e4, -1e4], requires_grad=True)
    for k in (k2, k3):
        value = k(x)
        (grad,) = torch.autograd.grad(value.sum(), x)
        assert value.isfinite().all() and grad.isfinite().all() and (value >= 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0, 300.0])
def test_query_kl_against_a_loop(estimator, level, scale):
    generator = torch.Generator().manual_seed(0)
    ref = -torch.rand(3, 5, generator=generator, dtype=torch.float64) * scale
    logps = -torch.rand(3, 5, generator=generator, dtype=torch.float64) * scale
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    got = query_kl(logps, ref, mask, estimator, level)
    for row in range(3):
        deltas = [(ref[row, t] - logps[row, t]).item() for t in range(5) if mask[row, t]]
        if level == "token":
            want = sum(naive_k(d, estimator) for d in deltas) / len(deltas)
        elif level == "sequence":
            want = naive_k(sum(deltas), estimator)
        else:
            want = naive_k(sum(deltas) / len(deltas), estimator)
        assert got[row].item() == pytest.approx(want, rel=1e-9, abs=1e-22)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", LEVELS)
def test_gradcheck(estimator, level):
    ref = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, -1.5, -22.0]], dtype=torch.float64)
    delta = torch.tensor([[0.3, -1.0, 1e-3], [1.0, -0.2, 0.7]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    logps = (ref - delta).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: query_kl(x, ref, mask, estimator, level), logps)


def test_masked_tokens_have_no_say_and_no_gradient():
    logps = torch.tensor([[-1.0, float("-inf"), -2.0]], requires_grad=True)
    value = query_kl(logps, torch.tensor([[-1.5, 0.0, -2.5]]), torch.tensor([[1, 0, 1]]))
    value.sum().backward()
    assert value.item() == pytest.approx(naive_k(-0.5, "k3"), rel=1e-6)
    assert logps.grad[0, 1] == 0 and logps.grad.isfinite().all()


def test_half_precision_is_computed_in_float32():
    logps = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    assert query_kl(logps, torch.tensor([[-1.001]]), torch.ones(1, 1)).dtype == torch.float32


def test_unknown_names():
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="'sequence_mean', got 'word'"):
        query_kl(one, one, one, level="word")
    with pytest.raises(KeyError, match="k1"):
        query_kl(one, one, one, estimator="k1")
