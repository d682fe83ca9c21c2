"""The real mosaicml-streaming, litData and Megatron Core write and read, in environments of their own (tools/peers.py).

`make prove readers` makes the fixtures of tests/data/fixtures anew and compares both ways; `make test` uses what is
committed.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import peers
import pytest
from conftest import PROVE
from random_tokens import write_source
from test_reader_forms import CASES, FIXTURES, config_of, opened

from smalti.config.data import SourceConfig
from smalti.data.sources.mds_writer import MdsOptions, write_mds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PROVE, reason="installs peers: make prove readers")]

PEERS = {
    "mds": ("stream-mosaic", "make_mds.py", ["write"]),
    "litdata": ("stream-litdata", "make_litdata.py", []),
    "megatron": ("stream-megatron", "make_megatron.py", []),
}


def run_peer(name: str, script: str, *arguments: str) -> None:
    """Run a program of the fixtures with a peer's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(peers.python_of(name)), str(FIXTURES / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def packages(name: str) -> str:
    lines = (peers.PINS / f"{name}.txt").read_text().splitlines()
    return next(line for line in lines if "==" in line)


@pytest.mark.parametrize("form", PEERS)
def test_readers_give_what_the_peer_reads_from_fixtures_made_anew(form: str, proof, record, tmp_path: Path) -> None:
    proof()
    name, script, verb = PEERS[form]
    run_peer(name, script, *verb, str(tmp_path))
    cases = [case for case in CASES if case.startswith(form)]
    for case in cases:
        theirs, committed = np.load(tmp_path / f"{case}.npz"), np.load(FIXTURES / f"{case}.npz")
        for key in committed.files:
            assert np.array_equal(theirs[key], committed[key]), (case, key)
        here, there = opened(config_of(case)), opened(config_of(case, tmp_path))
        assert np.array_equal(there.read(0, there.n_tokens), here.read(0, here.n_tokens)), case
        if "tokens" in theirs:
            assert np.array_equal(there.read(0, there.n_tokens), theirs["tokens"]), case
        there.verify()
    record(f"readers-{form}", {"peer": packages(name), "cases": cases, "equal": True})


OPTIONS = [
    MdsOptions(64, compression="zstd:3", hashes=("sha1", "xxh64"), shard_bytes=4096),
    MdsOptions(64, dtype="int64", hashes=(), shard_bytes=9000),
    MdsOptions(None, dtype="uint32", shard_bytes=3000),
    MdsOptions(None, compression="zstd", hashes=("md5",), shard_bytes=3000),
]


def test_readers_peer_reads_what_we_write_as_mds(proof, record, tmp_path: Path) -> None:
    proof()
    write_source(tmp_path / "ours", 200, vocab_size=40_000)
    ours = opened(SourceConfig(path=str(tmp_path / "ours")))
    told = []
    for number, options in enumerate(OPTIONS):
        target = tmp_path / str(number)
        report = write_mds(ours, str(target), options)
        run_peer("stream-mosaic", "make_mds.py", "read", str(target), str(tmp_path / "theirs.npz"), *options.hashes[:1])
        theirs = np.load(tmp_path / "theirs.npz")
        assert np.array_equal(theirs["tokens"], ours.read(0, report.tokens))
        assert theirs["lengths"].size == report.samples
        if options.seq_len is None:
            assert theirs["tokens"].size == ours.n_tokens
            spans = [ours.document_span(n) for n in range(report.samples)]
            assert theirs["lengths"].tolist() == [end - begin for begin, end in spans]
        told.append({"seq_len": options.seq_len, "dtype": report.dtype, "compression": options.compression})
    record("readers-mds-written", {"peer": packages("stream-mosaic"), "data_sets": told, "equal": True})
