"""Weights in 4 and 8 bits: the published levels, the nearest code, products and gradients of the dequantised weight."""

from statistics import NormalDist
from typing import Any

import pytest
import torch
from test_lora import MOE, model_config
from torch import Tensor

from smalti.config.adapter import AdapterConfig, Quantization
from smalti.model.adapters.apply import apply, is_adapter, stored_as
from smalti.model.adapters.lora import draw
from smalti.model.adapters.quantized import NF4, dequantize, quantize
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights


def test_levels_are_the_quantiles_of_the_paper() -> None:
    """2^(k-1) + 1 quantiles for one half, 2^(k-1) for the other, 0 once (arXiv:2305.14314, section 3)."""

    def quantiles(count: int) -> list[float]:
        last = 0.9677083  # the mean of 1 - 1/30 and 1 - 1/32
        return [NormalDist().inv_cdf(last + (0.5 - last) * i / (count - 1)) for i in range(count - 1)]

    levels = sorted([*quantiles(9), 0.0, *(-value for value in quantiles(8))])
    assert len(set(NF4)) == 16
    torch.testing.assert_close(torch.tensor(NF4), torch.tensor(levels) / max(levels), rtol=1e-6, atol=1e-7)


def by_hand(weight: Tensor, kind: Quantization) -> Tensor:
    steps = torch.arange(-127, 128) / 127
    levels = steps if kind == "int8" else torch.tensor(NF4)
    blocks = weight.flatten().float().split(64)
    scales = [float(block.abs().max()) for block in blocks]
    stored = [s for i in range(0, len(scales), 256) for s in rounded(scales[i : i + 256])]
    out = []
    for block, scale, again in zip(blocks, scales, stored if kind == "nf4_double" else scales, strict=True):
        nearest = ((block / scale)[:, None] - levels).abs().argmin(dim=1)
        out.append(levels[nearest] * again)
    return torch.cat(out).view(weight.shape)


def rounded(scales: list[float]) -> list[float]:
    """A group of scales as nf4_double stores them: the nearest, as a ratio, of 255 levels in geometric progression."""
    least, most = min(scales), max(scales)
    levels = [least * (most / least) ** (i / 254) for i in range(255)]
    return [min(levels, key=lambda level: max(level / scale, scale / level)) for scale in scales]


@pytest.mark.parametrize("kind", ["nf4", "nf4_double", "int8"])
@pytest.mark.parametrize("shape", [(8, 24), (3, 20, 12), (2, 31), (70, 260)])
def test_each_number_becomes_the_nearest_level_of_its_block(kind: Quantization, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(weight, kind)
    blocks = -(-weight.numel() // 64)
    assert codes.shape == (blocks, 64 if kind == "int8" else 32)
    assert scales.shape == ((-(-blocks // 256), 264) if kind == "nf4_double" else (blocks, 4))
    again = dequantize(codes, scales, shape, kind, torch.float32)
    torch.testing.assert_close(again, by_hand(weight, kind), rtol=1e-6, atol=1e-6)
    assert torch.equal(
        quantize(again, kind)[0].flatten()[: weight.numel() // 2], codes.flatten()[: weight.numel() // 2]
    )
    assert not dequantize(*quantize(torch.zeros(64), kind), (64,), kind, torch.float32).any()


@pytest.mark.parametrize("factor", [1, 300, 1e-6])
def test_one_block_leaves_the_error_of_the_others(factor: float) -> None:
    """Of one group, a block is far larger or smaller and one is 0; the error of the others is that of exact scales."""
    weight = torch.randn(255, 64, generator=torch.Generator().manual_seed(0))
    weight[5] *= factor
    weight[9] = 0

    def error(kind: Quantization) -> float:
        again = dequantize(*quantize(weight, kind), weight.shape, kind, torch.float32)
        assert not again[9].any()
        others = torch.arange(255) != 5
        return float((again - weight)[others].norm() / weight[others].norm())

    assert 0.08 < error("nf4") < 0.1
    assert error("nf4_double") < 1.03 * error("nf4")


def with_base(config: Any, adapter: AdapterConfig, weights: dict[str, Tensor]) -> Decoder:
    """A model with adapters (B not 0) beside the given weights."""
    model = Decoder(config)
    apply(model, adapter)
    there = model.state_dict()
    with torch.no_grad():
        for name, weight in weights.items():
            for target, value in stored_as(there, name, weight).items():
                there[target].copy_(value)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(draw(name.replace("lora_B", "lora_A"), parameter.shape, seed=2))
    return model


@pytest.mark.parametrize("moe", [None, MOE | {"kernel": "loop"}, MOE | {"kernel": "grouped"}])
@pytest.mark.parametrize("kind", ["nf4", "nf4_double", "int8"])
def test_model_computes_with_the_dequantised_weights(kind: Quantization, moe: dict[str, Any] | None) -> None:
    """Logits and gradients are those of a model whose frozen weights are the dequantised ones."""
    config = model_config(moe=moe, hidden_size=32)
    plain = Decoder(config)
    init_weights(plain, config, seed=1)
    weights = plain.state_dict()
    rounded = {
        name: by_hand(weight, kind) if "_proj" in name and "bias" not in name else weight
        for name, weight in weights.items()
    }
    adapter: dict[str, Any] = {"rank": 3, "targets": ("q_proj", "mlp"), "layers": (1, 1)}
    model = with_base(config, AdapterConfig(quantize=kind, **adapter), weights)
    reference = with_base(config, AdapterConfig(**adapter), rounded)
    assert sum(p.nbytes for p in model.parameters()) < 0.6 * sum(p.nbytes for p in reference.parameters())
    ids_BT = torch.arange(20).view(2, 10)
    for one in (model, reference):
        one(ids_BT).value.square().sum().backward()
    torch.testing.assert_close(model(ids_BT).value, reference(ids_BT).value, rtol=1e-4, atol=1e-5)
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert gradients
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-4)
