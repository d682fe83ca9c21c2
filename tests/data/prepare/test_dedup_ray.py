"""The same plan on a Ray cluster of two workers: the same bytes, and errors of workers come out as ours."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic_corpus
from test_dedup_job import config_of, family, files_of

from smalti.data.prepare.dedup.job import dedup

pytestmark = pytest.mark.slow

# Ray and its warnings stay in a process of their own; the cluster ends with it.
CLUSTER = """
import json, subprocess, sys
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
try:
    for _ in range(2):
        cluster.add_node(num_cpus=1, **small)
    verb = [sys.executable, "-m", "smalti", "data", "dedup", "demo-dedup"]
    command = [*verb, "runner=ray", f"ray_address={cluster.address}"]
    results = []
    for arguments in json.loads(sys.argv[1]):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=240)
        results.append([done.returncode, done.stdout, done.stderr])
    print(json.dumps(results))
finally:
    cluster.shutdown()
"""


@pytest.mark.exhaustive
def test_a_cluster_gives_the_same_bytes_and_our_errors(tmp_path):
    pytest.importorskip("ray")
    documents = synthetic_corpus.planted(600, seed=2)
    documents += family(100)  # crowded buckets, and what stays is looked through again
    heldout = {document.id for document in documents[::10]}
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c", heldout=heldout)
    dedup(config_of(folder, tmp_path / "native"))
    broken = synthetic_corpus.write_parquet(documents[:100], tmp_path / "broken", files=1)
    damage(broken / "documents/part-0/train.parquet")
    calls = [
        [f"documents={folder}", f"output={tmp_path / 'ray'}", "memory_gb=0.002"],  # and several parts
        [f"documents={broken}", f"output={tmp_path / 'never'}"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CLUSTER, json.dumps(calls)], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    whole, failed = json.loads(done.stdout.splitlines()[-1])
    assert whole[0] == 0, whole[2]
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "native")
    assert failed[0] == 2, failed
    assert "train.parquet cannot be read" in failed[2]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    path.write_bytes(data)
