"""A run folder as training leaves it, made by hand: config, tokenizer, a checkpoint, held-out tokens."""

import json
import warnings
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tiny_models import family_config, tiny_model

from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens.writer import TokenWriter
from smalti.distributed.checkpoint import saver

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "3+4=7\n12+5=17\n([{<>}])\n",
    "Grüße an alle: 😀 and some plain words, plain words, plain words.\n" * 3,
    "class Point:\n    x: int\n    y: int\n",
]


def tiny_tokenizer() -> Tokenizer:
    return Tokenizer(train_bpe(TEXTS, 300), "<|endoftext|>")


def tokenizer_with_unused_ids() -> Tokenizer:
    """The last piece of its vocabulary stands five ids later, as in some vocabularies of others."""
    inner = json.loads(train_bpe(TEXTS, 300).to_str())
    vocab = inner["model"]["vocab"]
    vocab[max(vocab, key=vocab.__getitem__)] += 5
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(inner)), "<|endoftext|>")


def write_tokens(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> str:
    with TokenWriter(
        folder, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id, tokenizer_digest=tokenizer.digest
    ) as writer:
        for text in texts:
            writer.add(np.array(tokenizer.encode(text), dtype=np.int64), len(text.encode()))
    return str(folder)


def tiny_run(root: Path, *, family: str = "llama", step: int = 20, context: int = 96) -> Path:
    """``root/runs/tiny`` with one checkpoint; its data lies in ``root/data``."""
    tokenizer = tiny_tokenizer()
    folder = root / "data"
    tokenizer.save(folder / "tokenizer")
    shape = family_config(family, vocab_size=320, context=context)
    config = RunConfig.model_validate(
        {
            "name": "tiny",
            "model": shape.model_dump(),
            "data": {
                "sources": {"code": write_tokens(folder / "code/train", tokenizer, TEXTS)},
                "heldout": {"code": write_tokens(folder / "code/heldout", tokenizer, TEXTS[:2])},
                "seq_len": 32,
                "stages": [{"weights": {"code": 1}}],
            },
            "train": {"duration": "40step", "global_batch_tokens": 64, "optimizer": {"lr": 1e-3}},
        }
    )
    run = root / "runs" / "tiny"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(config))
    tokenizer.save(run / "tokenizer")
    add_checkpoint(run, config, step)
    return run


def add_checkpoint(run: Path, config: RunConfig, step: int) -> str:
    torch.manual_seed(0)
    weights = tiny_model(config.model, seed=step).state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    with warnings.catch_warnings():  # one process alone is what is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return saver.save(run / "checkpoints", step, tensors, {"step": step}, keep=5)


def require_same_export(folder: Path, other: Path) -> None:
    """Both folders of exports hold the same bytes, but for the time of the export and what names the folder itself."""
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in set(names) - {"export.json", "README.md"}:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    records = [json.loads((each / "export.json").read_text()) for each in (folder, other)]
    assert records[0] | {"time": ""} == records[1] | {"time": ""}
    cards = [(each / "README.md").read_text().replace(str(each), "FOLDER") for each in (folder, other)]
    assert cards[0] == cards[1]
