"""Models that weights may be loaded into: equal config values, equal content of the tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import llama_config
from tiny_runs import tiny_run, tiny_tokenizer

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig, RopeScalingConfig
from smalti.config.run import RunConfig
from smalti.train import load
from smalti.train.origin import check, context_line, model_of

TOP_1 = {"num_experts": 4, "num_experts_per_tok": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("run"), context=96)


@pytest.fixture
def source(run: Path, tmp_path: Path) -> Path:
    """A run folder with a tokenizer and a checkpoint."""
    return Path(shutil.copytree(run, tmp_path / "runs/tiny"))


def _config(source: Path, tokenizer: Path | None = None, **model: Any) -> RunConfig:
    tree = {
        "name": "next",
        "init_from": str(source),
        "model": llama_config(vocab_size=320, context=96).model_dump() | model,
        "data": {"sources": {"a": "a"}, "seq_len": 32, "stages": [{"weights": {"a": 1}}]},
        "train": {"duration": "4step", "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
    }
    if tokenizer is not None:
        tree["data"]["tokenizer"] = str(tokenizer)
    return from_dict(RunConfig, tree).config


def test_a_run_and_its_checkpoint_are_of_one_model(source: Path) -> None:
    assert model_of(source) == model_of(source / "checkpoints/step-00000020") == llama_config(320, 96)
    with pytest.raises(DataError, match="none of"):
        model_of(source / "tokenizer")


def test_adapters_are_not_a_model_to_start_from(source: Path, tmp_path: Path) -> None:
    config = source / "config.yaml"
    config.write_text(config.read_text().replace("adapter: null", "adapter: {rank: 2, alpha: 4}"))
    with pytest.raises(DataError, match="tiny holds adapters, not a whole model") as raised:
        check(_config(source))
    assert "smalti export RUN --merge" in str(raised.value.hint)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="adapter holds adapters, not a whole model"):
        model_of(tmp_path / "adapter")


def test_the_same_model_and_tokenizer_pass(source: Path) -> None:
    assert check(_config(source, source / "tokenizer")) == []
    same = _config(source, source / "tokenizer", head_dim=8, initializer_range=0.5, max_position_embeddings=64)
    assert check(same) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "model.hidden_size is 64; in init_from=.* it is 32 \\(1 more differ: head_dim\\)"),
        ({"norm_eps": 1e-6}, "model.norm_eps is 1e-06; .* it is 1e-05"),
        ({"vocab_size": 384}, "model.vocab_size is 384"),
    ],
)
def test_another_model_is_refused_by_its_first_field(source: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check(_config(source, **changes))
    assert caught.value.hint == f"smalti config model {source} prints it"


def test_allowed_differences_give_warnings(source: Path) -> None:
    lines = check(_config(source, source / "tokenizer", family="decoder", clip_qkv=8, max_position_embeddings=192))
    assert lines == [
        f"model.clip_qkv=8.0 was not set for the weights of {source}",
        f"model.max_position_embeddings=192 is more than the 96 of the weights of {source}",
    ]
    assert check(_config(source)) == [
        f"it is not checked that the data was tokenized with the tokenizer of init_from={source}; "
        f"name it: data.tokenizer={source}/tokenizer"
    ]


CONTEXT = [
    ({"rope_theta": 5e5}, "model.rope_theta"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "model.rope_scaling"),
    ({"family": "decoder", "sliding_window": 16}, "model.sliding_window"),
    (
        {"family": "decoder", "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
]


@pytest.mark.parametrize(("changes", "key"), CONTEXT, ids=[key for _, key in CONTEXT])
def test_fields_of_the_context_may_differ_where_the_recipe_states_them(
    source: Path, changes: dict[str, Any], key: str
) -> None:
    config = _config(source, source / "tokenizer", **changes)
    assert check(config) == []
    for origin in ("r.yaml:3", "command line"):
        assert check(config, {f"model.{name}": origin for name in changes}) == []
    for origin in ("default", "preset llama-3-8b:4"):
        with pytest.raises(UserError, match="model\\.") as caught:
            check(config, {f"model.{name}": origin for name in changes})
        assert "the recipe states itself" in str(caught.value.allowed)
    assert context_line(config) is not None


def test_a_default_of_a_config_made_in_python_is_not_stated(source: Path) -> None:
    tree = _config(source).model_dump(mode="json")
    tree["model"]["rope_theta"] = 5e5
    (source / "config.yaml").write_text(yaml.safe_dump({"model": tree["model"]}))
    del tree["model"]["rope_theta"]
    with pytest.raises(UserError, match=r"model\.rope_theta is 10000"):
        check(from_dict(RunConfig, tree).config)


def test_biases_of_the_choice_belong_to_the_weights(tmp_path: Path) -> None:
    def model(rate: float, chosen: int = 2) -> ModelConfig:
        moe = {"num_experts": 4, "num_experts_per_tok": chosen, "bias_update_rate": rate}
        return from_dict(ModelConfig, llama_config(320, 96).model_dump() | {"family": "decoder", "moe": moe}).config

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": model(0.002).model_dump(mode="json")}))
    with pytest.raises(UserError, match="choose experts with biases") as caught:
        check(_config(tmp_path, **model(0).model_dump()))
    assert caught.value.hint == "model.moe.bias_update_rate=0.002, as in the training of the weights"
    check(_config(tmp_path, **model(0.5).model_dump()))
    path.write_text(yaml.safe_dump({"model": model(0).model_dump(mode="json")}))
    assert len(check(_config(tmp_path, **model(0.002).model_dump()))) == 1, "they begin at 0; no tokenizer is named"


def test_one_expert_with_weight_1_continues_with_a_warning(tmp_path: Path) -> None:
    model = llama_config(320, 96).model_dump() | {"family": "decoder", "moe": TOP_1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": from_dict(ModelConfig, model).config.model_dump(
        mode="json")}))  # fmt: skip
    assert any("from its balance losses alone" in line for line in check(_config(tmp_path, **model)))
    with pytest.raises(UserError, match="the weight of the only expert is always 1") as caught:
        from_dict(RunConfig, _config(tmp_path, **model).model_dump(mode="json") | {"init_from": None})
    assert caught.value.hint == "model.moe.norm_topk_prob=false"
    mixtral = model | {"family": "mixtral"}
    with pytest.raises(UserError, match="the weight of the only expert") as caught:
        from_dict(RunConfig, _config(tmp_path, **mixtral).model_dump(mode="json") | {"init_from": None})
    assert caught.value.hint == "model.moe.norm_topk_prob=false model.family=olmoe"
    free = model | {"moe": TOP_1 | {"norm_topk_prob": False}}
    from_dict(RunConfig, _config(tmp_path, **free).model_dump(mode="json") | {"init_from": None})


def _tokenizer(folder: Path, change: str) -> Path:
    tiny_tokenizer().save(folder)
    parts = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = parts["model"]["vocab"], parts["model"]["merges"]
    match change:
        case "ids":
            one, other = list(vocab)[-2:]
            vocab[one], vocab[other] = vocab[other], vocab[one]
        case "merges":
            merges[0], merges[1] = merges[1], merges[0]
        case "spelling":  # as older and newer files write the same merges
            parts["model"]["merges"] = [one if isinstance(one, str) else " ".join(one) for one in merges]
        case "more":
            parts["added_tokens"].append({"id": 301, "content": "<|new|>", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(parts))
    return folder


@pytest.mark.parametrize("change", ["ids", "merges"])
def test_another_tokenizer_is_refused_with_both_named(source: Path, tmp_path: Path, change: str) -> None:
    other = _tokenizer(tmp_path / "other", change)
    with pytest.raises(UserError, match="another tokenizer") as caught:
        check(_config(source, other))
    assert str(source / "tokenizer") in caught.value.message
    assert f"data.tokenizer={other}" in caught.value.message


@pytest.mark.parametrize("change", ["spelling", "more"])
def test_the_same_tokenizer_in_another_file_passes(source: Path, tmp_path: Path, change: str) -> None:
    assert check(_config(source, _tokenizer(tmp_path / "other", change))) == []


def test_a_section_that_is_not_complete_is_completed_and_its_scaling_gives_the_length(
    source: Path, tmp_path: Path
) -> None:
    tree = _config(source, source / "tokenizer").model_dump(mode="json", exclude={"model"})
    tree["data"]["seq_len"], tree["train"]["global_batch_tokens"] = 192, 384
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(tree | {"model": {"rope_scaling": {"rope_type": "yarn"}}}))
    loaded = load(str(tmp_path / "next.yaml"), "model.rope_scaling.factor=4")
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    longer = from_dict(RopeScalingConfig, scaling).config
    assert loaded.config.model == model_of(source).model_copy(
        update={"rope_scaling": longer, "max_position_embeddings": 384}
    )
    assert check(loaded.config, loaded.origins) == []
    assert context_line(loaded.config) == "96 -> 384 by yarn, factor 4"
    further = load(str(tmp_path / "next.yaml"), "model.rope_scaling.factor=4", "model.max_position_embeddings=512")
    assert check(further.config, further.origins) == [
        "model.max_position_embeddings=512 is more than the 384 covered by yarn, factor 4, from the weights of "
        f"{source}"
    ]
    short = load(
        str(tmp_path / "next.yaml"), "model.rope_scaling.factor=4", "data.seq_len=96", "train.global_batch_tokens=96"
    )
    assert "no sequence of the run is longer than the 96" in check(short.config, short.origins)[0]


def test_a_recipe_without_a_model_loads_from_python_too(source: Path, tmp_path: Path) -> None:
    tree = _config(source).model_dump(mode="json", exclude={"model"})
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(tree))
    loaded = load(str(tmp_path / "next.yaml"), "model.norm_eps=1e-4")
    assert loaded.config.model == model_of(source).model_copy(update={"norm_eps": 1e-4})
    assert loaded.origins["model.hidden_size"] == f"init_from: {source}"
