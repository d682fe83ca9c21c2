"""mosaicml-streaming as a contender of bench/stream.py: MDS by its own MDSWriter, its default shuffle (py1e).

A sample is one row of tokens (``ndarray:uint16:L``, the smallest form that MDS has for it; llm-foundry writes int32),
shards of 64 MiB (its default), neither compressed nor hashed (its default): no read is checked.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_child import Child, grouped

child = Child()
job = child.job

import numpy as np  # noqa: E402
import torch  # noqa: E402
from streaming import MDSWriter, StreamingDataset  # noqa: E402


def make() -> None:
    """Write one sample per row."""
    n = job["rows"] * job["seq_len"]
    rows = np.load(job["tokens"], mmap_mode="r")[:n].reshape(job["rows"], job["seq_len"])
    with MDSWriter(out=job["folder"], columns={"tokens": f"ndarray:uint16:{job['seq_len']}"}) as writer:
        for row in rows:
            writer.write({"tokens": np.ascontiguousarray(row)})


def build() -> StreamingDataset:
    """Build the loader with its defaults and the batch size, which it requires."""
    dataset = StreamingDataset(local=job["folder"], shuffle=True, batch_size=job["batch_rows"])
    if job["state"]:
        dataset.load_state_dict(json.loads(Path(job["state"]).read_text()))
    return dataset


def batches(dataset: StreamingDataset) -> Iterator[Any]:
    """Yield single rows, whole batches in one array, or int64 tensors of inputs and targets."""
    rows = (sample["tokens"] for sample in dataset)
    if job["as"] == "rows":
        yield from rows
    for batch in grouped(rows, job["batch_rows"], np.stack):
        if job["as"] == "int64":
            tokens = torch.from_numpy(batch).to(torch.int64)
            yield tokens[:, :-1], tokens[:, 1:]
        else:
            yield batch


def state(dataset: StreamingDataset) -> Any:
    """Return the state as its loader saves it."""
    return dataset.state_dict(job["resume_step"] * job["batch_rows"], from_beginning=True)


if __name__ == "__main__":
    child.run(make, build, batches, state)
