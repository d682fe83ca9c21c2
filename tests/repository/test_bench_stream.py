"""The benchmarks of the stream run at tiny sizes without a peer; and what a start must leave alone, is left alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_script import bench
from sparse_tokens import fill, sparse_tokens

START = """
import json, os, sys
from smalti.config.data import DataConfig
from smalti.config.durations import RunLength
from smalti.data.stream.stream import Stream
job = json.loads(sys.argv[1])
length = RunLength(job["steps"], ((0, 64 * 4096),))
stream = Stream(DataConfig.model_validate(job["data"]), seed=1, length=length, rank=3, world_size=8,
                microbatch_tokens=8 * 4096)
batch = stream.batch(job["step"])[0]
assert batch.inputs.shape == batch.positions.shape == (8, 4096)
heavy = {"torch", "pandas", "pyarrow", "fsspec", "obstore", "tokenizers", "huggingface_hub"} & set(sys.modules)
print(json.dumps(sorted(heavy)))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
def test_throughput_and_resume_of_ours(tmp_path: Path) -> None:
    table = bench(
        "stream.py", "--tokens", "4e5", "--seq-len", "256", "--rounds", "1", "--contenders", "smalti",
        "--folder", str(tmp_path),
    )  # fmt: skip
    found = re.search(r"tokens/s, u16 batches, M +([\d.]+)", table)
    assert found
    assert float(found[1]) > 0
    for nothing in ("files written by the first batch", "files left at the end", "/dev/shm left at the end"):
        assert re.search(rf"{nothing} +0\.0", table), table


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
def test_start_far_into_a_run(tmp_path: Path) -> None:
    text = bench("stream_start.py", "--tokens", "4e10", "--rounds", "1", "--largest", "0", "--folder", str(tmp_path))
    assert "40,000,000,000 tokens" in text
    assert "files written: 0; in /dev/shm: 0" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_start_writes_nothing_and_imports_little(tmp_path: Path) -> None:
    import json

    from smalti.config.data import DataConfig
    from smalti.config.durations import RunLength
    from smalti.data.stream.stream import Stream

    n_tokens, steps, step = 40_000_000_000, 100_000, 66_666
    manifest = sparse_tokens(tmp_path / "all", n_tokens)
    data = {"sources": {"all": str(tmp_path / "all")}, "seq_len": 4096, "stages": [{"weights": {"all": 1}}]}
    stream = Stream(
        DataConfig.model_validate(data),
        seed=1,
        length=RunLength(steps, ((0, 64 * 4096),)),
        microbatch_tokens=4096,
    )
    first = stream.schedule.first_position(step)
    _, _, index = stream.order.locate(np.arange(first, first + 64))
    fill(tmp_path / "all", manifest, index * 4096, 4097)
    stream.close()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    before = sorted(path.name for path in (tmp_path / "all").iterdir())
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps({"data": data, "steps": steps, "step": step})],
        env={**os.environ, "TMPDIR": str(temporary), "HOME": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=temporary,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert list(temporary.rglob("*")) == []
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == before
    mine = (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) - shared
    assert not [name for name in mine if "smalti" in name]
