"""Claims of speed: each has what its status asks for, and the planner's commands run."""

import pytest
from talks.claims import CLAIMS, Claim, page, result
from talks.rows import TALKS

from smalti.cli.main import run

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


def test_page_has_every_claim() -> None:
    text = page()
    for claim in CLAIMS:
        assert claim.quote in text
