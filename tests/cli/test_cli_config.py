"""``smalti config show`` knows the kind of a recipe by its keys."""

import pytest

from smalti.cli.main import run
from smalti.config.find import recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_name_that_is_listed_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", name]) == 0
    assert f"{name}.yaml:" in capsys.readouterr().out


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "demo-curat"]) == 2
    assert "did you mean 'demo-curate'?" in capsys.readouterr().err
