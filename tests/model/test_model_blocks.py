"""Rotary embedding and norms against plain formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import dense, distance

from smalti.model.blocks.norm import LayerNorm, RMSNorm
from smalti.model.blocks.rope import rope_table, rotate


@given(width=st.sampled_from([2, 6, 16]), theta=st.sampled_from([10.0, 1e4, 5e5]), seed=st.integers(0, 100))
def test_rotation_is_complex_multiplication(width, theta, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 3, width, generator=random, dtype=torch.float64)
    positions = torch.randint(0, 50, (2, 5), generator=random)
    ours = rotate(x, *rope_table(dense(head_dim=width, rope_theta=theta), positions, torch.float64))
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * positions[:, :, None, None] * frequency)
    assert distance(ours, torch.cat([turned.real, turned.imag], -1)) < 1e-5


def test_rotation_backward_is_exact():
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(dense(head_dim=6, rope_theta=100.0), torch.arange(4)[None], torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *table), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_their_formulas(dtype):
    x = (torch.randn(3, 7, 24) * 5 + 1).to(dtype)
    rms, layer = RMSNorm(24, 1e-5).to(dtype), LayerNorm(24, 1e-5).to(dtype)
    with torch.no_grad():
        rms.weight.uniform_(0.5, 2)
        layer.weight.uniform_(0.5, 2)
    wide = x.double()
    by_hand = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * rms.weight.double()
    centred = wide - wide.mean(-1, keepdim=True)
    by_hand_layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight.double()
    limit = 1e-6 if dtype == torch.float32 else 5e-3
    assert rms(x).dtype == layer(x).dtype == dtype
    assert distance(rms(x), by_hand) < limit
    assert distance(layer(x), by_hand_layer) < limit
