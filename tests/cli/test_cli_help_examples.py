"""Every example of a help page is run as it stands there, in a folder where the demo has been at a tiny size."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from forked_command import fork_ranks
from synthetic_library import synthetic_library

from smalti.cli.main import run as smalti

NOT_RUN = {
    "smalti demo --minutes 1": "takes minutes; tests/cli/test_cli_demo.py and CI run it",
    "smalti runs send runs/demo 'track.sinks=[mlflow]'": "needs a server; tests/track/test_track_mlflow.py starts one",
    "smalti runs checkpoints rm runs/demo 150 300 --dry-run": "the tiny run has one; test_cli_runs_checkpoints.py",
    "smalti serve runs/demo --port 8000": "does not end; tests/serve start it",
    "smalti eval data llm-foundry/scripts/eval/local_data --check": "needs Gauntlet files; test_evals_gauntlet.py",
    "smalti tune compare instruct --ways prompt,lora,full 'tune.examples.files=[answers.jsonl]'": "tests/cli/tune do",
    "smalti tune preference dpo init_from=runs/instruct/export 'tune.examples.files=[pairs.jsonl]'": "tests/tune do",
    "smalti tune reward reward init_from=runs/instruct/export 'tune.examples.files=[pairs.jsonl]'": "the same",
    "smalti data classifier train --good data/good --bad data/bad --output quality.npz": "test_quality_classifier.py",
    "smalti data why crawl/page-1.html data/web": "needs a set of pages; tests/cli/data",
    "smalti data diff data/web-1 data/web-2": "needs two sets; tests/cli/data",
    "smalti data compare data/web-1 data/web-2 --tokens 2M --yes": "the same",
    "smalti fleet hold --host 0.0.0.0 --port 7390": "does not end; tests/fleet/test_neighbour.py start it",
    "smalti fleet join 10.0.0.1:7400": "needs a run that waits for it; tests/fleet/test_join.py",
    "smalti fleet messages --test": "needs a fleet.yaml with receivers; tests/fleet/messages",
    "smalti eval lint mine.jsonl; smalti eval lint --suite gauntlet data=DIR --json": "the same; test_evals_lint.py",
} | dict.fromkeys(
    (
        "smalti fleet launch demo ranks=2 train.parallel.threads=1 priority=low --yes",
        "smalti fleet show demo-1",
        "smalti fleet logs demo-1",
        "smalti fleet wait demo-1",
        "smalti fleet stop demo-1 --yes",
        "smalti fleet resume demo-1",
        "smalti fleet clone demo-1 name=demo-2 train.optimizer.lr=1e-3",
        "smalti fleet update demo-1 priority=high",
        "smalti fleet events demo-1 --json",
        "smalti fleet secret set HF_TOKEN",
        "smalti fleet secret rm HF_TOKEN --yes",
    ),
    "a run in the background; tests/cli/fleet",
)
"""Examples that are parsed only (tests/repository/test_examples.py), with the reason."""

ANSWERS = {"smalti config diff": {3}, "smalti plan verify": {0, 3}}
"""Examples whose exit code is an answer: the configs differ; a tiny run may be off its plan. All others end with 0."""

TINY = """\
base: demo
name: recipe
model: {vocab_size: 300, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
data: {seq_len: 64}
train:
  duration: 4step
  global_batch_tokens: 128
  eval_every: 2step
  eval_tokens: 128
  checkpoint: {every: 4step}
  parallel: {ranks: 1, device: cpu}
"""


def examples() -> Iterator[str]:
    """The example of every help page."""
    for name, command, _ in reference.leaves():
        found = re.findall(r"Example: (smalti .*)", " ".join((command.epilog or "").split()))
        assert found, f"{name} has no example"
        yield from found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> Path:
    """A folder with documents, tokens, a recipe and three runs, made by the commands themselves."""
    monkeypatch.chdir(tmp_path)
    fork_ranks(monkeypatch)
    synthetic_library(tmp_path / "lib", monkeypatch)
    (tmp_path / "recipe.yaml").write_text(TINY)
    (tmp_path / "pages.yaml").write_text("{name: pages, inputs: lib, output: data/pages}")
    (tmp_path / "capitals.yaml").write_text("{kind: exact, file: capitals.jsonl}")
    (tmp_path / "capitals.jsonl").write_text('{"context": "The capital of France is", "continuation": "Paris"}')
    (tmp_path / "chats.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}')
    for line in (
        "data documents data/demo/raw",
        "data curate demo-curate heldout_frac=0.2",
        "data dedup demo-dedup",
        "data tokenize demo-tokenize vocab_size=300",
        "train recipe.yaml name=demo profile.steps=[1,1]",
        "export runs/demo",
        "eval run runs/demo n=2 shots=1 resamples=20 max_bytes=2000",
    ):
        assert smalti(line.split()) == 0, line
    for name in ("base", "lr-low"):
        shutil.copytree("runs/demo", f"runs/{name}")
        config = Path(f"runs/{name}/config.yaml")
        config.write_text(config.read_text().replace("name: demo", f"name: {name}"))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_every_example_runs_as_it_stands(capfd: pytest.CaptureFixture[str]) -> None:
    failed = []
    for line in examples():
        if line in NOT_RUN:
            continue
        words = shlex.split(line.partition(" > ")[0])[1:]
        capfd.readouterr()
        code = smalti(words)
        wanted = next((codes for start, codes in ANSWERS.items() if line.startswith(start)), {0})
        if code not in wanted:
            failed.append(f"{line}: exit {code}\n{capfd.readouterr().err}")
    assert not failed, "\n\n".join(failed)


def test_what_is_not_run_is_an_example() -> None:
    assert set(examples()) >= set(NOT_RUN)
