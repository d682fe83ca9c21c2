"""The start of our stream, far into a run over very many tokens (child of bench/stream_start.py).

Memory and time count from Python with numpy: the imports of the stream are in both.
"""

import time

from stream_child import Child, reset_peak

child = Child()
job = child.job

import numpy as np  # noqa: E402

child.imported()

from smalti.config.data import DataConfig  # noqa: E402
from smalti.config.durations import RunLength  # noqa: E402
from smalti.data.stream.stream import Stream  # noqa: E402

imported_s = time.monotonic()


def main() -> None:
    """Build the stream of one rank and take its first microbatch; in the same process once more, warm."""
    child.notes["stream_imports_s"] = imported_s - child.begin_s
    data = DataConfig.model_validate(job["data"])
    length = RunLength(job["total_steps"], ((0, job["global_batch_tokens"]),))
    place = {"rank": job["rank"], "world_size": job["world_size"], "microbatch_tokens": job["microbatch_tokens"]}
    stream = Stream(data, seed=job["seed"], length=length, **place)
    child.built()
    batch = stream.batch(job["step"])[0]
    arrays = batch.inputs, batch.targets, batch.positions, batch.documents
    child.first(batch.tokens)
    child.notes["first_after_imports_s"] = child.notes["first_s"] - child.notes["stream_imports_s"]
    child.notes["tokens"] = int(arrays[0].size)
    assert all(array.shape == arrays[0].shape for array in arrays)
    assert np.issubdtype(arrays[0].dtype, np.integer)
    reset_peak()
    begin_s = time.monotonic()
    stream.batch(job["step"] + 1)
    child.notes["second_step_s"] = time.monotonic() - begin_s
    child.end()


main()
