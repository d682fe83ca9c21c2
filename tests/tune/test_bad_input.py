"""Bad input of each kind of tuning ends before anything is trained: what was given, what is allowed, what to type."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_preference_runs import config_of
from tiny_models import tiny_model
from tiny_runs import TEXTS, tiny_run, tiny_tokenizer

from smalti.base.errors import DataError, UserError
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.distributed.checkpoint.base import identity
from smalti.distributed.checkpoint.export import export
from smalti.model.adapters.adapter import Adapter
from smalti.model.adapters.apply import apply
from smalti.model.adapters.peft import save as save_adapter
from smalti.model.huggingface import load_folder
from smalti.model.huggingface import save as save_model
from smalti.track.registry.facts import RECORD
from smalti.train import build, frozen_origins

ROLES = {"role": "boss", "content": "add"}
FILES: dict[str, dict[str, Any]] = {
    "answers": {"prompt": "add 1", "completion": "2"},
    "pairs": {"prompt": "add 1", "chosen": "2", "rejected": "0"},
    "labels": {"prompt": "add 1", "completion": "2", "label": True},
    "answers with a role": {"prompt": [ROLES], "completion": "2"},
    "pairs with a role": {"prompt": [ROLES], "chosen": "2", "rejected": "0"},
    "labels with a role": {"prompt": [ROLES], "completion": "2", "label": True},
    "equal pairs": {"prompt": "add 1", "chosen": "2", "rejected": "2"},
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("instruct", "answers", {}),
    "lora": ("lora", "answers", {}),
    "distill": ("instruct", "answers", {"tune.distill.teacher": "{root}/model"}),
    "dpo": ("dpo", "pairs", {}),
    "live": ("dpo", "pairs", {"tune.preference.reference": "live"}),
    "simpo": ("dpo", "pairs", {"tune.preference.loss": "simpo"}),
    "kto": ("dpo", "labels", {"tune.preference.loss": "kto"}),
    "reward": ("reward", "pairs", {}),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another tokenizer, a model with it, a run of adapters, and a file with one row of each form."""
    root = tmp_path_factory.mktemp("bad")
    export(tiny_run(root, context=384), output=root / "model")
    shutil.copytree(root / "model", root / "other")
    Tokenizer(train_bpe([text[::-1] for text in TEXTS], 300), "<|endoftext|>").save(root / "other")
    tiny_tokenizer().extended(["Straßenbahn und Straßenlaterne. "] * 2, 10).save(root / "larger")
    (root / "adapters").mkdir()
    config = (root / "runs/tiny/config.yaml").read_text()
    (root / "adapters/config.yaml").write_text(config.replace("adapter: null", "adapter: {rank: 2, alpha: 4}"))
    for name, row in FILES.items():
        (root / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return root


def _config(root: Path, kind: str, file: str | None = None, **changes: str) -> Any:
    recipe, default, own = KINDS[kind]
    values = {"init_from": root / "model", "tune.examples.heldout_frac": 0, **own, **changes}
    values["tune.examples.files"] = f"[{root / (file or default)}.jsonl]"
    return config_of(root, recipe, **{key: str(value).format(root=root) for key, value in values.items()})


FORMS = [
    ("sft", "pairs", "is a pair of answers", "smalti tune preference"),
    ("sft", "labels", "has label beside its answer", "smalti tune preference kto"),
    ("dpo", "answers", "has one answer", "smalti tune sft"),
    ("dpo", "equal pairs", "chosen and rejected are equal", "fix the row"),
    ("kto", "answers", "is not an answer with a label", "smalti tune preference dpo for pairs"),
    ("kto", "pairs", "is not an answer with a label", "smalti tune preference dpo for pairs"),
    ("reward", "answers", "has one answer", "smalti tune sft"),
    *(
        (kind, f"{KINDS[kind][1]} with a role", "has the role 'boss'", "fix the row")
        for kind in ("sft", "dpo", "kto", "reward")
    ),
]


@pytest.mark.parametrize(("kind", "file", "message", "hint"), FORMS)
def test_examples_of_another_form_are_refused(kind: str, file: str, message: str, hint: str, root: Path) -> None:
    with pytest.raises(DataError, match=message) as raised:
        _config(root, kind, file)
    assert raised.value.allowed
    assert hint in str(raised.value.hint)


OTHER = {"data.tokenizer": "{root}/other"}
LARGER = {"data.tokenizer": "{root}/larger"}
PROBLEMS: list[tuple[str, dict[str, str], str, str]] = [
    *(
        (kind, {"tune.examples.template": "model"}, "has no chat template", "template=chatml")
        for kind in ("sft", "dpo", "kto", "reward")
    ),
    *(
        (kind, {"tune.examples.max_tokens": "3", "tune.examples.too_long": "drop"},
         "no training example is left of the 1 rows", "too_long")
        for kind in ("sft", "kto")
    ),
    ("sft", OTHER, "init_from=.* was trained with another tokenizer", "leave out data.tokenizer"),
    ("simpo", OTHER, "init_from=.* was trained with another tokenizer", "leave out data.tokenizer"),
    ("reward", OTHER, "init_from=.* was trained with another tokenizer", "leave out data.tokenizer"),
    ("dpo", OTHER, "the reference, init_from=.* trained with another tokenizer", "leave out data.tokenizer"),
    ("live", LARGER, "the reference.* entries there and .* here", "'smalti tune sft' first"),
    ("kto", LARGER, "the reference.* entries there and .* here", "'smalti tune sft' first"),
    ("distill", {"tune.distill.teacher": "{root}/other"}, "the teacher.* another tokenizer", "tune.distill.teacher="),
    ("distill", LARGER, "the teacher.* entries there and .* here", "tune.distill.teacher="),
    ("distill", {"tune.distill.teacher": "{root}/nowhere"}, "nowhere is none of: a run folder", "runs/NAME"),
    ("distill", {"tune.distill.teacher": "{root}/adapters"}, "adapters holds adapters", "smalti export RUN --merge"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message", "hint"), PROBLEMS)
def test_what_cannot_be_tuned_is_refused(
    kind: str, changes: dict[str, str], message: str, hint: str, root: Path
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        _config(root, kind, **changes)
    assert raised.value.allowed or "is none of: " in str(raised.value)
    assert hint in str(raised.value.hint)


def test_an_adapter_of_another_base_is_refused(root: Path, tmp_path: Path) -> None:
    """Its shapes fit; only the record beside it names the base."""
    config = _config(root, "lora", folder=str(tmp_path / "run"), **{"adapter.init_from": str(tmp_path / "adapter")})
    save_model(tiny_model(config.model, seed=7), tmp_path / "base")
    model = load_folder(root / "model")
    weights = model.state_dict()
    apply(model, config.adapter)
    adapter = Adapter.of_tensors(model.state_dict(), weights, config.adapter.scale)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", adapter, config.model, config.adapter, "base")
    record = tmp_path / "adapter" / RECORD
    record.write_text(json.dumps({"base": identity(tmp_path / "base", "theirs")}))
    with pytest.raises(DataError, match=r"adapter were trained beside other weights than those of .*/model") as raised:
        build(config)
    assert "(theirs)" in str(raised.value.allowed)
    record.write_text(json.dumps({"base": identity(root / "model", "ours")}))
    build(config)


@pytest.mark.parametrize(("kind", "name"), [("live", "base"), ("lora", "base"), ("distill", "teacher"), ("dpo", None)])
def test_a_resumed_run_needs_the_frozen_weights_of_its_checkpoint(
    kind: str, name: str | None, root: Path, tmp_path: Path
) -> None:
    """A run that has a second model, or a base, reads it on every attempt."""
    config = _config(root, kind)
    assert config.frozen_origins == ({} if name is None else {name: str(root / "model")})
    identities = {key: identity(path, path) for key, path in config.frozen_origins.items()}
    if name is None:
        return
    for sha256, same in ((identities[name]["sha256"], True), ("0" * 64, False)):
        state = {name: {"init_from": "theirs", "kind": "folder", "sha256": sha256}}
        (tmp_path / "train_state.json").write_text(json.dumps(state))
        match = r"trained beside other weights than those of .*/model"
        with nullcontext() if same else pytest.raises(DataError, match=match):
            frozen_origins.require_recorded(config, str(tmp_path), identities)
