"""The numbers of devices that docs/concepts/plan/tuning-memory.md gives in running text."""

import re
from pathlib import Path

import pytest
from test_plan_weights import preset

from smalti.config.hardware import hardware
from smalti.plan.serving.devices import usable_memory_bytes
from smalti.plan.tuning import Tuned, Tuning

PAGE = Path(__file__).resolve().parents[2] / "docs/concepts/plan/tuning-memory.md"
SENTENCES = {
    "qlora": r"--method qlora --gpu h100-sxm\n(?:.*\n)*?h100-sxm +[\d.]+ GiB +(\d+) ",
    "full": r"The same model with `--method full` takes (\d+) of them",
    "dpo": r"of them, and `--method dpo` (\d+)\.",
}
"""Method -> where the page gives its number of devices."""


@pytest.mark.parametrize("method", SENTENCES)
def test_numbers_of_devices_on_the_page(method: str) -> None:
    (gpus,) = re.findall(SENTENCES[method], PAGE.read_text())
    plan = Tuned(preset("llama-3-70b"), Tuning(method, 2048))  # type: ignore[arg-type]
    found = plan.fewest(usable_memory_bytes(hardware("h100-sxm"), reserved_frac=0))
    assert found is not None
    assert found.devices == int(gpus)
