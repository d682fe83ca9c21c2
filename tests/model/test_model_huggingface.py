"""Folders: shards, dtypes, what is carried along, atomic replacement, and errors that name what is wrong."""

import dataclasses
import json
import os
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import built, dense, ids, sparse
from safetensors.torch import load_file, save_file

from smalti.base.errors import DataError, UserError
from smalti.config.model import ModelConfig
from smalti.model import huggingface, huggingface_weights, tensor_files
from smalti.model.decoder import Decoder
from smalti.model.huggingface import LanguageModel, load, load_folder, open_folder, save, save_folder

LLAMA = dense(family="llama")
DBRX = sparse(family="dbrx")


def _saved(folder: Path, config: ModelConfig = LLAMA, **options: Any) -> dict[str, torch.Tensor]:
    state = built(config).state_dict()
    save_folder(folder, config, state, eod_id=0, dtype=torch.float32, **options)
    return state


def _rewritten(folder: Path, **changes: Any) -> None:
    """Change ``config.json``."""
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


# ---- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, DBRX], ids=["llama", "dbrx"])
@pytest.mark.parametrize("max_shard_bytes", [1, 9_000, 10**9])
def test_round_trip_in_any_number_of_shards_is_bitwise(tmp_path, config, max_shard_bytes):
    state = _saved(tmp_path, config, max_shard_bytes=max_shard_bytes)
    model = load_folder(tmp_path)
    assert model.config == config
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
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


def test_load_is_a_function_of_ids_and_save_writes_it_back_to_the_bit(tmp_path):
    state = _saved(tmp_path / "a", max_shard_bytes=9_000)
    model = load(tmp_path / "a")
    tokens = ids(LLAMA, 2, 5)
    assert torch.equal(model(tokens), load_folder(tmp_path / "a")(tokens).value)
    positions, documents = torch.arange(5).expand(2, 5), torch.tensor([[0, 0, 1, 1, 1]] * 2)
    assert torch.equal(
        model(tokens, positions, documents), load_folder(tmp_path / "a")(tokens, positions, documents).value
    )
    save(model, tmp_path / "b")
    assert (tmp_path / "b/config.json").read_bytes() == (tmp_path / "a/config.json").read_bytes()
    back = load_file(tmp_path / "b/model.safetensors")
    assert all(torch.equal(state[ours], back[theirs]) for ours, theirs in [("norm.weight", "model.norm.weight")])
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_folder(tmp_path / "b").state_dict().items())


def test_a_bare_decoder_is_saved_without_tokens(tmp_path):
    save(built(LLAMA), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["bos_token_id"] is raw["eos_token_id"] is None
    assert load(tmp_path).companions.tokens == {"bos_token_id": None, "eos_token_id": None}


def test_no_two_loaded_parameters_share_memory(tmp_path):
    _saved(tmp_path, DBRX)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in load_folder(tmp_path).state_dict().values()]
    assert len(set(pointers)) == len(pointers)


def test_dtype_on_reading_and_writing(tmp_path):
    state = built(LLAMA).state_dict()
    save_folder(tmp_path, LLAMA, state, eod_id=0)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load(tmp_path).state_dict().values()} == {torch.bfloat16}
    wide = load_folder(tmp_path, torch.float32).state_dict()
    assert all(torch.equal(tensor, state[name].bfloat16().float()) for name, tensor in wide.items())
    save(load(tmp_path), tmp_path / "half", torch.float16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {torch.float16}
    for dtype in (torch.int8, torch.float64):
        with pytest.raises(UserError, match=str(dtype)):
            load(tmp_path, dtype)


def test_mixed_dtypes_are_kept(tmp_path):
    model = built(LLAMA)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(
            {"norm": torch.float32, "q_pr": torch.float16}.get(name[-11:-7], torch.bfloat16)
        )
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert len(set(dtypes.values())) > 1
    for folder, size in (("a", 10**9), ("b", 5_000)):
        save(model, tmp_path / folder, max_shard_bytes=size)
        back = load(tmp_path / folder).decoder.state_dict()
        assert {name: tensor.dtype for name, tensor in back.items()} == dtypes
        assert all(torch.equal(tensor, back[name]) for name, tensor in model.state_dict().items())
    load_file(tmp_path / "a/model.safetensors")  # the format's own reader takes it, too


def test_what_lies_beside_the_weights_is_carried_along(tmp_path):
    _saved(tmp_path / "a")
    generation = {"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    beside = {
        "generation_config.json": json.dumps(generation),
        "tokenizer.json": '{"model": {}}',
        "tokenizer_config.json": '{"chat_template": "x", "extra": 1}',
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
    }
    for name, text in beside.items():
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_text(text)
    (tmp_path / "a/notes.txt").write_text("mine")
    _rewritten(tmp_path / "a", bos_token_id=1, eos_token_id=[3, 4], pad_token_id=5)
    model = load(tmp_path / "a")
    save(model, tmp_path / "b")
    assert {name: (tmp_path / "b" / name).read_text() for name in beside} == beside
    raw = json.loads((tmp_path / "b/config.json").read_text())
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["pad_token_id"]) == (1, [3, 4], 5)
    assert not (tmp_path / "b/notes.txt").exists()


@pytest.mark.parametrize(
    ("before", "after"), [(None, 7), (7, 7), (1, [7, 1]), ([3, 4], [7, 3, 4]), ([0, 7], [7, 0])], ids=str
)
def test_an_export_keeps_how_to_sample_and_what_ends_an_answer(tmp_path, before, after):
    generation = {"temperature": 0.6, "bos_token_id": 2} | ({} if before is None else {"eos_token_id": before})
    save_folder(tmp_path, LLAMA, built(LLAMA).state_dict(), eod_id=7, generation=generation)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"temperature": 0.6, "bos_token_id": 7, "eos_token_id": after}
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7


# ---- writing --------------------------------------------------------------------------------------------------------


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
    written = os.pwrite
    monkeypatch.setattr(tensor_files.os, "pwrite", lambda *given: written(*given) if given[2] < 9_000 else _disk_full())
    with pytest.raises(OSError, match="disk full"):
        _saved(tmp_path, LLAMA, max_shard_bytes=20_000)
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


def test_state_dict_that_does_not_fit_is_refused(tmp_path):
    state = built(LLAMA).state_dict()
    with pytest.raises(DataError, match=r"norm\.weight \[7\] instead of \[32\]"):
        save_folder(tmp_path / "new", LLAMA, state | {"norm.weight": torch.ones(7)}, eod_id=0)
    assert os.listdir(tmp_path / "new") == []
    del state["norm.weight"]
    with pytest.raises(DataError, match=r"missing: norm\.weight"):
        save_folder(tmp_path / "newer", LLAMA, state, eod_id=0)
    assert not (tmp_path / "newer").exists()


def test_family_without_a_form_is_refused(tmp_path):
    config = dense(qk_norm="head")
    with pytest.raises(UserError, match="'decoder'"):
        save(LanguageModel(built(config)), tmp_path)


def _disk_full() -> int:
    raise OSError("disk full")


def _cut_at_weights(replace):
    def cut(source, target):
        if str(target).endswith(".safetensors") and ".saving" in str(source):
            raise OSError("cut")
        replace(source, target)

    return cut


# ---- forms that are met ---------------------------------------------------------------------------------------------


def test_derived_tensors_of_old_checkpoints_and_an_equal_tied_head_are_fine(tmp_path):
    tied = dense(family="llama", tie_word_embeddings=True)
    _saved(tmp_path, tied)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), torch.nan)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert load_folder(tmp_path)(ids(tied, 1, 3)).value.shape == (1, 3, 48)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(DataError, match="tie_word_embeddings"):
        load_folder(tmp_path)


def test_links_of_the_hubs_cache_are_followed_and_no_others(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    _saved(blobs)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert load_folder(snapshot).config == LLAMA
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("config.json", "model.safetensors"):
        (elsewhere / name).symlink_to(blobs / name)
    with pytest.raises(DataError, match="leads out of the folder"):
        load_folder(elsewhere)


# ---- refusals, before anything is allocated -------------------------------------------------------------------------


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is built and no tensor is read while this holds."""

    def refuse(*_given: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(huggingface_weights.ModelFolder, "tensors", refuse)
    monkeypatch.setattr(tensor_files.TensorFile, "read", refuse)
    monkeypatch.setattr(huggingface, "Decoder", refuse)


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(path: Path, text: str, body: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + body)


def _shard(folder: Path) -> Path:
    return next(folder.glob("model-00002*"))


def _edit_entry(**changes: Any):
    def edit(folder: Path) -> None:
        header, body = _header(_shard(folder))
        name = next(key for key in header if key != "__metadata__")
        header[name] |= changes
        _with_header(_shard(folder), json.dumps(header), body)

    return edit


def _duplicate_tensor(folder: Path) -> None:
    header, body = _header(_shard(folder))
    text = json.dumps(header)
    name = next(key for key in header if key != "__metadata__")
    _with_header(_shard(folder), text[:-1] + f', "{name}": {json.dumps(header[name])}}}', body)


def _shift(folder: Path) -> None:
    header, body = _header(_shard(folder))
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 4 for offset in entry["data_offsets"]]
    _with_header(_shard(folder), json.dumps(header), body + b"\0" * 4)


def _overlap(folder: Path) -> None:
    header, body = _header(_shard(folder))
    entries = [entry for entry in header.values() if "data_offsets" in entry]
    size = entries[0]["data_offsets"][1]
    header["another"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    _with_header(_shard(folder), json.dumps(header), body)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _index(change):
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        value = json.loads(path.read_text())
        change(value["weight_map"])
        path.write_text(json.dumps(value))

    return edit


def _points_to(file: Any):
    return _index(lambda places: places.update({"model.norm.weight": file}))


def _link_outside(folder: Path) -> None:
    shard = _shard(folder)
    shard.rename(folder.parent / "outside.safetensors")
    shard.symlink_to(folder.parent / "outside.safetensors")


def _pipe(folder: Path) -> None:
    _shard(folder).unlink()
    os.mkfifo(folder / "model-00002-of-00009.safetensors")
    _points_to("model-00002-of-00009.safetensors")(folder)


def _config(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


def _change(**changes: Any):
    return lambda folder: _rewritten(folder, **changes)


DAMAGES: dict[str, tuple[Any, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
    "unknown type": (_config('{"model_type": "bert"}'), "model_type='bert'"),
    "type is a list": (_config('{"model_type": ["llama"]}'), "model_type="),
    "config is a list": (_config("[]"), r"config\.json does not hold a JSON object"),
    "config is no JSON": (_config("{"), r"config\.json is not valid JSON"),
    "config is deep": (_config("[" * 100_000), r"config\.json is not valid JSON"),
    "config with NaN": (_config('{"model_type": "llama", "rms_norm_eps": NaN}'), "NaN is not a JSON number"),
    "config key twice": (_config('{"model_type": "llama", "model_type": "dbrx"}'), "'model_type' occurs twice"),
    "classifier": (_change(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
    "classes are a number": (_change(architectures=5), "architectures=5"),
    "remote code": (_change(auto_map={"AutoModel": "x.Y"}), "auto_map"),
    "code of another model": (
        _change(auto_map={"AutoModelForCausalLM": "hub/x--modeling_llama_yarn.LlamaForCausalLM"}),
        "auto_map",
    ),
    "code without names": (_change(auto_map=["modeling_llama.LlamaForCausalLM"]), "auto_map"),
    "quantised": (_change(quantization_config={"quant_method": "gptq"}), "quantization_config"),
    "unknown key": (_change(attention_sink=4), "attention_sink=4"),
    "absurd layers": (_change(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    "many layers": (_change(num_hidden_layers=9_000), "9000 layers"),
    "absurd width": (_change(intermediate_size=2**31 - 1), "with another shape"),
    "absurd product": (_change(vocab_size=2**31 - 1, hidden_size=2**30, head_dim=8), "sizes|another shape"),
    "text as size": (_change(hidden_size="32"), "hidden_size='32'"),
    "true as size": (_change(num_attention_heads=True), "num_attention_heads=True"),
    "missing shard": (lambda folder: _shard(folder).unlink(), "maps .* which is not in the folder"),
    "no index": (
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        r"holds shards \(model-00001-of-.*without their model\.safetensors\.index\.json\nhint: .*: model\.saf",
    ),
    "two forms": (lambda folder: _shard(folder).rename(folder / "model.safetensors"), "has both"),
    "index is a list": (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), "JSON object"),
    "index without map": (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    "parent path": (_points_to("../outside.safetensors"), r"model\.norm\.weight to '\.\./outside\.safetensors'"),
    "absolute path": (_points_to("/etc/passwd.safetensors"), "to '/etc/passwd"),
    "not a text": (_points_to(7), r"model\.norm\.weight to 7"),
    "a list": (_points_to(["x"]), "to \\['x'\\]"),
    "two dots": (_points_to(".."), "to '..'"),
    "null byte": (_points_to("a\0.safetensors"), "maps model.norm.weight"),
    "not weights": (_points_to("config.json"), "to 'config.json'"),
    "link out": (_link_outside, "leads out of the folder"),
    "pipe": (_pipe, "not a regular file"),
    "index names another shard": (
        _index(lambda places: places.update({"lm_head.weight": places["model.embed_tokens.weight"]})),
        "does not contain lm_head.weight",
    ),
    "index leaves one out": (_index(lambda places: places.pop("model.norm.weight")), "does not map to it"),
    "pointer of Git LFS": (
        lambda folder: _shard(folder).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"
        ),
        r"model-00002\S* is a Git LFS pointer.*\nhint: git -C \S+/model lfs pull",
    ),
    "nothing": (lambda folder: [path.unlink() for path in folder.glob("model*")], "neither"),
    "short shard": (lambda folder: _shard(folder).write_bytes(b"x" * 20), "not a readable safetensors"),
    "empty shard": (lambda folder: _shard(folder).write_bytes(b""), "not a readable safetensors"),
    "cut shard": (lambda folder: _truncate(_shard(folder)), "its header describes"),
    "long header": (lambda folder: _shard(folder).write_bytes(struct.pack("<Q", 2**63) + b"{}"), "truncated"),
    "header is a list": (lambda folder: _with_header(_shard(folder), "[]", b""), "JSON object"),
    "hole": (_shift, "has a gap"),
    "overlap": (_overlap, "overlaps"),
    "tensor twice": (_duplicate_tensor, "occurs twice"),
    "unknown dtype": (_edit_entry(dtype="F4"), "unknown dtype 'F4'"),
    "dtype list": (_edit_entry(dtype=["F32"]), "unknown dtype"),
    "quantised tensor": (lambda folder: _edit_entry(dtype="I32")(folder), "is in I32"),
    "negative shape": (_edit_entry(shape=[-1, 32]), "no readable shape"),
    "float shape": (_edit_entry(shape=[1.5]), "no readable shape"),
    "huge shape": (_edit_entry(shape=[2**62] * 9), "needs"),
    "offsets swapped": (_edit_entry(data_offsets=[4, 0]), "its offsets are"),
    "no entry": (lambda folder: _with_header(_shard(folder), '{"x": 3}', b""), "not described by"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.usefixtures("no_room")
def test_damaged_and_hostile_folders_are_refused_by_name(tmp_path, damage):
    folder = tmp_path / "model"
    _saved(folder, max_shard_bytes=9_000)
    edit, named = DAMAGES[damage]
    edit(folder)
    with pytest.raises(DataError, match=named) as caught:
        load(folder)
    assert str(folder) in str(caught.value) or damage == "absurd product"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("bos_token_id", value) for value in ("a", "1", [1], {}, 1.0, True, -1, LLAMA.vocab_size)),
        *(("eos_token_id", value) for value in ("a", {}, False, -1, [0, "a"], [[0]], [0, None], [LLAMA.vocab_size])),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_room")
def test_begin_and_end_tokens_that_the_model_lacks_are_refused(tmp_path, file, key, value):
    _saved(tmp_path)
    raw = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(raw | {key: value}))
    with pytest.raises(
        DataError, match=f"{re.escape(str(tmp_path / file))} has {key}={re.escape(repr(value))}"
    ) as caught:
        open_folder(tmp_path)
    assert f"0 to {LLAMA.vocab_size - 1}" in str(caught.value)


def test_begin_and_end_tokens_may_be_absent_null_or_several(tmp_path):
    _saved(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    last = LLAMA.vocab_size - 1
    for tokens in ({"eos_token_id": [0, last]}, {"bos_token_id": last}, {"bos_token_id": None, "eos_token_id": None}):
        _rewritten(tmp_path, **tokens)
        assert open_folder(tmp_path).raw.items() >= tokens.items()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("no_room")
def test_values_that_are_not_finite_are_refused_before_the_model_is_made(tmp_path, value, dtype, monkeypatch):
    monkeypatch.setattr(tensor_files, "_CHUNK_BYTES", 64)
    model = built(LLAMA)
    model.get_parameter("blocks.1.mlp.down_proj.weight").data[3, 7] = value
    save(model, tmp_path, dtype)
    with pytest.raises(DataError, match=r"down_proj\.weight holds -?(nan|inf) \(element 127 of 1,280\)"):
        load(tmp_path)


@pytest.mark.usefixtures("no_room")
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


@pytest.mark.usefixtures("no_room")
def test_pickled_weights_are_refused(tmp_path):
    _saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled.*pytorch_model\.bin") as caught:
        load_folder(tmp_path)
    assert caught.value.hint is not None
    assert "save_pretrained" in caught.value.hint


def test_missing_and_remote_folders(tmp_path):
    with pytest.raises(DataError, match=r"no config\.json"):
        open_folder(tmp_path / "absent")
    with pytest.raises(UserError, match="not a local folder"):
        open_folder("s3://bucket/model")
    with pytest.raises(UserError, match="not a local folder"):
        save(built(LLAMA), "s3://bucket/model")


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    _saved(tmp_path)
    opened = open_folder(tmp_path)
    _truncate(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="truncated while it was read"):
        list(opened.tensors())


@pytest.mark.proof
@settings(max_examples=settings.default.max_examples // 2)
@given(place=st.floats(0, 1), bits=st.integers(1, 255), cut=st.booleans())
def test_no_damage_to_a_byte_of_the_header_crashes(tmp_path_factory, place, bits, cut):
    folder = tmp_path_factory.mktemp("damaged")
    _saved(folder, dense(family="llama", num_hidden_layers=1))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    at = int(place * (8 + length - 1))
    data[at] ^= bits
    path.write_bytes(data[:at] if cut else data)
    with suppress(DataError):  # and no other error
        opened = open_folder(folder)
        assert [entry.shape for entry in opened.files["lm_head.weight"].entries.values()]


def test_source_is_a_plain_value(tmp_path):
    _saved(tmp_path)
    opened = open_folder(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        opened.config = None  # type: ignore[misc]
    assert opened.shapes() == {name: tuple(tensor.shape) for name, tensor in Decoder(LLAMA).state_dict().items()}
