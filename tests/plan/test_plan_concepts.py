"""The numbers of devices that docs/concepts/plan/tuning-memory.md gives in running text."""

import pytest
from test_plan_weights import preset

from smalti.config.hardware import hardware
from smalti.plan.serving.devices import usable_memory_bytes
from smalti.plan.tuning import Tuned, Tuning


@pytest.mark.parametrize(("method", "gpus"), [("full", 21), ("dpo", 26), ("qlora", 1)])
def test_numbers_of_devices_on_the_page(method: str, gpus: int) -> None:
    plan = Tuned(preset("llama-3-70b"), Tuning(method, 2048))  # type: ignore[arg-type]
    found = plan.fewest(usable_memory_bytes(hardware("h100-sxm"), reserved_frac=0))
    assert found is not None
    assert found.devices == gpus
