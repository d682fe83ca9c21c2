"""Memory against what was printed: GPT-3, Llama 2 and 3, Mixtral, DBRX, ZeRO's table, Korthikanti's savings.

Each figure is held to the digits that it was printed with: half of the last digit either way.
"""

import pytest
from example_config import VALUES
from published_memory import MIXED_PRECISION_ADAM_BYTES, layer_activation_bytes, zero_bytes

from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.cost.params import count

LLAMA_2_70B = {
    "family": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
"""config.json of meta-llama/Llama-2-70b-hf; the model card prints 70B."""

# Weights in bf16 in GB, and the unit of the last printed digit.
WEIGHTS_GB = [
    ("gpt-3-175b", 350, 10),  # "350 GB" of 175B parameters (LoRA, arXiv 2106.09685, section 4.2)
    ("llama-2-7b", 13.5, 0.1),  # size of the files on the Hub, as of the next four
    ("llama-3-8b", 16.1, 0.1),
    ("llama-3-70b", 141.1, 0.1),
    ("mixtral-8x7b", 93.4, 0.1),
    ("dbrx", 264, 2),  # "roughly 264GB of RAM" (DBRX's repository, README)
]


@pytest.mark.parametrize(("name", "gb", "digit"), WEIGHTS_GB)
def test_weights_in_bf16(name: str, gb: float, digit: float) -> None:
    params = count(from_dict(ModelConfig, {"preset": name}).config).total
    assert 2 * params / 1e9 == pytest.approx(gb, abs=digit / 2)


def test_weights_of_llama_2_70b() -> None:
    params = count(ModelConfig.model_validate(LLAMA_2_70B))
    assert params.total == 68_976_648_192
    assert 2 * params.total / 1e9 == pytest.approx(140, abs=5), "of 70B, as it is called: 140 GB; of 69.0B: 138 GB"


def test_sixteen_bytes_a_parameter() -> None:
    """GPT-3: 2.8 TB of weights, gradients and optimizer; ours on one rank are as many."""
    whole = 175e9 * MIXED_PRECISION_ADAM_BYTES
    assert whole / 1e12 == pytest.approx(2.8, abs=0.05)
    values = {**VALUES, "model": {"preset": "gpt-3-175b"}}
    found = memory_per_rank(from_dict(RunConfig, values).config)
    whole = found.params_bytes + found.grads_bytes + found.moments_bytes
    assert whole == pytest.approx(MIXED_PRECISION_ADAM_BYTES * 174.6e9, rel=1e-3)
    assert whole / 1e12 == pytest.approx(2.8, abs=0.05)


# Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1 and table 1: GB on one GPU; 7.5B, 128B and 1T parameters.
ZERO_GB = [
    (7.5e9, 64, (120, 31.4, 16.6, 1.88)),
    (128e9, 64, (2048, 536, 284, 32)),
    (1e12, 1024, (16000, 4011, 2013, 15.6)),
]


@pytest.mark.parametrize(("params", "ranks", "printed"), ZERO_GB)
def test_zeros_table(params: float, ranks: int, printed: tuple[float, ...]) -> None:
    for stage, gb in enumerate(printed):
        last = 10 ** -len(str(gb).partition(".")[2])
        found = zero_bytes(params, ranks, stage) / 1e9
        assert gb - last / 2 <= found < gb + last, f"stage {stage}: rounded, or cut as in the row of 1T"


def test_selective_recomputation_saves_as_printed() -> None:
    """Korthikanti et al., section 5: 70 % of GPT-3's activations, 65 % of MT-NLG's; 5as/h is 80 and 64."""
    for heads, hidden, quadratic, saved in ((96, 12288, 80, 0.70), (128, 20480, 64, 0.65)):
        whole = layer_activation_bytes(1, hidden, heads, 2048, tensor=8, sequence=True)
        rest = layer_activation_bytes(1, hidden, heads, 2048, tensor=8, sequence=True, scores=False)
        assert 5 * heads * 2048 / hidden == quadratic
        assert 1 - rest / whole == pytest.approx(saved, abs=0.005)


def test_a_layer_of_gpt_here_beside_the_paper() -> None:
    """34 s b h less the 2 of dropout's masks, attention fused: the same tensors, one by one."""
    from saved_activations import saved_activation_bytes

    from smalti.cost.memory.tape import MicrobatchShape

    model = from_dict(ModelConfig, {"preset": "gpt-3-175b", "num_hidden_layers": 1}).config
    ours = saved_activation_bytes(model, MicrobatchShape(1, 2048, 2, "cuda"), recompute=False) / (
        2048 * model.hidden_size
    )
    assert ours == pytest.approx(34 - 2, abs=0.05), "and the log-partition, in fp32"
