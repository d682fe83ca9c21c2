"""Export of a run that trained adapters: alone, and merged into their base."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from made_copies import opened
from s3_buckets import Bucket
from tiny_runs import require_same_export, tiny_run

from smalti.base.errors import DataError, UserError
from smalti.config.adapter import AdapterConfig
from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.config.tune import TuneConfig
from smalti.distributed.checkpoint import base, saver
from smalti.distributed.checkpoint.export import errors_of_merge, export, relative_error
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter
from smalti.model.adapters.apply import apply, is_adapter
from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder
from smalti.serve.folders import find
from smalti.tune.chats.templates import write_template

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def adapter_run(root: Path, family: str = "llama") -> tuple[Path, Decoder]:
    """A run with a checkpoint of adapters beside an exported base, and its model."""
    export(tiny_run(root, family=family))
    made = root / "runs/tiny"
    adapter = AdapterConfig(rank=2, alpha=6, targets=("attention",))
    tune = TuneConfig.model_validate({"examples": {"files": ["answers.jsonl"], "template": "chatml"}})
    config = load(RunConfig, str(made)).config.model_copy(
        update={"name": "tuned", "init_from": str(made / "export"), "adapter": adapter, "tune": tune}
    )
    run = root / "runs/tuned"
    run.mkdir()
    (run / "config.yaml").write_text(dump(config))
    (made / "tokenizer").rename(run / "tokenizer")
    write_template(run / "tokenizer", "{{ messages[0].content }}", [0, 3])
    model = load_folder(made / "export", torch.float32)
    apply(model, adapter)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 3)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if is_adapter(name)}
    state = {"step": 4, "base": base.identity(made / "export", str(made / "export"))}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        saver.save(run / "checkpoints", 4, tensors, state, keep=1)
    return run, model.eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "dbrx"])
def test_adapters_alone_and_merged(family: str, tmp_path: Path) -> None:
    run, model = adapter_run(tmp_path, family)
    folder = Path(export(run))
    assert folder == run / "adapter"
    ours = Adapter.of_tensors(model.state_dict(), load_folder(tmp_path / "runs/tiny/export").state_dict(), 3.0)
    read = peft.load(folder, model.config)
    assert read.scale == 3
    assert read.pairs.keys() == ours.pairs.keys()
    if family == "llama":  # dbrx joins query, key and value
        assert all(
            torch.equal(one, other) for n in read.pairs for one, other in zip(read.pairs[n], ours.pairs[n], strict=True)
        )
    record = json.loads((folder / "export.json").read_text())
    assert (record["run"], record["step"], record["base"]["kind"]) == ("tuned", 4, "folder")
    card = (folder / "README.md").read_text()
    assert "| chat template | chatml |" in card
    assert "| examples | answers.jsonl |" in card
    assert f"| parents | {tmp_path / 'runs/tiny/export'} |" in card
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (run / "tokenizer" / name).read_bytes()

    with pytest.raises(UserError, match="no exported model yet") as raised:
        find(str(run))
    assert raised.value.hint == f"smalti export {run} --merge; or smalti chat, smalti serve BASE --adapter {run}"
    merged = load_folder(export(run, merge=True))
    ids_BT = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert relative_error(merged(ids_BT).value, model(ids_BT).value) < 1e-5
    assert find(str(run)).name == "tuned"


@pytest.mark.slow
def test_export_beside_another_base_or_without_adapters_is_refused(tmp_path: Path) -> None:
    run, _ = adapter_run(tmp_path)
    made = tmp_path / "runs/tiny"
    with pytest.raises(UserError, match="--merge has no effect"):
        export(made, merge=True)
    weights = made / "export/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DataError, match="trained beside other weights"):
        export(run, merge=True)
    with pytest.raises(DataError, match="is not an exported adapter"):
        export(run, output=made)


@pytest.mark.slow
def test_errors_of_a_merge_beside_a_quantised_base(tmp_path: Path) -> None:
    run, _ = adapter_run(tmp_path)
    config = load(RunConfig, str(run)).config
    assert errors_of_merge(run, 4, logits=True) == {}
    assert config.adapter is not None
    for kind, low, high in (("nf4", 0.05, 0.15), ("int8", 0.002, 0.01)):
        changed = config.model_copy(update={"adapter": config.adapter.model_copy(update={"quantize": kind})})
        (run / "config.yaml").write_text(dump(changed))
        errors = errors_of_merge(run, 4, logits=True)
        assert errors.keys() == {"requantized", "unquantized"}
        assert all(low < error["weights"] < high for error in errors.values())
        assert all(0 < error["logits"] < 1 for error in errors.values())


def test_adapters_from_a_store_are_those_of_the_folder(tmp_path: Path, s3: Bucket) -> None:
    """Alone and merged."""
    run, _ = adapter_run(tmp_path)
    text = (run / "config.yaml").read_text()
    opened(s3.url).upload(run / "checkpoints/step-00000004", config=text)
    expected = [Path(export(run, merge=merge, output=tmp_path / f"here-{merge}")) for merge in (False, True)]
    (run / "checkpoints").rename(tmp_path / "gone")
    for merge, folder in zip((False, True), expected, strict=True):
        there = export(run, merge=merge, output=tmp_path / f"there-{merge}", checkpoints=s3.url)
        require_same_export(Path(there), folder)
    other = load(RunConfig, str(run), ["adapter.alpha=7"]).config
    (run / "config.yaml").write_text(dump(other))
    with pytest.raises(DataError, match="its adapter section is not that of tuned"):
        export(run, checkpoints=s3.url)
