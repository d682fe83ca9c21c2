"""The worked examples of docs/concepts on serving and tuning: commands print what the pages show."""

import re
import shlex
from pathlib import Path

import pytest
from test_plan_weights import preset

from smalti.cli.main import run
from smalti.config.hardware import hardware
from smalti.plan.devices import room_bytes
from smalti.plan.tuning import Tuned, Tuning

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts"
_EXAMPLE = re.compile(r"^```console\n\$ (smalti plan .+)\n((?:.*\n)+?)```$", re.MULTILINE)


@pytest.mark.parametrize("page", ["serving-memory", "tuning-memory"])
def test_commands_print_what_the_page_shows(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = _EXAMPLE.findall((CONCEPTS / f"{page}.md").read_text())
    assert examples
    for command, shown in examples:
        assert run(shlex.split(command)[1:]) == 0
        printed = capsys.readouterr().out
        assert shown.rstrip("\n") == printed[: len(shown) - 1]


@pytest.mark.parametrize(("method", "gpus"), [("full", 18), ("dpo", 21), ("qlora", 1)])
def test_numbers_of_devices_on_the_page(method: str, gpus: int) -> None:
    plan = Tuned(preset("llama-3-70b"), Tuning(method, 2048))  # type: ignore[arg-type]
    found = plan.fewest(room_bytes(hardware("h100-sxm")))
    assert found is not None
    assert found.devices == gpus
