"""Rows of new entries: the mean of their pieces, on any ranks; a run is refused where they cannot be made."""

from pathlib import Path

import pytest
import torch
import yaml
from gloo_ranks import run_ranks
from tiny_models import llama_config, tiny_model
from tiny_runs import TEXTS, tiny_run, tiny_tokenizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.distributed.group import mesh
from smalti.distributed.parallel import fsdp
from smalti.model.decoder import Decoder
from smalti.model.huggingface import open_folder, save_folder
from smalti.train.origin import check, vocabulary_line
from smalti.train.vocabulary import NewRows, new_rows
from smalti.train.weights import open_weights

OLD = llama_config(vocab_size=300, context=96)
NEW_TEXT = ["Straßenbahn und Straßenlaterne. "]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """An exported model with its tokenizer, and a tokenizer with ten more entries."""
    model = tiny_model(OLD)
    save_folder(tmp_path / "model", OLD, model.state_dict(), eod_id=299, dtype=torch.float32)
    tiny_tokenizer().save(tmp_path / "model")
    tiny_tokenizer().extended(NEW_TEXT * 2, 10).save(tmp_path / "more")
    return tmp_path / "model", tmp_path / "more"


def config(source: Path, tokenizer: Path, vocab_size: int = 320) -> RunConfig:
    tree = {
        "name": "next",
        "init_from": str(source),
        "model": OLD.model_dump() | {"vocab_size": vocab_size},
        "data": {
            "sources": {"a": "a"}, "seq_len": 32, "stages": [{"weights": {"a": 1}}], "tokenizer": str(tokenizer)
        },
        "train": {"duration": "4step", "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
    }  # fmt: skip
    return from_dict(RunConfig, tree).config


def test_rows_are_the_means_of_pieces_and_of_all() -> None:
    old = torch.randn(5, 3)
    rows = NewRows(8, {4: [0, 2], 5: [0, 0, 1], 6: [3]})
    filled = rows.fill("embed.weight", old)
    assert torch.equal(filled[:4], old[:4])
    assert torch.allclose(filled[4], (old[0] + old[2]) / 2)
    assert torch.allclose(filled[5], (2 * old[0] + old[1]) / 3)
    assert torch.equal(filled[6], old[3])
    assert torch.allclose(filled[7], old.mean(0))
    assert rows.fill("norm.weight", old) is old
    assert (rows.shape("lm_head.weight", (5, 3)), rows.shape("norm.weight", (5,))) == ((8, 3), (5,))


def test_a_larger_vocabulary_needs_a_tokenizer_that_extends_the_one_of_the_weights(folders: tuple[Path, Path]) -> None:
    source, more = folders
    larger = config(source, more)
    assert check(larger) == []
    assert vocabulary_line(larger) == "300 -> 310 entries"
    rows = new_rows(larger)
    assert rows is not None
    tokenizer = tiny_tokenizer()
    assert sorted(rows.pieces) == list(range(300, 310))
    assert all(max(pieces) < 300 and tokenizer.decode(pieces) for pieces in rows.pieces.values())
    assert new_rows(config(source, source, 300)) is None
    with pytest.raises(UserError, match=r"model\.vocab_size is 320"):
        check(config(source, source))
    other = more.parent / "other"
    tiny_tokenizer().extended(TEXTS * 2, 12).save(other)
    with pytest.raises(UserError, match="another tokenizer"):
        check(config(more, other).model_copy(update={"init_from": str(_with_tokenizer(source, more))}))


def _with_tokenizer(source: Path, tokenizer: Path) -> Path:
    (source / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    return source


def test_a_run_that_is_not_exported_is_refused_with_the_command(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    tiny_tokenizer().extended(NEW_TEXT * 2, 10).save(tmp_path / "more")
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree |= {"init_from": str(run), "name": "next", "model": tree["model"] | {"vocab_size": 400}}
    tree["data"]["tokenizer"] = str(tmp_path / "more")
    with pytest.raises(DataError, match="is not exported") as caught:
        new_rows(from_dict(RunConfig, tree).config)
    assert str(caught.value.hint).startswith(f"smalti export {run}")


def _loaded(rank: int, source: Path, more: Path) -> dict[str, Tensor]:
    larger = config(source, more)
    with torch.device("meta"):
        model: nn.Module = Decoder(larger.model)
    model = fsdp.shard(model, mesh.build(torch.device("cpu")), compute="fp32", reduce="fp32")
    load = open_weights(str(source), model, new_rows(larger))
    model.to_empty(device="cpu")
    load()
    whole = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole[name] = parameter.full_tensor().detach()
    return whole


@pytest.mark.slow
def test_two_ranks_load_the_same_rows_to_the_bit(folders: tuple[Path, Path]) -> None:
    source, more = folders
    old = dict(open_folder(source).tensors())
    rows = new_rows(config(source, more))
    assert rows is not None
    first, second = run_ranks(2, _loaded, source, more)
    for name, tensor in old.items():
        assert torch.equal(first[name], rows.fill(name, tensor))
        assert torch.equal(first[name], second[name])
    assert first["embed.weight"].shape == (320, OLD.hidden_size)
