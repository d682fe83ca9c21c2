"""smalti plan failures as a command: what it prints, draws and refuses."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_in_process import output_of

from smalti.base.errors import UserError
from smalti.cli.plan import app as plan
from smalti.cli.plan.failures import setup_from

call = partial(output_of, plan.app, "failures")


def test_what_it_prints() -> None:
    text = call("gpus=3072", "days=75", "price_usd_per_gpu_hour=3", "repair_days=2", "spares=13")
    for part in ("3,072 GPUs on 384 nodes", "one in 7h48m", "90.6%", "82.76 days for 75", "13 nodes suffice",
                 "repeated work", "assumed", "MegaScale", "meta-rsc-1"):  # fmt: skip
        assert part in text, part


def test_json_has_the_published_goodput() -> None:
    goal = ("detect_s=30", "restart_s=120", "checkpoint_stall_s=1")
    for gpus, printed in ((512, 99.6), (1024, 99.3), (3072, 98.6), (16384, 95.4)):
        found = json.loads(call(f"gpus={gpus}", *goal, "--json"))
        assert round(100 * found["goodput_frac"], 1) == printed
        assert found["simulated"] is None
    assert found["assumed"].keys() == {
        "failures_per_1000_gpu_days", "gpus_per_node", "checkpoint_upload_s", "failures_during_restart",
    }  # fmt: skip
    assert found["calendar_days"] is None


def test_simulated_as_text_and_json() -> None:
    words = ("gpus=3072", "days=30", "spares=2", "repair_days=2", "--simulate", "--repeats", "5")
    text = call(*words)
    for part in ("5 runs", "waiting", "in repair", "faulty-gpu", "GPU-hours lost"):
        assert part in text, part
    first, again, other = (json.loads(call(*words, "--json", "--seed", seed)) for seed in ("1", "1", "2"))
    assert first == again
    assert first["simulated"] != other["simulated"]
    assert first["simulated"]["repeats"] == 5
    assert sum(first["simulated"]["shares"].values()) == pytest.approx(1)


def test_rates_and_causes_by_name() -> None:
    setup = setup_from(["gpus=16k", "failures_per_1000_gpu_days=llama-3", "detect_s.nccl-watchdog=600", "detect_s=0",
                        "failures_during_restart=true"])  # fmt: skip
    assert setup.gpus == 16_000
    assert setup.failures_per_1000_gpu_days == pytest.approx(0.4736, abs=1e-4)
    assert setup.detect_s == 0
    assert setup.failures_during_restart
    assert {cause.detect_s for cause in setup.causes if cause.name == "nccl-watchdog"} == {600.0}


@pytest.mark.parametrize("extra", [(), ("checkpoint_interval_s=3600",), ("checkpoint_upload_s=600",),
                                   ("failures_per_1000_gpu_days=0", "checkpoint_interval_s=60"),
                                   ("repair_days=2", "repair_days.nic=3")])  # fmt: skip
def test_the_picture(tmp_path: Path, extra: tuple[str, ...]) -> None:
    path = tmp_path / "goodput.svg"
    assert f"plot: {path}" in call("gpus=3072", *extra, "--plot", str(path))
    root = ElementTree.fromstring(path.read_text())
    assert "nan" not in path.read_text()
    charts = [child for child in root if child.tag.endswith("svg")]
    assert len(charts) == 2
    heights = [(int(one.attrib["y"]), int(one.attrib["height"])) for one in charts]
    assert heights[1][0] > heights[0][0] + heights[0][1]
    texts = [one.text or "" for one in root.iter() if one.tag.endswith("text")]
    assert any("this job: every" in text for text in texts)
    assert any("3,072 GPUs" in text for text in texts)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "number of GPUs is not given"),
        (["gpus"], "gives gpus no value"),
        (["gpus="], "gives gpus no value"),
        (["gpu=8"], "'gpu' is not"),
        (["gpus=8", "gpus=16"], "given twice"),
        (["gpus=0"], "gpus=0"),
        (["gpus=1e30"], "gpus=1e30"),
        (["gpus=eight"], "gpus=eight is not a number"),
        (["gpus=8.5"], "gpus=8.5"),
        (["gpus=nan"], "gpus=nan"),
        (["gpus=8", "days=-3"], "days=-3"),
        (["gpus=8", "days=inf"], "days=inf"),
        (["gpus=8", "detect_s=30s"], "detect_s=30s is not a number"),
        (["gpus=8", "failures_per_1000_gpu_days=lama-3"], "'lama-3' is not a known failure rate"),
        (["gpus=8", "failures_during_restart=maybe"], "is not a switch"),
        (["gpus=8", "detect_s.nik=3"], "'nik' is not a known cause"),
        (["gpus=8", "detect_s.nic=3", "detect_s.nic=4"], "given twice"),
        (["gpus=8", "days.nic=3"], "'days' is not"),
        (["gpus=8", "detect_s.nic"], "no value"),
        (["gpus=8", "--repeats", "3"], "are options of --simulate"),
        (["gpus=8", "--simulate"], "needs the length of the run"),
        (["gpus=8", "days=3", "--simulate", "--repeats", "0"], "repeats=0"),
        (["gpus=8", "--plot", "here.png"], "is not an .svg file"),
    ],
)
def test_refusals(words: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        call(*words)


def test_help_names_every_key_and_rate() -> None:
    from smalti.plan.failures.rates import RATES
    from smalti.plan.failures.setup import NAMES

    text = re.sub(r"\s+", " ", call("--help"))
    for name in (*NAMES, *(rate.name for rate in RATES)):
        assert name in text, name


def test_a_hint_for_what_is_nearly_right() -> None:
    caught: Any
    with pytest.raises(UserError) as caught:
        call("gpus=8", "restart=3")
    assert "restart_s" in caught.value.hint
