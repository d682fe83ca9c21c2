"""Low-rank adapters against a naive reference in float64, and their initial values."""

from typing import Any

import pytest
import torch
from torch import Tensor

from smalti.config.adapter import AdapterConfig
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.model.adapters.apply import apply, is_adapter
from smalti.model.adapters.lora import LoRAExperts, draw
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights


def model_config(**changes: Any) -> ModelConfig:
    tree: dict[str, Any] = {
        "family": "decoder",
        "vocab_size": 40, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return from_dict(ModelConfig, tree | changes, "test").config


def adapted(config: ModelConfig, dtype: torch.dtype = torch.float64, **adapter: Any) -> Decoder:
    """A decoder whose adapters, B too, have values."""
    model = Decoder(config)
    init_weights(model, config, seed=1)
    apply(model, AdapterConfig(**adapter))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model.to(dtype)


def merged_by_hand(model: Decoder, scale: float) -> dict[str, Tensor]:
    """The weights of the plain decoder that computes the same, matrix by matrix."""
    tensors = model.state_dict()
    weights = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        stem = f"{name.removesuffix('.weight')}{'.' if name.endswith('.weight') else '_'}lora_"
        change = torch.zeros_like(tensor)
        if f"{stem}A" in tensors and tensor.ndim == 2:
            change = tensors[f"{stem}B"] @ tensors[f"{stem}A"]
        elif f"{stem}A" in tensors:
            pairs = zip(tensors[f"{stem}B"], tensors[f"{stem}A"], strict=True)
            change = torch.stack([(b @ a).T if "down" in name else b @ a for b, a in pairs])
        weights[name] = tensor + scale * change
    return weights


MOE: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "kernel": "loop", "num_shared_experts": 1}


@pytest.mark.parametrize("changes", [{}, {"moe": MOE}, {"gated": False, "moe": MOE | {"num_shared_experts": 0}}])
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_equal_weights_with_their_product_added(changes: dict[str, Any], rslora: bool) -> None:
    config = model_config(**changes)
    model = adapted(config, rank=3, alpha=6, rslora=rslora)
    assert sum(map(is_adapter, model.state_dict())) == 2 * sum(
        name.endswith("_proj.weight") or name.endswith("_proj") for name in model.state_dict()
    )
    plain = Decoder(config).double()
    plain.load_state_dict(merged_by_hand(model, 6 / 3**0.5 if rslora else 2.0))
    ids_BT = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(ids_BT).value, plain(ids_BT).value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_equal_the_loop(gated: bool) -> None:
    """Outputs and gradients, at widths and ranks that the kernel pads."""
    config = model_config(
        gated=gated, hidden_size=20, head_dim=4, intermediate_size=12, moe=MOE | {"num_shared_experts": 0}
    )
    experts = adapted(config, torch.float32, rank=3, targets=("experts",)).blocks[0].mlp.experts
    assert isinstance(experts, LoRAExperts)
    x_ND = torch.randn(17, 20, generator=torch.Generator().manual_seed(1))
    expert_Nk = torch.stack([torch.arange(17) % 3, (torch.arange(17) + 1) % 3], dim=1)
    weight_Nk = torch.rand(17, 2, generator=torch.Generator().manual_seed(2))
    results = []
    for kernel in ("loop", "grouped"):
        experts.kernel = kernel  # type: ignore[assignment]
        inputs = [x_ND.clone().requires_grad_(), weight_Nk.clone().requires_grad_()]
        experts.zero_grad()
        out_ND = experts(inputs[0], expert_Nk, inputs[1])
        out_ND.square().sum().backward()
        gradients = {name: p.grad.clone() for name, p in experts.named_parameters() if p.grad is not None}
        assert all("lora" in name for name in gradients)
        results.append({"out": out_ND.detach(), "x": inputs[0].grad, "weight": inputs[1].grad, **gradients})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=2e-4, atol=1e-5, msg=name)


def test_layers_and_targets_choose_the_matrices() -> None:
    config = model_config(moe=MOE | {"mlp_only_layers": [0]})
    model = adapted(config, rank=2, layers=(1, 1), targets=("q_proj", "experts.down_proj"))
    assert [name for name in model.state_dict() if is_adapter(name)] == [
        "blocks.1.attention.q_proj.lora_A", "blocks.1.attention.q_proj.lora_B",
        "blocks.1.mlp.experts.down_proj_lora_A", "blocks.1.mlp.experts.down_proj_lora_B",
    ]  # fmt: skip
    assert [name for name, p in model.named_parameters() if p.requires_grad] == list(
        filter(is_adapter, model.state_dict())
    )


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    name, shape = "blocks.0.mlp.experts.up_proj_lora_A", torch.Size((3, 4, 25))
    whole = draw(name, shape, seed=5)
    assert torch.equal(whole[1], draw(name, shape, seed=5)[1])
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, draw(name, shape, seed=6))
    assert 0.15 < whole.abs().max() <= 0.2
    assert not draw(name.replace("_A", "_B"), shape, seed=5).any()


def test_frozen_weights_take_the_dtype_of_the_computation() -> None:
    model = Decoder(model_config(moe=MOE))
    apply(model, AdapterConfig(), compute=torch.bfloat16)
    for name, parameter in model.named_parameters():
        full = is_adapter(name) or ".router." in name
        assert parameter.dtype == (torch.float32 if full else torch.bfloat16), name
