"""Run folders, checkpoints and token files that an earlier commit wrote (tests/fixtures) are read by today's code."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_in_process import run_cli

from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.data.stream.inputs import check_inputs
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.data.tokens import Manifest, TokenSource
from smalti.distributed.group import world
from smalti.evals.in_loop import heldout_hook
from smalti.model.huggingface import load_folder
from smalti.track.run import RunFolder
from smalti.train import Hook, build, fit
from smalti.train.loop import Job
from smalti.train.step import StepResult

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RTOL = 1e-4
SAVED_STEP = {"dense": 5, "moe": 8}
TEXT = "a small model learns these few words and the code of a loop, for i in range(n): total += row[i] * n"
"""Documents are drawn from its words (make_runs.py)."""

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tarfile.open(FIXTURES / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # where the relative paths of the configs begin
    yield tmp_path
    world.leave()  # a job that is built in this process joins a group of one rank


class Losses(Hook):
    def __init__(self) -> None:
        self.loss: dict[int, float] = {}

    def on_step(self, job: Job, result: StepResult) -> None:
        self.loss[job.state.step] = float(result.loss)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_an_earlier_run_resumes_with_the_losses_that_its_own_code_gave(root: Path, name: str) -> None:
    """dense: two ranks' shards, concat. moe: best-fit, forked at step 5. Both are resumed here on one rank."""
    expected = {int(step): loss for step, loss in json.loads((root / "expected.json").read_text())[name].items()}
    before = {row["step"]: row["loss/train/total"] for row in _loss_rows(root, name)}
    assert before == {step: loss for step, loss in expected.items() if step <= SAVED_STEP[name]}
    losses = Losses()
    result = fit(build(load(RunConfig, f"runs/{name}", ["train.parallel.ranks=1"]).config, hooks=[losses],
                       evaluation=heldout_hook))  # fmt: skip
    assert result.step == 12
    assert losses.loss == pytest.approx({s: v for s, v in expected.items() if s > SAVED_STEP[name]}, rel=RTOL)
    after = {row["step"]: row["loss/train/total"] for row in _loss_rows(root, name)}
    assert after == pytest.approx(expected, rel=RTOL)
    events = RunFolder.read(f"runs/{name}").events()
    assert [event["step"] for event in events if event["event"] == "resumed"][-1] == SAVED_STEP[name]
    assert RunFolder.read(f"runs/{name}").status()["state"] == "done"


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_an_earlier_run_is_listed_reported_and_exported(root: Path, name: str) -> None:
    listed = run_cli(root, "runs", "ls", "--json")
    assert {run["name"]: run["step"] for run in json.loads(listed.stdout)} == SAVED_STEP
    done = run_cli(root, "runs", "report", f"runs/{name}")
    assert done.returncode == 0, done.stderr
    report = (root / "runs" / name / "report.html").read_text()
    assert "df012cc" in report
    assert f"{_loss_rows(root, name)[-1]['loss/train/total']:.3f}" in report
    assert ("forked" in report) == (name == "moe")
    done = run_cli(root, "export", f"runs/{name}")
    assert done.returncode == 0, done.stderr
    exported = load_folder(root / "runs" / name / "export")
    assert exported.config.hidden_size == 8
    assert load_tokenizer(root / "runs" / name / "export").vocab_size <= exported.config.vocab_size


def test_earlier_token_files_and_their_packing_index_are_read(root: Path) -> None:
    tokenizer = load_tokenizer(root / "data/tokenizer")
    for name, n_tokens, n_documents in (("code", 2607, 80), ("prose", 3071, 100), ("heldout", 337, 12)):
        assert Manifest.load(root / "data" / name).n_tokens == n_tokens
        source = TokenSource(str(root / "data" / name))
        source.check_files()
        ids = source.read(0, n_tokens)
        ends = np.flatnonzero(ids == tokenizer.eod_id)
        assert (len(ids), len(ends)) == (n_tokens, n_documents)
        for document in np.split(ids, ends)[:-1]:
            assert set(tokenizer.decode(document.tolist()).split()) <= set(TEXT.split())
    inputs = check_inputs(load(RunConfig, "runs/moe").config)
    assert set(inputs.sources) == {"code", "prose"}


def _loss_rows(root: Path, name: str) -> list[dict[str, float]]:
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss/train/total" in row]
