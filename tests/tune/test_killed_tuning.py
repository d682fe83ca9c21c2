"""Tuning that is killed (SIGKILL) and resumed: all that it leaves is that of an undisturbed run, of each kind."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import exit_code
from test_preference_runs import config_of
from tiny_runs import tiny_run, tiny_tokenizer

from smalti.config.run import RunConfig
from smalti.data.examples.folder import ExamplesRecord
from smalti.distributed.checkpoint.export import export
from smalti.evals.in_loop import heldout_hook
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import folder_name, step_of
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.tune import prepare
from smalti.tune.preference import reference
from smalti.tune.run import Tuning

STEPS = 8
TIMES = ("time", "throughput/", "ckpt/", "data/wait", "memory/")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its export, a tokenizer with more entries, and examples of each form."""
    root = tmp_path_factory.mktemp("killed")
    export(tiny_run(root, context=384), output=root / "model")
    tiny_tokenizer().extended(["Straßenbahn und Straßenlaterne. "] * 2, 10).save(root / "more")
    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "labels": [], "answers": []}
    for n in range(48):
        prompt = {"prompt": f"add {n} and 1"}
        rows["pairs"].append({**prompt, "chosen": f"{n + 1}", "rejected": f"it is {n - 1}"})
        rows["labels"].append({**prompt, "completion": f"{n + n % 3}", "label": n % 3 == 1})
        rows["answers"].append({**prompt, "completion": f"{n + 1}"})
    for name, of_name in rows.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_name))
    return root


def _config(root: Path, recipe: str, file: str, changes: dict[str, Any], **more: Any) -> RunConfig:
    values = {
        "init_from": root / "model",
        "tune.examples.files": f"[{root / file}.jsonl]",
        "train.duration": f"{STEPS}step",
        "train.global_batch_tokens": 768,
        "train.checkpoint.every": "2step",
        "train.eval_every": "2step",
        "train.parallel.threads": 1,
        **{key: str(value).format(root=root) for key, value in changes.items()},
    }
    return config_of(root, recipe, **values, **more)


class Recorded(Hook):
    """Writes the digest of each step's examples to a file; kills its process at a moment: (method, step)."""

    def __init__(self, path: Path, killed: tuple[str, int] | None) -> None:
        self._path, self._killed = path, killed

    def on_start(self, job: Job) -> None:
        batches: Any = job.batches
        place = batches.place

        def recorded(rows: Any) -> Any:
            microbatches = place(rows)
            with self._path.open("a") as file:
                file.write(f"{job.state.step} {_digest(microbatches)}\n")
            return microbatches

        batches.place = recorded

    def on_step(self, job: Job, result: Any) -> None:
        self._kill_at("step", job.state.step)

    def on_checkpoint(self, job: Job, path: str) -> None:
        self._kill_at("checkpoint", step_of(path))

    def _kill_at(self, moment: str, step: int) -> None:
        if self._killed == (moment, step):
            os.kill(os.getpid(), signal.SIGKILL)


def _digest(microbatches: Any) -> str:
    digest = hashlib.sha256()
    for microbatch in microbatches:
        for tensor in (microbatch.inputs, microbatch.targets, microbatch.documents, *microbatch.values.values()):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _train(config: RunConfig, examples: Path, killed: tuple[str, int] | None = None) -> None:
    hooks, tuning = [Recorded(examples, killed)], Tuning()
    assert config.tune is not None
    if config.tune.has_own_loss:
        fit(build(config, make_loss=tuning.loss, evaluation=tuning.evaluation, hooks=hooks))
    else:
        fit(build(config, evaluation=heldout_hook, hooks=hooks))


def _results(run: Path, examples: Path) -> dict[str, Any]:
    """All that a run leaves but times: examples and metrics of each step, the best steps, the last checkpoint."""
    metrics = [
        {name: value for name, value in json.loads(line).items() if not name.startswith(TIMES)}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    path = run / "checkpoints" / folder_name(STEPS)
    files = {file["name"]: file["xxh3"] for file in json.loads((path / "manifest.json").read_text())["files"]}
    return {
        "examples": sorted(set(examples.read_text().splitlines())),
        "metrics": [row for row in metrics if len(row) > 1],
        "best steps": [(event["step"], event["value"]) for event in events if event["event"] == "checkpoint_best"],
        "best": (run / "checkpoints/best").read_text(),
        "state": {key: value for key, value in manifest.read_state(path).items() if not key.endswith("_s")},
        # the tensors of the only rank: weights, moments, values of the loss
        "tensors": [digest for name, digest in files.items() if name.endswith(".safetensors")],
    }


@pytest.mark.sample(1)
@pytest.mark.slow  # processes
@pytest.mark.parametrize(
    ("recipe", "file", "changes", "killed"),
    [
        pytest.param(
            "dpo", "pairs", {"tune.preference.reference": "live", "adapter.quantize": "nf4"}, ("step", 5),
            id="dpo, qlora, nf4",
        ),
        pytest.param("dpo", "pairs", {"tune.preference.reference": "live"}, ("step", 5), id="dpo, live reference"),
        pytest.param("dpo", "pairs", {}, ("checkpoint", 4), id="dpo, cached reference"),
        pytest.param("dpo", "labels", {"tune.preference.loss": "kto"}, ("step", 5), id="kto"),
        pytest.param("reward", "pairs", {}, ("step", 5), id="reward model"),
        pytest.param("reward", "pairs", {"adapter.rank": 4}, ("checkpoint", 4), id="reward model, lora"),
        pytest.param(
            "instruct", "answers", {"tune.distill.teacher": "{root}/runs/tiny"}, ("step", 3), id="distillation"
        ),
        pytest.param("lora", "answers", {}, ("checkpoint", 6), id="lora"),
        pytest.param("qlora", "answers", {"adapter.quantize": "int8"}, ("step", 1), id="qlora, int8"),
        pytest.param(
            "instruct", "answers", {"data.tokenizer": "{root}/more", "model.vocab_size": 340}, ("step", 5),
            id="larger vocabulary",
        ),
    ],
)  # fmt: skip
def test_a_killed_run_is_resumed_to_the_bit(
    recipe: str, file: str, changes: dict[str, Any], killed: tuple[str, int], root: Path, tmp_path: Path
) -> None:
    whole, parts = (_config(root, recipe, file, changes, folder=tmp_path / name) for name in ("whole", "parts"))
    _train(whole, tmp_path / "whole.txt")
    assert exit_code(_train, parts, tmp_path / "parts.txt", killed) == -signal.SIGKILL
    assert exit_code(_train, parts, tmp_path / "parts.txt") == 0
    expected = _results(tmp_path / "whole", tmp_path / "whole.txt")
    assert len(expected["examples"]) == STEPS
    results = _results(tmp_path / "parts", tmp_path / "parts.txt")
    for part, value in expected.items():
        assert results[part] == value, part


def _prepare(root: Path, prepared: Path, killed_in: str) -> None:
    def kill(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    write = prepare.write_examples
    if killed_in == "reference":
        reference._padded = kill
    else:  # the first split is written, the second is not
        prepare.write_examples = lambda folder, *rest: (write if folder.name == "train" else kill)(folder, *rest)  # type: ignore[attr-defined]
    _config(root, "dpo", "pairs", {"tune.prepared": prepared, "tune.examples.max_tokens": 300})


@pytest.mark.exhaustive  # processes
@pytest.mark.parametrize("killed_in", ["reference", "writing"])
def test_a_kill_while_the_reference_is_cached_leaves_nothing(killed_in: str, root: Path, tmp_path: Path) -> None:
    assert exit_code(_prepare, root, tmp_path, killed_in) == -signal.SIGKILL
    assert [path.name[0] for path in tmp_path.iterdir()] == ["."]  # hidden, and removed by the next command
    digests = []
    for prepared in (tmp_path, tmp_path / "other"):
        source = _config(root, "dpo", "pairs", {"tune.prepared": prepared}).data.sources["examples"].path
        digests.append(ExamplesRecord.load(source).digest)
    assert digests[0] == digests[1]
    assert not list(tmp_path.glob(".*.tmp"))
