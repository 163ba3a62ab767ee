"""The assumed step of Adam against torch's own."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from megatron_d3.influence import adam


def test_the_example_in_the_text():
    assert doctest.testmod(adam).failed == 0


@given(num_steps=st.integers(1, 3000), beta2=st.sampled_from([0.9, 0.95, 0.999]),
       seed=st.integers(0, 1000), num_unseen=st.integers(0, 6))  # fmt: skip
def test_it_is_what_adam_divides_by_and_bounded_where_nothing_was_seen(
    num_steps, beta2, seed, num_unseen
):
    """In a step whose squared gradient is the mean of v_hat, without momentum."""
    v_hat = torch.rand(8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1e-3
    v_hat[:num_unseen] = 0
    gradient = v_hat.mean().sqrt()
    weight = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    weight.grad = gradient.expand(8).clone()
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=(0.0, beta2), eps=1e-8)
    optimizer.state[weight] = {
        "step": torch.tensor(float(num_steps)), "exp_avg": torch.zeros_like(v_hat),
        "exp_avg_sq": v_hat * (1 - beta2**num_steps)}
    optimizer.step()
    root = adam.step_root_(
        v_hat.clone(), float(v_hat.mean()), beta2=beta2, num_steps=num_steps, eps=1e-8)
    torch.testing.assert_close(root**2 * gradient, -weight.detach(), rtol=1e-9, atol=0)
    largest = ((1 - beta2 ** (num_steps + 1)) / (1 - beta2)) ** 0.5
    assert (root**2 * gradient <= (1 + 1e-9) * largest).all()
    # What was seen as usual moves as with the denominator before the step, give or take w.
    usual = v_hat[num_unseen:] > v_hat.mean() / 2
    before = v_hat[num_unseen:][usual] ** -0.5
    ratio = root[num_unseen:][usual] ** 2 / before
    assert ((ratio > (1 + 1 / largest**2) ** -0.5 - 1e-6) & (ratio < (1 - 1 / largest**2) ** -0.5 + 1e-6)).all()
