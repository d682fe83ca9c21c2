"""Supervised tuning: packed rows have the loss and gradient of each example alone, however the rows are cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from tiny_runs import tiny_tokenizer
from torch import Tensor
from torch.nn import functional

from smalti.config.model import ModelConfig
from smalti.config.train import LossConfig
from smalti.data.examples import Example
from smalti.data.examples.folder import ExamplesRecord, write_examples
from smalti.data.examples.source import ExampleSource
from smalti.data.pack.examples import ExampleRows
from smalti.data.stream.batch import Batch
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss

TOKENIZER = tiny_tokenizer()
SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 48,
}  # fmt: skip


@pytest.fixture
def examples() -> list[Example]:
    rng = np.random.default_rng(3)
    made = []
    for number in range(17):
        size = int(rng.integers(2, 40))
        mask = (rng.random(size) < 0.4).astype(int)
        mask[0], mask[-1] = 0, 1
        made.append(Example(((rng.integers(0, 300, size).tolist(), mask.tolist()),), id=str(number)))
    return made


def _microbatch(batch: Batch) -> Microbatch:
    tensors = (batch.inputs, batch.targets, batch.positions, batch.documents)
    return Microbatch(*(torch.from_numpy(np.ascontiguousarray(part)).long() for part in tensors))


def _gradient(model: torch.nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("rows_each", [1, 3, 100])
def test_packed_rows_equal_each_example_alone(tmp_path: Path, examples: list[Example], rows_each: int) -> None:
    write_examples(tmp_path / "e", examples, TOKENIZER)
    rows = ExampleRows(ExampleSource(str(tmp_path / "e"), ExamplesRecord.load(tmp_path / "e")), 48, TOKENIZER.eod_id)
    assert rows.size < len(examples)  # some rows hold several examples
    config = ModelConfig.model_validate(SHAPE)
    model, loss = tiny_model(config).double(), LanguageLoss(config, LossConfig())

    total, weight = torch.zeros((), dtype=torch.float64), 0
    for start in range(0, rows.size, rows_each):
        indexes = np.arange(start, min(start + rows_each, rows.size))
        out = np.empty((indexes.size, 49), dtype=np.uint16)
        info = rows.read(indexes, out)
        batch = Batch(out, np.zeros(indexes.size, np.int16), 0, None, True, info.joints, info.masked)
        part, n, _ = loss(model, _microbatch(batch))
        total, weight = total + part, weight + int(n)
    packed = _gradient(model, total)

    alone = torch.zeros((), dtype=torch.float64)
    for example in examples:
        ids, mask = (torch.tensor(part) for part in example.sequences[0])
        logits = model(ids[None, :-1]).value[0].double()
        alone = alone + (functional.cross_entropy(logits, ids[1:], reduction="none") * mask[1:]).sum()
    assert weight == sum(sum(example.sequences[0][1]) for example in examples)
    assert total.item() == pytest.approx(alone.item(), rel=1e-6)
    torch.testing.assert_close(packed, _gradient(model, alone), rtol=1e-5, atol=1e-6)
