"""lm-eval-harness's ``local-completions`` on a task of ours gets the score that we compute in process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from server_process import start_server
from tiny_runs import tiny_run

from smalti.config.eval import EvalConfig
from smalti.distributed.checkpoint.export import export
from smalti.evals.likelihood import Window, score, score_greedy
from smalti.evals.tasks import ranked
from smalti.serve.engine.engine import Engine

TASK = """
task: smalti_arithmetic
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.mark.exhaustive
def test_the_score_is_ours(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, context=160)
    export(run)
    config = EvalConfig(tasks=("arithmetic",), n=24, shots=2)
    engine = Engine.from_folder(run / "export")
    task = ranked.generated_task("arithmetic", engine, config, 159)
    ours = task.result(score_greedy(engine.model, task.windows))
    data = tmp_path / "items.jsonl"
    long = {"index": 999, "prompt": "x" + "7" * 300, "choices": ["1", "2"], "gold": 0}  # its head is cut off
    data.write_text("".join(json.dumps(sample) + "\n" for sample in [*ours.samples, long]))
    (tmp_path / "task").mkdir()
    (tmp_path / "task/arithmetic.yaml").write_text(TASK.format(data=data))
    with start_server(run, "--max-rows", "16") as server:
        arguments = (
            f"model=tiny,base_url={server.url}/v1/completions,tokenizer={run / 'export'},tokenizer_backend=huggingface,"
            "tokenized_requests=False,max_length=159,num_concurrent=8"
        )
        command = [sys.executable, "-W", "ignore", "-m", "lm_eval", "--model", "local-completions"]
        command += ["--model_args", arguments, "--tasks", "smalti_arithmetic", "--include_path", str(tmp_path / "task")]
        command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **offline})
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    theirs = {row["doc"]["index"]: row for row in map(json.loads, samples.read_text().splitlines())}
    cut = theirs.pop(long["index"])
    assert len(theirs) == 24
    assert sum(row["acc"] for row in theirs.values()) / 24 == ours.score["value"]
    rows = [np.array([engine.begin_id, *engine.tokenizer.encode(long["prompt"] + one)[-158:]]) for one in "12"]
    nats = score(engine.model, [Window(row, len(row) - 1) for row in rows])
    assert [float(answer[0][0]) for answer in cut["resps"]] == pytest.approx([-float(one) for one in nats], abs=1e-3)
    for sample in ours.samples:
        found = [float(answer[0][0]) for answer in theirs[sample["index"]]["resps"]]
        assert found == pytest.approx(_whole_candidates(engine, sample["prompt"], sample["choices"]), abs=1e-3)
        # Ours leaves out the tokens that all candidates of an item share; to the ranking they are nothing.
        shared = found[0] - sample["log_likelihoods"][0]
        assert [value - shared for value in found] == pytest.approx(sample["log_likelihoods"], abs=1e-3)


def _whole_candidates(engine: Engine, prompt: str, candidates: list[str]) -> list[float]:
    """Log-likelihood of each candidate from its first token on, by the scorer of ``smalti eval``."""
    first = 1 + len(engine.tokenizer.encode(prompt))
    rows = [np.array([engine.begin_id, *engine.tokenizer.encode(prompt + one)]) for one in candidates]
    return [-float(nats) for nats in score(engine.model, [Window(row, first) for row in rows])]
