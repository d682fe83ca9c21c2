"""The tokenizer in a run folder, and the files that are copied with it from the model of ``init_from``."""

import json
from pathlib import Path

import pytest

from smalti.train.weights import keep_tokenizer


def test_chat_template_and_sampling_of_the_first_model_stay_with_the_run(tmp_path: Path) -> None:
    data, model, kept = tmp_path / "data", tmp_path / "model", tmp_path / "run" / "tokenizer"
    for folder in (data, model, kept.parent):
        folder.mkdir()
    (data / "tokenizer.json").write_text("{}")
    (data / "model.safetensors").write_text("weights that lie beside it")
    (model / "tokenizer.json").write_text('{"of": "the model"}')
    (model / "merges.txt").write_text("a b")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "generation_config.json").write_text('{"temperature": 0.6}')
    keep_tokenizer(str(data), kept, str(model))
    assert sorted(path.name for path in kept.iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
    ]
    assert (kept / "tokenizer.json").read_text() == "{}"
    assert json.loads((kept / "generation_config.json").read_text()) == {"temperature": 0.6}
    (data / "tokenizer.json").write_text("[]")
    keep_tokenizer(str(data), kept, None)
    assert (kept / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("of", ["run", "run/checkpoints/step-00000020"])
def test_they_go_on_to_a_run_that_begins_with_that_run(tmp_path: Path, of: str) -> None:
    first, data, kept = tmp_path / "run", tmp_path / "data", tmp_path / "second" / "tokenizer"
    for folder in (first / "tokenizer", first / "checkpoints/step-00000020", data, kept.parent):
        folder.mkdir(parents=True)
    (first / "config.yaml").write_text("")
    (first / "checkpoints/step-00000020/train_state.json").write_text("{}")
    (first / "tokenizer/generation_config.json").write_text('{"temperature": 0.6}')
    (data / "tokenizer.json").write_text("{}")
    keep_tokenizer(str(data), kept, str(tmp_path / of))
    assert sorted(path.name for path in kept.iterdir()) == ["generation_config.json", "tokenizer.json"]


def test_a_template_inside_the_tokenizers_config_stays_too_and_the_datas_own_goes_before(tmp_path: Path) -> None:
    data, model = tmp_path / "data", tmp_path / "model"
    for folder in (data, model):
        folder.mkdir()
    (model / "tokenizer_config.json").write_text('{"chat_template": "of the model", "eos_token": "<a>"}')
    for own, kept in ({"eos_token": "<b>"}, "of the model"), ({"chat_template": "of the data"}, "of the data"):
        (data / "tokenizer_config.json").write_text(json.dumps(own))
        keep_tokenizer(str(data), tmp_path / kept, str(model))
        assert json.loads((tmp_path / kept / "tokenizer_config.json").read_text()) == own | {"chat_template": kept}
