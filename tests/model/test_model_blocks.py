"""Rotary embedding, norms and short attention against plain formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import distance
from torch.nn import functional as F

from smalti.model.blocks import short_attention as short
from smalti.model.blocks.norm import LayerNorm, RMSNorm
from smalti.model.blocks.rope import rope_table, rotate


@given(width=st.sampled_from([2, 6, 16]), theta=st.sampled_from([10.0, 1e4, 5e5]), seed=st.integers(0, 100))
def test_rotation_is_complex_multiplication(width, theta, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 3, width, generator=random, dtype=torch.float64)
    positions = torch.randint(0, 50, (2, 5), generator=random)
    ours = rotate(x, *rope_table(positions, width, theta, torch.float64))
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turned = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * positions[:, :, None, None] * frequency)
    assert distance(ours, torch.cat([turned.real, turned.imag], -1)) < 1e-5


def test_rotation_backward_is_exact():
    x = torch.randn(1, 4, 2, 6, dtype=torch.float64, requires_grad=True)
    table = rope_table(torch.arange(4)[None], 6, 100.0, torch.float64)
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


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples // 2)
@given(
    time=st.sampled_from([2, 3, 64, 127, 128, 129, 300]),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    documents=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_short_attention_equals_the_fused_kernel(time, groups, repeats, documents, dtype, seed):
    random = torch.Generator().manual_seed(seed)

    def heads(count):
        return torch.randn(2, time, count, 8, generator=random).transpose(1, 2).to(dtype).requires_grad_()

    inputs = (heads(groups * repeats), heads(groups), heads(groups))
    sees = torch.ones(1, 1, time, time, dtype=torch.bool).tril()
    if documents:
        numbers = (torch.rand(2, time, generator=random) > 0.9).cumsum(1)
        sees = sees & (numbers[:, None, :, None] == numbers[:, None, None, :])
    bias = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    exact = F.scaled_dot_product_attention(*(x.float() for x in inputs), attn_mask=sees, enable_gqa=True)
    ours = short.short_attention(*inputs, bias).transpose(1, 2)
    wanted = torch.randn(exact.shape, generator=random)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert distance(ours, exact) < limit
    ours_gradients = torch.autograd.grad(ours, inputs, wanted.to(dtype))
    for gradient, reference in zip(ours_gradients, torch.autograd.grad(exact, inputs, wanted), strict=True):
        # A softmax over two nearly equal scores has almost no gradient; rounding is then relative to what came in.
        floor = 0.3 * float(wanted.norm())
        assert float((gradient.float() - reference).norm()) < limit * max(float(reference.norm()), floor)


def test_only_short_rows_on_the_cpu_take_the_short_path():
    cpu = torch.device("cpu")
    assert short.is_short(torch.bfloat16, cpu, 256)
    assert short.is_short(torch.float32, cpu, 256)
    with torch.no_grad():
        assert short.is_short(torch.bfloat16, cpu, 256)
        assert not short.is_short(torch.float32, cpu, 256)
    assert not short.is_short(torch.float64, cpu, 256)
    assert not short.is_short(torch.bfloat16, cpu, 1)
    assert not short.is_short(torch.bfloat16, cpu, 4096)
    assert not short.is_short(torch.bfloat16, torch.device("meta"), 256)
