"""Memory of tuning: adapters by published numbers and by real modules, states by ZeRO, QLoRA's one GPU."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_params import models
from test_plan_weights import preset

from smalti.base.errors import UserError
from smalti.cli.main import run
from smalti.config.adapter import AdapterConfig, Quantization
from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.cost.memory.adapters import bytes_of as stored_bytes
from smalti.cost.memory.snapshots import Rank, step_snapshots
from smalti.cost.memory.tape import MicrobatchShape
from smalti.cost.params import count
from smalti.cost.weights import weights
from smalti.plan.tuning import ALL_LINEAR, STATE_BYTES, Tuned, Tuning, lora_params


def llama_65b() -> ModelConfig:
    """LLaMA 65B (Touvron et al. 2023, arXiv 2302.13971, table 2: 65.2B parameters)."""
    return preset(
        "llama-2-7b", "hidden_size=8192", "intermediate_size=22016", "num_hidden_layers=80", "num_attention_heads=64"
    )


@pytest.mark.parametrize(
    ("model", "rank", "targets", "params"),
    [
        # Hu et al. 2021 (arXiv 2106.09685), table 4: GPT-3 with LoRA has 4.7M or 37.7M
        ("gpt-3-175b", 1, ("q_proj", "v_proj"), 4_718_592),
        ("gpt-3-175b", 8, ("q_proj", "v_proj"), 37_748_736),
        # and table 5: 18M, whether rank 8 is on one matrix or rank 2 on all four of attention
        ("gpt-3-175b", 8, ("q_proj",), 18_874_368),
        ("gpt-3-175b", 2, ("q_proj", "k_proj", "v_proj", "o_proj"), 18_874_368),
        # what PEFT prints for LLaMA 7B (alpaca-lora's finetune.py with its first defaults)
        ("llama-2-7b", 8, ("q_proj", "v_proj"), 4_194_304),
        ("llama-2-7b", 16, ALL_LINEAR, 39_976_960),
        # what Unsloth's notebook prints for Llama-3 8B
        ("llama-3-8b", 16, ALL_LINEAR, 41_943_040),
    ],
)
def test_adapters_of_published_models(model: str, rank: int, targets: tuple[str, ...], params: int) -> None:
    assert lora_params(preset(model), rank, targets) == params


@pytest.mark.slow
@given(models(), st.integers(1, 9), st.sets(st.sampled_from(ALL_LINEAR), min_size=1))
def test_adapters_of_the_module(config: ModelConfig, rank: int, names: set[str]) -> None:
    """Against every matrix of that name in the real module; experts' are [E, F, D] and get one adapter each."""
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    with torch.device("meta"):
        module = Decoder(config)
    expected = 0
    for name, parameter in module.named_parameters():
        if any(part in names for part in name.split(".")) and not name.endswith("bias"):
            *experts, rows, columns = parameter.shape
            expected += rank * (rows + columns) * (experts[0] if experts else 1)
    assert lora_params(config, rank, sorted(names)) == expected


def test_states_of_zero() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters take 120 GB, 1.9 GB each on 64 devices with all sharded."""
    assert STATE_BYTES * 7.5e9 == 120e9
    each = STATE_BYTES * 7.5e9 / 64
    assert each == pytest.approx(1.9e9, abs=0.05e9)


def test_full_tuning_takes_16_bytes_a_parameter() -> None:
    model = preset("llama-3-70b")
    one = Tuned(model, Tuning("full", 2048)).on(1)
    assert one.state_bytes == 16 * count(model).total
    assert (one.frozen_bytes, one.reference_bytes) == (0, 0)


def test_qlora_puts_65b_on_one_48_gb_gpu() -> None:
    """Dettmers et al. 2023 (arXiv 2305.14314), abstract: 65B on one GPU of 48 GB; section 1: from more than 780 GB.

    Rows of 512 tokens, as in their figure 6; NF4 with double quantisation; rank 16 on every matrix.
    """
    found = Tuned(llama_65b(), Tuning("qlora", 512, quantize="nf4_double")).on(1)
    assert found.total_bytes < 48e9
    assert found.tensors_bytes < 40e9
    assert Tuned(llama_65b(), Tuning("lora", 512)).on(1).total_bytes > 130e9
    assert 12 * count(llama_65b()).total == pytest.approx(780e9, rel=0.01), "16-bit weights and gradients, fp32 moments"
    assert Tuned(llama_65b(), Tuning("full", 512)).on(1).total_bytes > 780e9
    # rank 64 with fp32 masters is beyond it: they kept adapters in 16 bits and paged the optimizer out
    assert Tuned(llama_65b(), Tuning("qlora", 512, rank=64, quantize="nf4_double")).on(1).total_bytes > 48e9


def test_lora_of_gpt_3_keeps_350_gb_of_weights() -> None:
    """Hu et al. 2021, section 4.2: 350 GB with r = 4 on query and value; a checkpoint of 35 MB."""
    found = Tuned(preset("gpt-3-175b"), Tuning("lora", 2048, rank=4, targets=("q_proj", "v_proj")))
    assert found.frozen == pytest.approx(350e9, rel=0.003)
    assert 2 * found.trainable == pytest.approx(35 * 2**20, rel=0.03)


@pytest.mark.parametrize("quantize", [None, "nf4", "nf4_double", "int8"])
def test_frozen_matrices_take_the_bytes_of_a_run(quantize: Quantization | None) -> None:
    model, run = preset("llama-2-7b"), AdapterConfig(quantize=quantize or "nf4")
    matrices = sum(weight.params for weight in weights(model) if weight.kind in ("attention", "mlp"))
    frozen = Tuned(model, Tuning("qlora", 512, quantize=quantize)).frozen - 2 * (count(model).total - matrices)
    assert frozen == pytest.approx(matrices * stored_bytes(run, compute_bytes=2), rel=1e-6)


def test_qlora_of_7b_takes_less_than_10_gb() -> None:
    """torchtune's tutorial: Llama 2 7B with QLoRA in less than 10 GB."""
    assert Tuned(preset("llama-2-7b"), Tuning("qlora", 2048)).on(1).total_bytes < 10e9


def test_dpo_adds_a_reference_but_not_with_adapters() -> None:
    model = preset("llama-3-8b")
    full, dpo = (Tuned(model, Tuning(method, 1024, microbatch=2)).on(4) for method in ("full", "dpo"))
    assert dpo.reference_bytes == -(-2 * count(model).total // 4)
    assert dpo.state_bytes == full.state_bytes
    assert dpo.activations_bytes == Tuned(model, Tuning("full", 1024, microbatch=4)).on(4).activations_bytes
    lora, dpo_lora = (Tuned(model, Tuning(method, 1024)).on(4) for method in ("lora", "dpo-lora"))
    assert dpo_lora.reference_bytes == 0
    assert dpo_lora.frozen_bytes == lora.frozen_bytes


def test_recomputation_keeps_less() -> None:
    model = preset("llama-3-8b")
    for method in ("full", "lora", "dpo"):
        kept = {recompute: Tuned(model, Tuning(method, 2048, recompute=recompute)).on(1) for recompute in (True, False)}
        assert kept[True].activations_bytes < kept[False].activations_bytes / 5


@given(models(), st.sampled_from(["full", "lora", "qlora", "dpo", "dpo-lora"]), st.floats(1e4, 1e8), st.integers(1, 3))
def test_the_fewest_devices_are_the_fewest(config: ModelConfig, method: Any, room: float, rows: int) -> None:
    plan = Tuned(config, Tuning(method, min(4, config.max_position_embeddings), microbatch=rows))
    found = plan.fewest(room)
    if found is None:
        assert plan.on(10**12).total_bytes > room or plan.on(2).total_bytes > room
        return
    assert found.total_bytes <= room
    assert found.devices == 1 or plan.on(found.devices - 1).total_bytes > room
    assert plan.fewest(room, most=found.devices) == found
    assert found.devices == 1 or plan.fewest(room, most=found.devices - 1) is None


@given(models(), st.sampled_from(["full", "lora", "qlora", "dpo", "dpo-lora"]))
def test_more_devices_hold_no_more_each(config: ModelConfig, method: Any) -> None:
    plan = Tuned(config, Tuning(method, min(4, config.max_position_embeddings)))
    sizes = [plan.on(devices).total_bytes for devices in (2, 3, 8, 1000)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-2-7b", "mpt-7b", "mixtral-8x7b", "dbrx-132b"])
@pytest.mark.parametrize("devices", [1, 8, 64])
def test_full_tuning_is_about_a_training_step(name: str, devices: int) -> None:
    """Beside ``cost/memory/snapshots.py``, which follows the step: the sum of the parts is its peak or up to a quarter
    more, for logits and blocks are not at their most at one time."""
    model = preset(name)
    for recompute in (True, False):
        rank = Rank(shards=devices, recompute=recompute, step_tokens=2048, chunk_bytes=LossConfig().tile_bytes("cuda"))
        steps = step_snapshots(model, MicrobatchShape(1, 2048, 2, "cuda"), rank)
        peak = max(moment.parts.total for moment in steps)
        ours = Tuned(model, Tuning("full", 2048, recompute=recompute)).on(devices).tensors_bytes
        assert 1 < ours / peak < 1.25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "full", "--rank", "8"], "no adapters"),
        (["--method", "dpo", "--targets", "q_proj"], "no adapters"),
        (["--rank", "0"], "rank = 0"),
        (["--rank", "-3"], "rank = -3"),
        (["--rank", "4097"], "up to 4,096"),
        (["--seq-len", "0"], "seq_len = 0"),
        (["--seq-len", "100000000"], "max_position_embeddings"),
        (["--microbatch", "0"], "microbatch = 0"),
        (["--targets", "q_prj"], "q_proj"),
        (["--targets", ""], "is not a matrix"),
        (["--usable", "0"], "is not a share"),
        (["--gpu", "abacus"], "not known"),
        (["--gpu", "apple-m2-max-96gb"], "does not run on"),
        (["--method", "p-tuning"], "full"),
        (["--quantize", "nf4"], "no effect with method 'lora'"),
    ],
)
def test_refused_by_name(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "tuning", "llama-3-8b", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plain_mlp_has_no_gate() -> None:
    model = preset("mpt-7b")
    assert "gate_proj" not in Tuned(model, Tuning("lora", 128)).targets
    with pytest.raises(UserError, match="gate_proj"):
        Tuned(model, Tuning("lora", 128, targets=("gate_proj",)))


def test_in_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "tuning", "llama-3-8b", "--method", "qlora", "--targets", "all-linear", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["devices"]}
    assert rows["rtx4090"]["gpus"] == 1
    assert found["trainable_params"] == 41_943_040
    assert run(["plan", "tuning", "llama-3-70b", "--method", "full", "--gpu", "h100-sxm"]) == 0
    assert "h100-sxm" in capsys.readouterr().out
    assert run(["plan", "tuning", "llama-3-70b", "--method", "full", "--gpu", "rtx4090"]) == 3
    assert "one rtx4090 is not enough, and no network" in capsys.readouterr().out
