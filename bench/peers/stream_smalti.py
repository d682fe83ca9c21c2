"""Our stream as a contender of bench/stream.py: token files, whole batches of a full shuffle, every block checked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stream_child import Child

child = Child()
job = child.job

import numpy as np  # noqa: E402

if job["do"] == "make":
    from smalti.data.tokens import TokenWriter
elif job["as"] in ("int64", "microbatches"):
    import torch

    from smalti.train.batches import TokenBatches

from smalti.config.data import DataConfig  # noqa: E402
from smalti.config.durations import RunLength  # noqa: E402
from smalti.data.stream.stream import Stream  # noqa: E402


def make() -> None:
    """Write documents one by one, as ``smalti data tokenize`` does."""
    tokens = np.load(job["tokens"], mmap_mode="r")
    ends = np.flatnonzero(tokens == 0)
    with TokenWriter(job["folder"], vocab_size=job["vocab_size"], eod_id=0, tokenizer_digest="b" * 64) as writer:
        for begin, end in zip([0, *(ends[:-1] + 1).tolist()], ends.tolist(), strict=True):
            writer.add(tokens[begin:end])


def build() -> Stream:
    """Build the stream with one source and one stage, for an epoch of whole steps."""
    tokens = job["batch_rows"] * job["seq_len"]
    data = {"sources": {"all": job["folder"]}, "seq_len": job["seq_len"], "stages": [{"weights": {"all": 1}}]}
    length = RunLength(job["rows"] // job["batch_rows"], ((0, tokens),))
    stream = Stream(DataConfig.model_validate(data), seed=17, length=length, microbatch_tokens=tokens)
    if job["state"]:
        stream.check(json.loads(Path(job["state"]).read_text()), job["step"])
    return stream


def batches(stream: Stream) -> Iterator[Any]:
    """Yield u16 rows, int64 tensors of inputs and targets, or microbatches, from the step that the job names."""
    steps = range(job["step"], job["rows"] // job["batch_rows"])
    if job["as"] == "microbatches":
        tensors = TokenBatches(stream, torch.device("cpu"), mask_documents=True)
        yield from (tensors.batch(step) for step in steps)
    elif job["as"] == "int64":
        for step in steps:
            tokens = torch.from_numpy(stream.batch(step)[0].tokens).to(torch.int64)
            yield tokens[:, :-1], tokens[:, 1:]
    else:
        yield from (stream.batch(step)[0].tokens for step in steps)


child.run(make, build, batches, state=lambda stream: stream.state(job["resume_step"]), rows=lambda batch: batch[:, :-1])
