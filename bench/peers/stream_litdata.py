"""litData as a contender of bench/stream.py: ``optimize`` with a TokensLoader, uint16, its own shuffle.

An item is one row of tokens, so that no chunk loses its tail; chunks of 64 MB (what its documentation uses), neither
compressed nor hashed: no read is checked. Its shuffle permutes chunks, and within a chunk blocks of 256 items and the
items of a block.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_child import Child, grouped

child = Child()
job = child.job

import litdata  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from litdata import StreamingDataset, TokensLoader  # noqa: E402


def part(span: tuple[int, int]) -> Iterator[torch.Tensor]:
    """Yield the rows of a span, one item each."""
    length = job["seq_len"]
    tokens = np.load(job["tokens"], mmap_mode="r")
    for row in range(*span):
        yield torch.from_numpy(np.array(tokens[row * length : (row + 1) * length]))


def make() -> None:
    """Write the data set with one worker, so that items stay in order."""
    litdata.optimize(
        fn=part,
        inputs=[(begin, min(begin + 4096, job["rows"])) for begin in range(0, job["rows"], 4096)],
        output_dir=job["folder"],
        chunk_bytes="64MB",
        item_loader=TokensLoader(block_size=job["seq_len"]),
        num_workers=1,
        verbose=False,
    )


def build() -> StreamingDataset:
    """Build the loader with its defaults."""
    dataset = StreamingDataset(job["folder"], item_loader=TokensLoader(block_size=job["seq_len"]), shuffle=True)
    if job["state"]:
        dataset.load_state_dict(json.loads(Path(job["state"]).read_text()))
    return dataset


def batches(dataset: StreamingDataset) -> Iterator[Any]:
    """Yield single rows, whole batches in one tensor, or int64 tensors of inputs and targets."""
    if job["as"] == "rows":
        yield from dataset
    for batch in grouped(dataset, job["batch_rows"], torch.stack):
        if job["as"] == "int64":
            tokens = batch.to(torch.int64)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            yield batch


def state(dataset: StreamingDataset) -> Any:
    """Return the state as its loader saves it without worker processes."""
    return dataset.state_dict(job["resume_step"] * job["batch_rows"], num_workers=0, batch_size=1)


if __name__ == "__main__":
    child.run(make, build, batches, state)
