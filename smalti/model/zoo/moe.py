"""Conversions of experts that Mixtral, OLMoE and Qwen3-MoE share; everything else in them is named as in Llama.

Their folders store the matrices of each expert separately, both on the hub and as written by transformers 5.23,
although its modules hold all experts in one tensor.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.fields import Fields, Json
from smalti.model.zoo.tensor_names import Rule, attention_rules, mlp_rules, norm_rules, outer_rules, same, stacked

_PARTS = ("gate_proj", "up_proj", "down_proj")


def moe_to_huggingface(config: ModelConfig, experts_key: str) -> Json:
    """Return the keys on experts that all three have; ``experts_key`` is the key of their number."""
    assert config.moe is not None
    return {
        experts_key: config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "router_aux_loss_coef": config.moe.balance_loss_coef,
    }


def moe_from_huggingface(raw: Fields, *, experts: int, per_token: int, loss_coef: float) -> Json:
    """Return the fields of ``model.moe``; the arguments are the family's defaults of absent keys.

    transformers reads the number of experts under two names and writes one of them.
    """
    values = [raw.take(key, int, None) for key in ("num_experts", "num_local_experts")]
    numbers = set(values) - {None}
    if len(numbers) > 1:
        raise raw.refusal("num_experts", f"num_local_experts is {values[1]}")
    return {
        "num_experts": numbers.pop() if numbers else experts,
        "num_experts_per_tok": raw.take("num_experts_per_tok", int, per_token),
        "balance_loss_coef": raw.take("router_aux_loss_coef", float, loss_coef),
    }


def moe_rules(config: ModelConfig, block: str = "mlp", parts: tuple[str, str, str] = _PARTS) -> list[Rule]:
    """Return all rules; ``block`` and ``parts`` are Hugging Face's names of the MoE and of gate, up and down."""
    rules = outer_rules(config)
    for layer in range(config.num_hidden_layers):
        rules += norm_rules(layer) + attention_rules(config, layer)
        if config.has_experts(layer):
            rules += _expert_rules(config, f"blocks.{layer}.mlp.", f"model.layers.{layer}.{block}.", parts)
        else:
            rules += mlp_rules(config, layer)
    return rules


def _expert_rules(config: ModelConfig, ours: str, theirs: str, parts: tuple[str, str, str]) -> list[Rule]:
    """Return the rules of a layer's router and experts; Hugging Face stores gate and up [F, D], but down [D, F]."""
    assert config.moe is not None
    gate, up, down = (
        tuple(f"{theirs}experts.{expert}.{part}.weight" for expert in range(config.moe.num_experts)) for part in parts
    )
    return [
        same(f"{ours}router.weight", f"{theirs}gate.weight"),
        stacked(f"{ours}experts.gate_proj", gate),
        stacked(f"{ours}experts.up_proj", up),
        stacked(f"{ours}experts.down_proj", down, transposed=True),
    ]
