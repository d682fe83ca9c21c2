"""What the mixtures have in common that spell everything but their experts as Llama does: Mixtral, OLMoE, Qwen3-MoE.

Their folders hold each expert's matrices by themselves, in the hub's files and in those that transformers 5.23 writes,
although its modules keep all experts in one tensor.
"""

from smalti.config.model import ModelConfig
from smalti.model.zoo.family import Rule, attention_rules, mlp_rules, norm_rules, outer_rules, same, stacked
from smalti.model.zoo.fields import Fields, Json

_PARTS = ("gate_proj", "up_proj", "down_proj")


def moe_to_huggingface(config: ModelConfig, experts_key: str) -> Json:
    """What all three say of their experts; ``experts_key`` is where their number stands."""
    assert config.moe is not None
    return {
        experts_key: config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_experts_per_tok,
        "router_aux_loss_coef": config.moe.balance_loss_coef,
    }


def moe_from_huggingface(raw: Fields, *, experts: int, per_token: int, loss_coef: float) -> Json:
    """The reverse; the arguments are the family's defaults of absent keys.

    transformers reads the number of experts under two names and writes one of them.
    """
    given = [raw.take(key, int, None) for key in ("num_experts", "num_local_experts")]
    numbers = set(given) - {None}
    if len(numbers) > 1:
        raise raw.refusal("num_experts", f"num_local_experts={given[1]} says otherwise")
    return {
        "num_experts": numbers.pop() if numbers else experts,
        "num_experts_per_tok": raw.take("num_experts_per_tok", int, per_token),
        "balance_loss_coef": raw.take("router_aux_loss_coef", float, loss_coef),
    }


def mixture_rules(config: ModelConfig, block: str = "mlp", parts: tuple[str, str, str] = _PARTS) -> list[Rule]:
    """All weights; ``block`` is their name of a layer's mixture, ``parts`` those of gate, up and down in an expert."""
    found = outer_rules(config)
    for layer in range(config.num_hidden_layers):
        found += norm_rules(layer) + attention_rules(config, layer)
        if config.has_experts(layer):
            found += _expert_rules(config, f"blocks.{layer}.mlp.", f"model.layers.{layer}.{block}.", parts)
        else:
            found += mlp_rules(config, layer)
    return found


def _expert_rules(config: ModelConfig, ours: str, theirs: str, parts: tuple[str, str, str]) -> list[Rule]:
    """Ours are [E, F, D]; theirs [F, D] for gate and up, and [D, F] for down."""
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
