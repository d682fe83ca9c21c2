"""``smalti config``: the kind of a recipe is known by its keys, presets are shown too, wrong names are answered."""

import json

import pytest

from smalti.cli.main import run
from smalti.config.find import preset_names, recipe_names
from smalti.config.load import load
from smalti.config.run import RunConfig


@pytest.mark.parametrize("name", recipe_names())
def test_every_name_that_is_listed_can_be_shown(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smalti.train.origin.model_of", lambda source: load(RunConfig, "demo").config.model)
    assert run(["config", "show", name]) == 0
    assert f"{name}.yaml:" in capsys.readouterr().out


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "demo-curat"]) == 2
    assert "did you mean 'demo-curate'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", name]) == 0
    assert f"# preset {'dbrx-132b' if name == 'dbrx' else name}:" in capsys.readouterr().out


def test_a_depth_can_be_shown_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "depth-12"]) == 0
    assert "num_hidden_layers: 12" in capsys.readouterr().out
    assert run(["config", "show"]) == 0
    assert "depth-N" in capsys.readouterr().out


def test_the_kind_is_guessed_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipes"]["demo"] == "train"
    for name, kind in found["recipes"].items():
        if name.startswith("demo-") and name not in ("demo-dense", "demo-moe", "demo-continue", "demo-chat"):
            assert name == f"demo-{kind}"


@pytest.mark.parametrize("kind", ["train", "curate", "tokenize", "dedup", "eval", "model"])
def test_every_kind_has_a_schema(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run(["config", "schema", kind]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["$schema"].startswith("https://json-schema.org/")
    assert "# yaml-language-server: $schema=" in shown.err


def test_json_of_show_has_origins(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "demo", "seed=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["config"]["seed"], found["origins"]["seed"]) == ("train", 3, "command line")


def test_diff_guesses_the_kind_and_tells_identity_from_placement(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "diff", "dbrx", "llama-3-8b"]) == 3
    assert "family: dbrx -> llama" in capsys.readouterr().out
    assert run(["config", "diff", "demo", "demo", "train.parallel.ranks=5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["identity"], found["placement"]) == ({}, {"train.parallel.ranks": [2, 5]})
    assert run(["config", "diff", "demo", "demo"]) == 0
    assert capsys.readouterr().out == "nothing differs\n"
    assert run(["config", "diff", "demo", "demo-moe"]) == 3
    assert "placement" not in capsys.readouterr().out, "a section that goes with its placement is one difference"


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["show", "lama-3-8b"], ("did you mean the preset 'llama-3-8b'?",)),
        (["show", "depth-0"], ("N of depth-N goes from 1 to 128",)),
        (["show", "demo", "--kind", "trian"], ("'trian' is not a kind", "did you mean train?")),
        (["diff", "demo", "demo-curate"], ("of kind train", "of kind curate", "one kind")),
        (["diff", "demo", "dmeo"], ("did you mean 'demo'?",)),
        (["show", "llama-3-8b", "hiden_size=3"], ("hidden_size",)),
    ],
)
def test_wrong_names_are_answered(
    arguments: list[str], texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", *arguments]) == 2
    err = capsys.readouterr().err
    for text in texts:
        assert text in err
