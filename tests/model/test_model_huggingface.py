"""Folders: shards, dtype, atomic replacement, and errors that name what is wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from model_cases import built, dense, ids, sparse
from safetensors.torch import load_file, save_file

from smalti.base.errors import DataError, UserError
from smalti.config.model import ModelConfig
from smalti.model import huggingface
from smalti.model.huggingface import load_folder, read_folder, save_folder

LLAMA = dense(family="llama")
DBRX = sparse(family="dbrx")


def _saved(folder: Path, config: ModelConfig = LLAMA, **options) -> dict[str, torch.Tensor]:
    state = built(config).state_dict()
    save_folder(folder, config, state, eod_id=0, dtype=torch.float32, **options)
    return state


@pytest.mark.parametrize("config", [LLAMA, DBRX], ids=["llama", "dbrx"])
@pytest.mark.parametrize("max_shard_bytes", [1, 9_000, 10**9])
def test_round_trip_in_any_number_of_shards_is_bitwise(tmp_path, config, max_shard_bytes):
    state = _saved(tmp_path, config, max_shard_bytes=max_shard_bytes)
    model = load_folder(tmp_path)
    assert model.config == config
    assert not model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if max_shard_bytes == 10**9:
        assert files == ["model.safetensors"]
        return
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for file in files:
        shard = load_file(tmp_path / file)
        assert {index["weight_map"][name] for name in shard} == {file}
        assert len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= max_shard_bytes


def test_no_two_loaded_parameters_share_memory(tmp_path):
    _saved(tmp_path, DBRX)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in load_folder(tmp_path).state_dict().values()]
    assert len(set(pointers)) == len(pointers)


def test_dtype_on_reading_and_writing(tmp_path):
    state = built(LLAMA).state_dict()
    save_folder(tmp_path, LLAMA, state, eod_id=0)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_folder(tmp_path).state_dict().values()} == {torch.bfloat16}
    wide = load_folder(tmp_path, torch.float32).state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16().float()) for name, tensor in wide.items())


def test_a_new_model_replaces_the_old_and_leaves_other_files(tmp_path):
    _saved(tmp_path, DBRX, max_shard_bytes=5_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    _saved(tmp_path, LLAMA)
    assert sorted(os.listdir(tmp_path)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert load_folder(tmp_path).config == LLAMA


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    _saved(tmp_path, DBRX)
    before = load_folder(tmp_path).state_dict()
    monkeypatch.setattr(huggingface, "save_file", _disk_full)
    with pytest.raises(OSError, match="disk full"):
        _saved(tmp_path, LLAMA)
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_folder(tmp_path).state_dict().items())
    assert ".saving" not in os.listdir(tmp_path)


def test_a_swap_cut_short_leaves_no_model_rather_than_a_mixed_one(tmp_path, monkeypatch):
    _saved(tmp_path, DBRX)
    monkeypatch.setattr(huggingface.os, "replace", _cut_at_weights(os.replace))
    with pytest.raises(OSError, match="cut"):
        _saved(tmp_path, LLAMA)
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"no config\.json"):
        load_folder(tmp_path)
    _saved(tmp_path, LLAMA)
    assert load_folder(tmp_path).config == LLAMA


def test_pickled_weights_are_refused(tmp_path):
    _saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled.*pytorch_model\.bin") as caught:
        load_folder(tmp_path)
    assert caught.value.hint is not None
    assert "save_pretrained" in caught.value.hint


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    _saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.ones(7)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(DataError) as caught:
        load_folder(tmp_path)
    message = str(caught.value)
    assert "missing: lm_head.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight [7] instead of [32]" in message


def test_derived_tensors_of_old_checkpoints_and_an_equal_tied_head_are_fine(tmp_path):
    tied = dense(family="llama", tie_word_embeddings=True)
    _saved(tmp_path, tied)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load_folder(tmp_path)(ids(tied, 1, 3)).value.shape == (1, 3, 48)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(DataError, match="tie_word_embeddings"):
        load_folder(tmp_path)


def test_state_dict_that_does_not_fit_is_refused_before_anything_is_written(tmp_path):
    state = built(LLAMA).state_dict()
    del state["norm.weight"]
    with pytest.raises(DataError, match=r"missing: norm\.weight"):
        save_folder(tmp_path / "new", LLAMA, state, eod_id=0)
    assert not (tmp_path / "new").exists()


def test_family_without_a_form_is_refused(tmp_path):
    config = dense(qk_norm="head")
    with pytest.raises(UserError, match="'decoder'"):
        save_folder(tmp_path, config, built(config).state_dict(), eod_id=0)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), "model_type='bert'"),
        (lambda folder: (folder / "config.json").write_text("[]"), "model_type=None"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: next(folder.glob("model-00002*")).unlink(), "places .* which is not in the folder"),
        (lambda folder: next(folder.glob("model-00002*")).write_bytes(b"x" * 20), "not a readable safetensors"),
        (lambda folder: _truncate(next(folder.glob("model-00002*"))), "not a readable safetensors"),
        (lambda folder: _point_outside(folder), "which is not in the folder"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "neither"),
    ],
)
def test_damaged_folders(tmp_path, damage, named):
    _saved(tmp_path, max_shard_bytes=9_000)
    damage(tmp_path)
    with pytest.raises(DataError, match=named):
        load_folder(tmp_path)


def test_missing_and_remote_folders(tmp_path):
    with pytest.raises(DataError, match=r"no config\.json"):
        read_folder(tmp_path / "absent")
    with pytest.raises(UserError, match="not a local folder"):
        read_folder("s3://bucket/model")


def _disk_full(*_args, **_options):
    raise OSError("disk full")


def _cut_at_weights(replace):
    def cut(source, target):
        if str(target).endswith(".safetensors") and ".saving" in str(source):
            raise OSError("cut")
        replace(source, target)

    return cut


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _point_outside(folder: Path) -> None:
    (folder.parent / "outside.safetensors").write_bytes(b"")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../outside.safetensors")
    path.write_text(json.dumps(index))
