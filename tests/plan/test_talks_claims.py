"""Claims of speed: each has what its status asks for, and the planner's commands run."""

import json
import shutil
from pathlib import Path
from typing import get_args

import pytest
from talks import claims
from talks.claims import CLAIMS, Claim, page, result
from talks.rows import TALKS

from smalti.cli.main import run
from smalti.config.parallel import ParallelConfig
from smalti.config.train import PrecisionConfig

PREDICTED = [claim for claim in CLAIMS if claim.status == "predicted"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.talk}-{claim.line}-{claim.quote[:24]}")
def test_claim_has_what_its_status_asks_for(claim: Claim) -> None:
    assert claim.talk in {talk.key for talk in TALKS}
    if claim.status == "proven here":
        assert claim.command.startswith(("make bench NAME=", "make prove NAME="))
        assert result(claim.result)["date"]
    elif claim.status == "predicted":
        assert claim.command.startswith("smalti plan ")
    else:
        assert "Would prove it" in claim.evidence()
        assert not claim.result


@pytest.mark.parametrize("claim", PREDICTED, ids=lambda claim: claim.command)
def test_command_of_a_prediction_runs(claim: Claim, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(claim.command.split()[1:]) == 0
    assert capsys.readouterr().out


@pytest.mark.slow
def test_page_has_every_claim() -> None:
    text = page()
    for claim in CLAIMS:
        assert claim.quote in text


def _evidence(talk: str, line: int) -> str:
    return next(claim.evidence() for claim in CLAIMS if (claim.talk, claim.line) == (talk, line))


def test_what_is_recorded_is_read_and_what_is_not_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results come and go; the page says of each what is there."""
    found = result("experts")["figures"]["arms"]["4 of 16"]["less_than_dense"]
    assert f"4 of 16 {-found:+.3f}" in _evidence("dbrx", 667)
    assert "planned over measured time is" in _evidence("blog", 58)
    shutil.copy(claims.RESULTS / "experts.json", tmp_path)
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    changed = json.loads((tmp_path / "experts.json").read_text())
    changed["figures"]["arms"]["4 of 16"]["less_than_dense"] = 0.5
    (tmp_path / "experts.json").write_text(json.dumps(changed))
    assert "4 of 16 -0.500" in _evidence("dbrx", 667)
    assert "1 of 1 gain; at 1.05M tokens 0 of 5 gain" in _evidence("dbrx", 667)
    assert "No recorded step of an MoE model" in _evidence("blog", 58)
    (tmp_path / "experts.json").unlink()
    assert "is not recorded" in _evidence("dbrx", 667)


def test_what_is_called_not_built_is_no_option() -> None:
    assert "FP8 training is not implemented" in page()
    assert "fp8" not in get_args(PrecisionConfig.model_fields["compute"].annotation)
    assert "Selective checkpointing and compressed activations are not built" in page()
    assert set(get_args(ParallelConfig.model_fields["activation_checkpointing"].annotation)) == {"none", "full"}
