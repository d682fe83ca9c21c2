"""The probes of a check: pairs of nodes, values of products, the disk; and two nodes on this machine."""

import json
import os
import socket
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from smalti.base.errors import SmaltiError
from smalti.cli.fleet.app import app
from smalti.fleet.check import run
from smalti.fleet.check.local import facts
from smalti.fleet.measure import run_probe
from smalti.fleet.probes.links import partners
from smalti.fleet.probes.products import Operands, operands, product


@given(nodes=st.integers(2, 33))
def test_rounds_bring_every_pair_together_once(nodes):
    of_rank = [list(partners(rank, nodes, nodes)) for rank in range(nodes)]
    met = [(rank, partner) for rank, listed in enumerate(of_rank) for partner in listed if rank < partner]
    assert sorted(met) == list(combinations(range(nodes), 2))
    assert all(rank in of_rank[partner] for rank, partner in met)


def test_both_sides_of_a_pair_meet_in_the_same_round():
    """Else two nodes could each wait for a third."""
    for nodes in (4, 6, 10):
        rounds = list(zip(*(partners(rank, nodes, nodes) for rank in range(nodes)), strict=True))
        assert all(of_round[partner] == rank for of_round in rounds for rank, partner in enumerate(of_round))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_product_is_right_and_one_changed_value_is_not(dtype):
    assert product(torch.device("cpu"), dtype, operands(256))["wrong"] == 0
    random = np.random.default_rng(3)
    left, right = (random.integers(-1, 2, (40, 40)).astype(np.float32) for _ in range(2))
    of, result = Operands.of(left, right), torch.from_numpy(left @ right)
    assert of.wrong_rows(result) == 0
    result[7, 11] += 1
    assert of.wrong_rows(result) == 1


def test_facts_are_text_and_do_not_change_from_one_look_to_the_next():
    assert facts() == facts()
    assert facts()["package torch"] == torch.__version__


def test_a_disk_that_takes_no_file_is_a_problem_and_leaves_none(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "cannot be written" in run_probe("disk", [str(blocked / "runs"), str(2**20)], {}, 30)["problem"]
    assert run_probe("disk", [str(tmp_path / "runs"), str(2**20)], {}, 30)["disk_bytes_per_s"] > 0
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named(tmp_path):
    """As write(2) reports one: /dev/full in the place of the file."""
    code = (
        "import sys, tempfile; from smalti.fleet.probes import disk; sys.argv = ['', sys.argv[1], '1048576'];"
        "tempfile.NamedTemporaryFile = lambda **_: open('/dev/full', 'wb+', buffering=0); disk.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "No space left on device" in json.loads(done.stdout)["problem"]


def test_a_probe_that_hangs_is_a_problem_of_the_report(tmp_path, monkeypatch):
    def hang(probe, *_):
        if probe == "node":
            raise SmaltiError("the probe node did not end within 60 s; it was at: products of matrices")
        return {"disk_bytes_per_s": 1e9}

    monkeypatch.setattr(run, "run_probe", hang)
    monkeypatch.setattr("smalti.fleet.check.local.run_probe", hang)
    (report,) = run.check(tmp_path, run.World(), timeout_s=1)
    assert [problem["kind"] for problem in report["problems"]] == ["probe"]


def test_a_file_that_is_no_report_is_refused_with_the_command_that_writes_one(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(SmaltiError, match="--save"):
        run.read_report(tmp_path / "x.json")


@pytest.mark.slow
def test_two_nodes_measure_the_link_between_them_and_a_third_that_never_came_is_missing(tmp_path):
    """Starts PyTorch three times; only real processes show that nobody waits for ever."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = []
    for rank in range(2):
        world = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "smalti", "fleet", "check", "--json", "--timeout", "15"]
        command += ["--folder", str(tmp_path / str(rank))]
        started.append(subprocess.Popen(command, env={**os.environ, **world}, stdout=subprocess.PIPE, text=True))
    results = [json.loads(process.communicate(timeout=150)[0]) for process in started]
    assert [process.returncode for process in started] == [3, 3]
    for result in results:
        first, second, third = result["reports"]
        assert third is None
        assert {found["kind"] for found in result["findings"]} >= {"missing"}
        assert not {"clock", "differs", "wrong_products"} & {found["kind"] for found in result["findings"]}
        for own, other in ((first, 1), (second, 0)):
            link = next(link for link in own["links"] if link["partner"] == other)
            assert max(link["bytes_per_s"].values()) > 0
            assert abs(link["ahead_s"]) < 0.5


@pytest.mark.slow
def test_a_node_alone_is_saved_and_compared(tmp_path):
    """The command as a person types it, twice; each starts PyTorch."""
    saved = tmp_path / "good.json"
    done = CliRunner().invoke(app, ["check", "--folder", str(tmp_path), "--save", str(saved)])
    assert done.exit_code == 0, done.output
    report = json.loads(saved.read_text())
    report["facts"]["kernel"] = "another"
    saved.write_text(json.dumps(report))
    done = CliRunner().invoke(app, ["check", "--folder", str(tmp_path), "--against", str(saved), "--json"])
    findings = json.loads(done.output[done.output.index("{") :])["findings"]
    assert next(found["message"] for found in findings if found["kind"] == "differs").startswith("kernel is ")
