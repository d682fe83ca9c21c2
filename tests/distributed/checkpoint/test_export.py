"""Export: a folder that stands alone, for us and for transformers, whole or not at all."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import add_checkpoint, tiny_run

from smalti.base.errors import DataError, RetryableError, SmaltiError, UserError
from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.distributed.checkpoint import card, checkpoint, saver
from smalti.distributed.checkpoint import export as room
from smalti.distributed.checkpoint.export import export
from smalti.model.huggingface import FAMILIES, load_folder
from smalti.track.checkpoints import manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["llama", "dbrx"])
def run(request, tmp_path: Path) -> Path:
    return tiny_run(tmp_path, family=request.param)


def _config(run: Path) -> RunConfig:
    return load(RunConfig, str(run)).config


@pytest.mark.sample(1)
def test_weights_tokenizer_and_record(run: Path) -> None:
    folder = Path(export(run))
    assert folder == run / "export"
    saved = checkpoint.read_model(run / "checkpoints/step-00000020")
    loaded = load_folder(folder).state_dict()
    assert set(saved) == set(loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert load_tokenizer(folder).digest == load_tokenizer(run / "tokenizer").digest
    record = json.loads((folder / "export.json").read_text())
    assert (record["run"], record["step"], record["dtype"]) == ("tiny", 20, "fp32")
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == load_tokenizer(folder).eod_id
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("step", "average", "expected"), [(None, None, 1), (20, None, 1), (24, "last:2", 2)])
def test_each_checkpoint_is_read_once_for_its_digests(
    step: int | None, average: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path)
    add_checkpoint(run, _config(run), 24)
    fault, verified = manifest.fault, list[Path]()
    monkeypatch.setattr(manifest, "fault", lambda path: [verified.append(Path(path)), fault(path)][1])
    export(run, step=step, average=average)
    assert len(verified) == len(set(verified)) == expected


def test_the_average_of_the_last_checkpoints(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for step in (24, 28, 32):
        add_checkpoint(run, _config(run), step)
    folder = Path(export(run, step=28, average="last:2"))
    parts = [checkpoint.read_model(run / f"checkpoints/step-000000{step}") for step in (24, 28)]
    for name, tensor in load_folder(folder).state_dict().items():
        torch.testing.assert_close(
            tensor, (parts[0][name].double() + parts[1][name].double()).div(2).float(), rtol=0, atol=0
        )
    assert json.loads((folder / "export.json").read_text())["averaged_steps"] == [24, 28]
    assert "fp32, the mean of steps 24, 28" in (folder / "README.md").read_text()
    before = (folder / "export.json").read_text()
    for average, message in (
        ("last:9", "has 4 checkpoints up to step 32"),
        ("last:1", "not known"),
        ("5", "not known"),
    ):
        with pytest.raises(UserError, match=message):
            export(run, average=average)
    assert (folder / "export.json").read_text() == before


def test_the_moving_average_of_a_checkpoint(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(UserError, match=r"was trained without train\.ema"):
        export(run, ema=True)
    config = load(RunConfig, str(run), ["train.ema.decay=0.99"]).config
    (run / "config.yaml").write_text(dump(config))
    with pytest.raises(UserError, match="has no moving average"):
        export(run, ema=True)
    weights = checkpoint.read_model(run / "checkpoints/step-00000020")
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"optimizer.{name}.ema": tensor + 1 for name, tensor in weights.items()}
    saver.save(run / "checkpoints", 24, tensors, {"step": 24}, keep=2)
    folder = Path(export(run, ema=True))
    exported = load_folder(folder).state_dict()
    assert all(torch.equal(exported[name], tensor + 1) for name, tensor in weights.items())
    assert json.loads((folder / "export.json").read_text())["ema"] is True
    assert "the moving average (EMA)" in (folder / "README.md").read_text()
    with pytest.raises(UserError, match="two means"):
        export(run, ema=True, average="last:2")


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_logits_and_greedy_text_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.offline import generate, stream
    from smalti.serve.engine.sampling import SamplingParams

    folder = export(tiny_run(tmp_path, family=family))
    assert room.verify(folder) < 1e-5
    engine = Engine.from_folder(folder)
    assert engine.name == "tiny"
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    without_text = list(range(engine.tokenizer.vocab_size, 320))  # our engine never chooses these padded rows
    prompts = ["def add(", "plain", "", "Grü", "([{"]
    for prompt, answer in zip(prompts, generate(engine, prompts, SamplingParams(max_tokens=24)), strict=True):
        ids = tokenizer(tokenizer.eos_token + prompt, return_tensors="pt", add_special_tokens=False)
        assert ids.input_ids.shape[1] == answer.prompt_tokens
        with torch.no_grad():
            out = theirs.generate(**ids, max_new_tokens=24, do_sample=False, suppress_tokens=without_text)
        out = out[0, answer.prompt_tokens :]
        assert out.tolist() == list(answer.token_ids)
        assert tokenizer.decode(out, skip_special_tokens=True) == answer.text
        assert "".join(stream(engine, prompt, SamplingParams(max_tokens=24))) == answer.text


@pytest.mark.sample(1)
def test_bf16_is_the_rounded_checkpoint(run: Path) -> None:
    folder = export(run, dtype="bf16")
    saved = checkpoint.read_model(run / "checkpoints/step-00000020")
    loaded = load_folder(folder).state_dict()
    assert all(torch.equal(saved[name].bfloat16(), loaded[name]) for name in saved)


def test_newest_complete_or_the_step_that_is_named(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    add_checkpoint(run, _config(run), 40)
    broken = Path(add_checkpoint(run, _config(run), 60))
    (broken / "COMPLETE").unlink()
    export(run)
    assert json.loads((run / "export/export.json").read_text())["step"] == 40
    other = export(run, step=20, output=tmp_path / "twenty")
    assert json.loads((Path(other) / "export.json").read_text())["step"] == 20
    with pytest.raises(UserError, match="COMPLETE") as caught:
        export(run, step=60)
    assert caught.value.allowed == "--step 20, 40"
    with pytest.raises(UserError, match="does not exist"):
        export(run, step=7)


def test_a_damaged_newest_checkpoint_is_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tiny_run(tmp_path)
    damaged = Path(add_checkpoint(run, _config(run), 40))
    shard = next((damaged / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    export(run)
    assert json.loads((run / "export/export.json").read_text())["step"] == 20
    assert f"{damaged} is skipped: shards/{shard.name}" in caplog.text


def test_again_replaces_the_old_one_whole(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    folder = Path(export(run))
    (folder / "left-over").write_text("x")
    export(run, dtype="bf16")
    assert not (folder / "left-over").exists()
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_failure_leaves_the_old_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)
    folder = Path(export(run))
    before = (folder / "export.json").read_text()
    add_checkpoint(run, _config(run), 40)

    def fail(*_: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(room.card, "model_card", fail)
    with pytest.raises(OSError, match="no space"):
        export(run)
    assert (folder / "export.json").read_text() == before
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_what_reads_back_differently_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)
    right = room.open_folder

    def wrong(folder: Path) -> Any:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\1\0")
        return right(folder)

    monkeypatch.setattr(room, "open_folder", wrong)
    with pytest.raises(SmaltiError, match=r"weight blocks\.1\.mlp\.down_proj\.weight"):
        export(run)
    monkeypatch.setattr(room, "open_folder", lambda folder: _with_other_eps(right(folder)))
    with pytest.raises(SmaltiError, match="differs when read back"):
        export(run)
    assert not (run / "export").exists()


def test_numbers_that_the_format_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)

    class Large(checkpoint.StoredModel):
        def __getitem__(self, name: str) -> torch.Tensor:
            return super().__getitem__(name) * (1e7 if name == "blocks.1.mlp_norm.weight" else 1)

    monkeypatch.setattr(checkpoint, "StoredModel", Large)
    with pytest.raises(DataError, match=r"blocks\.1\.mlp_norm\.weight .* not finite in torch\.float16"):
        export(run, dtype="fp16")
    assert not (run / "export").exists()
    export(run, dtype="bf16")


def _with_other_eps(source: Any) -> Any:
    return dataclasses.replace(source, config=source.config.model_copy(update={"norm_eps": 1.0}))


def test_the_card_says_what_the_run_says(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, family="dbrx")
    (run / "metrics.jsonl").write_text('{"step": 20, "data/mix/code/tokens": 1280}\n{"step": 3')
    score = {"metric": "bits_per_byte", "value": 1.5, "interval": [1.4, 1.6], "n": 9}
    score |= {"gzip_bits_per_byte": 1.6, "xz_bits_per_byte": 1.31}
    results = run / "evals/demo/2026-01-01T00-00-00.000Z/results.json"
    results.parent.mkdir(parents=True)
    results.write_text(
        json.dumps({"suite": "demo", "time": "t", "step": 20, "seq_len": 32, "tasks": {"heldout/code": score}})
    )
    (run / "provenance.json").write_text(json.dumps({"git": {"commit": "abc123", "dirty": False}, "command": ["x"]}))
    card = (Path(export(run)) / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for text in ("1,280", "abc123", "| heldout/code | bits per byte | 1.5 |", "gzip -9 1.6, xz -9 1.31", "Licences"):
        assert text in card, text
    assert "| code | 1,280 |" in card


def test_the_card_keeps_the_results_of_most_items(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for time, n, mode in (("1", 100, "v0.3"), ("2", 10, "fixed")):
        score = {"metric": "accuracy", "value": n / 1000, "interval": None, "n": n, "mode": mode, "shots": 3}
        folder = run / f"evals/mine/{time}"
        folder.mkdir(parents=True)
        tasks = {"copa": score} | ({"piqa": score} if n == 10 else {})
        results = {"suite": "mine", "time": time, "step": 20, "seq_len": 32, "tasks": tasks}
        (folder / "results.json").write_text(json.dumps(results))
    text = card.model_card(run, _config(run), 20, "fp32")
    assert "| copa (v0.3, 3 shots) | accuracy | 0.1 |" in text
    assert "| piqa (fixed, 3 shots) | accuracy | 0.01 |" in text


def test_the_card_of_continued_pretraining_names_where_it_began(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    config = _config(run)
    assert "A base language model" in card.model_card(run, config, 20, "fp32")
    text = card.model_card(run, config.model_copy(update={"init_from": "models/some-instruct"}), 20, "fp32")
    assert "from the weights of models/some-instruct" in text
    assert "base" not in text.split("## Use")[0]


@pytest.mark.slow
def test_the_card_counts_the_tokens_up_to_its_own_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    add_checkpoint(run, _config(run), 40)
    rows = [{"step": step, "data/mix/code/tokens": step * 64} for step in (5, 15, 25, 40)]
    rows.insert(2, {"step": 18, "metrics/eval/code/bits_per_byte": 2.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        "| source | tokens trained | tokens in the source | digest |" in (Path(export(run)) / "README.md").read_text()
    )
    card = (Path(export(run, step=20, output=tmp_path / "twenty")) / "README.md").read_text()
    assert "| source | tokens trained by step 15 |" in card
    assert "| code | 960 |" in card


def test_the_card_names_no_evals_of_another_step(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    results = run / "evals/demo/2026-01-01T00-00-00.000Z/results.json"
    results.parent.mkdir(parents=True)
    results.write_text(json.dumps({"suite": "demo", "time": "t", "step": 10, "seq_len": 32, "tasks": {}}))
    assert "Step 20 has not been evaluated" in (Path(export(run)) / "README.md").read_text()


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        export(tmp_path)
    run = tiny_run(tmp_path)
    with pytest.raises(UserError, match="fp8"):
        export(run, dtype="fp8")  # type: ignore[arg-type]
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match="not an exported model"):
        export(run, output=tmp_path / "mine")
    (run / "tokenizer").rename(run / "elsewhere")
    with pytest.raises(UserError, match="tokenizer"):
        export(run)
    (run / "elsewhere").rename(run / "tokenizer")
    (run / "checkpoints/step-00000020/COMPLETE").unlink()
    with pytest.raises(UserError, match=r"no complete checkpoint; the last .* of step 20, was deleted") as caught:
        export(run)
    assert f"copy it back to {run / 'checkpoints'}" in str(caught.value.hint)


@pytest.mark.slow
def test_the_card_knows_sources_of_other_forms_and_says_which_were_out_of_reach(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    data = {
        "sources": {
            "raw": {"path": str(tmp_path / "raw.bin"), "format": "raw", "dtype": "uint16"},
            "gone": str(tmp_path / "gone"),
            "far": "http://127.0.0.1:9/tokens",
        },
        "stages": [{"weights": {"raw": 1, "gone": 1, "far": 1}}],
    }
    tree = _config(run).model_dump()
    tree["data"] |= data
    text = card.model_card(run, RunConfig.model_validate(tree), 20, "fp32")
    assert "| raw | unknown | 1,000 |" in text
    assert "| gone | unknown | (not found when exported) |" in text
    assert "| far | unknown | (could not be reached when exported) |" in text


def test_a_full_disk_leaves_the_export_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)
    folder = Path(export(run))
    before = (folder / "export.json").read_bytes()

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RetryableError, match="the disk is full"):
        export(run)
    assert (folder / "export.json").read_bytes() == before
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


def test_a_file_in_the_way_of_an_export_is_named(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    (tmp_path / "taken").write_text("")
    for output in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(DataError, match="taken"):
            export(run, output=output)
