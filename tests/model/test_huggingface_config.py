"""``config.json`` read without torch, and what stands in the way of a folder that is written."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import family_config, tiny_model

from smalti.base.errors import DataError, RetryableError
from smalti.model.huggingface import load, save
from smalti.model.huggingface_config import FAMILIES, open_config


def _described(folder: Path, config: Any, **changes: Any) -> Path:
    family = FAMILIES[config.family]
    raw = {"model_type": family.model_type, "architectures": [family.architecture]}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | family.config_to_huggingface(config) | changes))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_is_that_of_the_model(family: str, tmp_path: Path) -> None:
    config = family_config(family)
    found = open_config(_described(tmp_path / family, config)).config
    described = FAMILIES[family].config_to_huggingface
    assert described(found) == described(config)


def test_one_expert_a_token_is_read_as_it_is(tmp_path: Path) -> None:
    """Training such a model from the beginning is refused; one that exists must load."""
    folder = _described(tmp_path / "mixtral", family_config("mixtral"), num_experts_per_tok=1)
    assert open_config(folder).config.router_weighs_alike


@pytest.mark.slow
def test_without_torch(tmp_path: Path) -> None:
    folder = _described(tmp_path / "dbrx", family_config("dbrx"))
    program = f"import sys; from smalti.model.huggingface_config import open_config; open_config({str(folder)!r}); "
    done = subprocess.run([sys.executable, "-c", program + "sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    model = tiny_model(family_config("llama"))
    (tmp_path / "taken").write_text("mine")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(DataError, match="taken"):
            save(model, place)
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tiny_model(family_config("llama"), seed=1), tiny_model(family_config("llama"), seed=2)
    save(old, tmp_path / "model")

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RetryableError, match=r"the disk is full: .*model could not be written"):
        save(new, tmp_path / "model")
    kept = load(tmp_path / "model").decoder.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in old.state_dict().items())
    assert not (tmp_path / "model" / ".saving").exists()
