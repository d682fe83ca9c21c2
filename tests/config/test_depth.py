"""The presets ``depth-N``: their values, what overrides them, and the constraints of their sizes."""

import itertools
from pathlib import Path

import pytest

from smalti.base.errors import UserError
from smalti.config.depth import DEEPEST, depth_preset
from smalti.config.load import from_dict, load, show
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count

DEPTHS = range(1, DEEPEST + 1)


def run(preset: str, **train: object) -> RunConfig:
    data = {"sources": {"a": "tokens"}, "seq_len": 2048, "stages": [{"weights": {"a": 1}}]}
    values = {"name": "dialled", "model": {"preset": preset}, "data": data}
    return from_dict(RunConfig, values | ({"train": train} if train else {})).config


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["", "-moe"])
def test_everything_grows_with_the_depth_and_the_rate_falls(kind: str) -> None:
    runs = [run(f"depth-{n}{kind}") for n in DEPTHS]
    for field in ("hidden_size", "intermediate_size"):
        values = [getattr(one.model, field) for one in runs]
        assert values == sorted(values)
    sizes = [count(one.model).total for one in runs]
    batches = [one.train.global_batch_tokens for one in runs]
    tokens = [one.length.tokens(one.length.total_steps) for one in runs]
    rates = [one.train.optimizer.lr for one in runs]
    assert all(below < above for below, above in itertools.pairwise(sizes))
    assert batches == sorted(batches)
    assert tokens == sorted(tokens)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]


@pytest.mark.parametrize("depth", DEPTHS)
def test_sizes_fit_every_familys_heads(depth: int) -> None:
    model = run(f"depth-{depth}").model
    assert model.num_hidden_layers == depth
    assert model.hidden_size == model.num_attention_heads * model.width_per_head
    assert model.width_per_head in (64, 128)
    assert model.num_attention_heads % model.kv_heads == 0
    assert depth * 64 <= model.hidden_size < depth * 64 + 256
    shape = {name: getattr(model, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers",
             "num_attention_heads", "intermediate_size", "num_key_value_heads")}  # fmt: skip
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    ModelConfig(family="mistral", **shape)
    ModelConfig(family="qwen3", qk_norm="head", **shape)
    ModelConfig(family="olmo2", qk_norm="full", norm_placement="post", **shape)
    ModelConfig(family="mixtral", moe=moe, **shape)
    ModelConfig(family="olmoe", qk_norm="full", moe=moe, **shape)


@pytest.mark.parametrize("depth", [1, 4, 12, 32, 80])
def test_a_mixture_meets_the_parameters_of_its_dense_twin(depth: int) -> None:
    dense, moe = count(run(f"depth-{depth}").model), count(run(f"depth-{depth}-moe").model)
    assert moe.mlp_active == dense.mlp
    assert moe.mlp == 4 * dense.mlp
    assert run(f"depth-{depth}").train == run(f"depth-{depth}-moe").train


@pytest.mark.sample(3)
@pytest.mark.parametrize("depth", [1, 2, 7, 12, 24, 48])
@pytest.mark.parametrize("kind", ["", "-moe"])
def test_built_whole_on_the_meta_device(depth: int, kind: str) -> None:
    torch = pytest.importorskip("torch")
    from smalti.model.decoder import Decoder

    config = run(f"depth-{depth}{kind}").model
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == count(config).total


def test_training_by_the_published_laws() -> None:
    """DeepSeek LLM's equations with plan's own count of FLOPs, less the vocabulary."""
    config = run("depth-24")
    flops = train_flops_per_token(config.model, 2048) - 6 * count(config.model).head
    compute = (flops / 0.1715) ** (1 / 0.5243)
    tokens = config.length.tokens(config.length.total_steps)
    assert tokens == pytest.approx(5.8316 * compute**0.4757, rel=0.05)
    assert flops * tokens == pytest.approx(compute, rel=0.05), "their M times their D is C"
    assert config.train.optimizer.lr == pytest.approx(0.3118 * compute**-0.125, rel=0.05)
    assert 2**-0.5 <= config.train.global_batch_tokens / (0.2920 * compute**0.3271) <= 2**0.5


RECIPE = """\
name: mine
model: {preset: depth-4, vocab_size: 4096}
data: {sources: {a: tokens}, seq_len: 256, stages: [{weights: {a: 1}}]}
train:
  optimizer: {lr: 1e-3}
"""


def test_what_is_written_wins_and_what_followed_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    loaded = load(RunConfig, str(path), ["model.num_attention_heads=8"])
    assert (loaded.config.model.vocab_size, loaded.config.model.num_attention_heads) == (4096, 8)
    assert (loaded.config.model.hidden_size, loaded.config.train.global_batch_tokens) == (256, 65536)
    assert loaded.config.train.optimizer.lr == 1e-3
    assert loaded.origins["model.num_hidden_layers"].startswith("preset depth-4:")
    assert loaded.origins["train.global_batch_tokens"].startswith("preset depth-4:")
    assert loaded.origins["train.optimizer.lr"] == f"{path}:5"
    assert loaded.origins["model.num_attention_heads"] == "command line"
    assert "global_batch_tokens: 65536" in show(loaded)


def test_the_dial_is_turned_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    deeper = load(RunConfig, str(path), ["model.preset=depth-16-moe"]).config
    assert (deeper.model.num_hidden_layers, deeper.model.family) == (16, "dbrx")
    assert deeper.train.global_batch_tokens > 65536
    assert deeper.model.vocab_size == 4096


@pytest.mark.parametrize("name", ["depth-0", "depth-129", "depth-", "depth-012", "depth-4-dense", "depth-N"])
def test_depths_that_do_not_exist(name: str) -> None:
    assert depth_preset(name) is None
    with pytest.raises(UserError) as caught:
        run(name)
    assert f"'{name}' is not a preset" in str(caught.value)
    assert "depth-N (N from 1 to 128)" in str(caught.value)
    assert "hint: N of depth-N goes from 1 to 128, as in depth-12 or depth-12-moe" in str(caught.value)


@pytest.mark.parametrize(("batch_tokens", "rate"), [(65536, 3.1e-3), (8192, 1.1e-3), (4096, 7.7e-4), (131072, 3.1e-3)])
def test_the_rate_follows_a_smaller_batch(tmp_path: Path, batch_tokens: int, rate: float) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.partition("train:")[0])
    loaded = load(RunConfig, str(path), [f"train.global_batch_tokens={batch_tokens}"])
    assert loaded.config.train.optimizer.lr == pytest.approx(rate)
    origin = loaded.origins["train.optimizer.lr"]
    assert origin.startswith("preset depth-4:")
    assert ("for a batch of" in origin) == (batch_tokens < 65536)
    typed = load(RunConfig, str(path), [f"train.global_batch_tokens={batch_tokens}", "train.optimizer.lr=2e-3"])
    assert typed.config.train.optimizer.lr == 2e-3
    again = load(RunConfig, str(path), [f"train.global_batch_tokens={batch_tokens}", "train.duration=5step"])
    assert again.config.train.optimizer.lr == loaded.config.train.optimizer.lr
