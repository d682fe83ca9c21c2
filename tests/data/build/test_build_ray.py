"""A build on a Ray cluster of two workers of which one is killed: the same bytes as in one process."""

import json
import subprocess
import sys

import pytest
from test_build_job import CUTS, everything, many_files, recipe

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

# Ray and its warnings stay in a process of their own; the cluster ends with it. A machine is killed when the stated
# number of shards is complete.
CLUSTER = """
import json, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster
small = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
try:
    nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
    verb = [sys.executable, "-m", "smalti", "data", "build", sys.argv[1]]
    command = [*verb, "runner=ray", f"ray_address={cluster.address}"]
    build = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    work, pattern, after = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    while build.poll() is None and len(list(work.rglob(pattern))) < after:
        time.sleep(0.02)
    was_running = build.poll() is None
    cluster.remove_node(nodes[1], allow_graceful=False)
    out, err = build.communicate(timeout=400)
    print(json.dumps([was_running, build.returncode, out, err]))
finally:
    cluster.shutdown()
"""


@pytest.mark.parametrize(
    ("more", "pattern", "after"),
    [("dedup: near", "*ed/*.parquet", 3), (CUTS, "*ed/*.parquet", 14), ("dedup: near", "near-work/**/signatures*", 1)],
    ids=["extracting", "annotating", "near"],
)
def test_a_cluster_that_loses_a_machine_gives_the_same_bytes(tmp_path, more, pattern, after):
    pytest.importorskip("ray")
    many_files(tmp_path / "in")
    command = [sys.executable, "-m", "smalti", "data", "build"]
    whole = recipe(tmp_path, "whole", "work-a", more)
    subprocess.run([*command, whole, "workers=1"], check=True, capture_output=True)
    path = recipe(tmp_path, "cluster", "work-b", more)
    arguments = [str(path), str(tmp_path / "work-b"), pattern, str(after)]
    done = subprocess.run([sys.executable, "-c", CLUSTER, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    was_running, code, out, err = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, out + err
    assert was_running
    assert everything(tmp_path / "cluster") == everything(tmp_path / "whole")
