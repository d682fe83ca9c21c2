"""What a run reads is checked from bytes that one process reads, before anything starts."""

import os
import shutil
from pathlib import Path

import pytest
from random_tokens import TOKENIZER, write_source

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.stream import inputs
from smalti.data.stream.inputs import check_inputs, read_inputs
from smalti.data.stream.open import open_sources
from smalti.data.tokens import Manifest, TokenSource, TokenWriter

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
OPTIMIZER = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a", "b", "h"):
        write_source(tmp_path / name, 45, seed=ord(name), file_tokens=1_000)
    return tmp_path


def run(root: Path, *, vocab_size: int = 512, **data: object) -> RunConfig:
    raw = {
        "name": "r",
        "model": {"family": "llama", **SIZES, "vocab_size": vocab_size},
        "data": {
            "sources": {"a": str(root / "a"), "b": str(root / "b")},
            "heldout": {"h": str(root / "h")},
            "seq_len": 16,
            "stages": [{"weights": {"a": 1, "b": 1}}],
            **data,
        },
        "train": {"duration": "10step", "global_batch_tokens": 8_192, "optimizer": OPTIMIZER},
    }
    return from_dict(RunConfig, raw).config


def test_what_was_read_once_serves_where_no_file_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexes = read_inputs(run(root).data)
    there = check_inputs(run(root))
    os.rename(root, root.with_name("gone"))
    monkeypatch.setattr(inputs, "read_inputs", None)
    checked = check_inputs(run(root), indexes)
    for found in (there, checked):
        assert {name: source.n_tokens for name, source in found.sources.items()} == {
            name: source.n_tokens for name, source in there.sources.items()
        }
    assert checked.heldout == there.heldout
    assert checked.unknown == ()


@pytest.mark.parametrize("fault", ["missing", "cut", "no manifest"])
@pytest.mark.parametrize(("name", "field"), [("a", "data.sources.a"), ("h", "data.heldout.h")])
def test_a_folder_that_is_not_whole_is_named(root: Path, fault: str, name: str, field: str) -> None:
    path = root / name / "tokens-00001.tok"
    if fault == "missing":
        path.unlink()
    elif fault == "cut":
        os.truncate(path, 5_000)
    else:
        (root / name / "manifest.json").unlink()
    with pytest.raises(DataError) as caught:
        read_inputs(run(root).data)
    assert f"{field} = {root / name}" in str(caught.value)


def test_the_error_for_an_unwritten_held_out_folder_has_the_reason(root: Path) -> None:
    """'smalti data tokenize' writes no folder for a split without documents."""
    (root / "one").mkdir()
    (root / "a").rename(root / "one" / "train")
    sources = {"a": str(root / "one" / "train"), "b": str(root / "b")}
    config = run(root, sources=sources, heldout={"a": str(root / "one" / "heldout")})
    with pytest.raises(DataError, match=r"data\.heldout\.a = .*heldout: it does not exist, though") as caught:
        check_inputs(config)
    assert "remove it from data.heldout" in str(caught.value.hint)


def test_a_mirror_may_stand_in_for_a_local_folder(root: Path) -> None:
    """A file that the folder lacks is read from its mirror, to the token."""
    shutil.copytree(root / "a", root / "other")
    n_tokens = Manifest.load(root / "a").n_tokens
    expected = TokenSource(str(root / "a")).read(0, n_tokens)
    (root / "a" / "tokens-00001.tok").unlink()
    with pytest.raises(DataError, match=r"tokens-00001\.tok"):
        read_inputs(run(root).data)
    sources = {"a": {"path": str(root / "a"), "mirrors": [str(root / "other")]}, "b": str(root / "b")}
    mirrored = run(root, sources=sources).data
    source = open_sources(mirrored, read_inputs(mirrored)).sources["a"]
    assert source.read(0, n_tokens).tolist() == expected.tolist()


def test_what_does_not_fit_is_refused(root: Path) -> None:
    write_source(root / "foreign", 100, tokenizer_digest="cd" * 32)
    with TokenWriter(root / "eod", vocab_size=512, eod_id=511, tokenizer_digest=TOKENIZER) as writer:
        writer.add([1] * 100, 100)
    for name in ("foreign", "eod"):
        with pytest.raises(DataError, match=r"data\.heldout\.x was written by another tokenizer"):
            check_inputs(run(root, heldout={"x": str(root / name)}))
        with pytest.raises(DataError, match=r"source 'b' .*\n.*sources made by one tokenizer"):
            check_inputs(run(root, sources={"a": str(root / "a"), "b": str(root / name)}))
    with pytest.raises(UserError, match=r"model\.vocab_size=500 is smaller than the 512.*\n.*\n.*512"):
        check_inputs(run(root, vocab_size=500))
    stages = [{"weights": {"a": 1, "b": 1}, "until": "0.5run"}, {"weights": {"a": 1, "b": 1}, "seq_len": 2_048}]
    with pytest.raises(DataError, match="less than one sequence"):
        check_inputs(run(root, stages=stages))


def test_unrecorded_fields_are_reported_and_recorded_ones_must_agree(root: Path) -> None:
    import numpy as np

    np.save(root / "raw.npy", np.ones(5_000, np.uint16))
    raw = {"path": str(root / "raw.npy"), "format": "raw"}
    checked = check_inputs(run(root, sources={"a": str(root / "a"), "b": raw}))
    assert [line.split(" (")[0] for line in checked.unknown] == ["source 'b'"]
    assert checked.unknown[0].endswith(
        "does not record its tokenizer, its vocabulary, where documents end, which is not checked"
    )
    with pytest.raises(DataError, match="eod_id=7"):
        check_inputs(run(root, sources={"a": str(root / "a"), "b": {**raw, "eod_id": 7}}))
    assert checked.sources["a"].tokenizer_digest == TOKENIZER
    alone = check_inputs(run(root, sources={"b": raw}, stages=[{"weights": {"b": 1}}]))
    assert list(alone.heldout) == ["h"]
