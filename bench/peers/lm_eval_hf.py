"""lm-evaluation-harness's `hf` backend on pairs of context and continuation; runs in the environment lm-eval.

    python bench/peers/lm_eval_hf.py job.json

job.json: ``folder`` of the model, ``max_length``, ``threads``, ``softmax_dtype`` (None: as the logits). Each line of
input is a JSON object: ``pairs`` and ``answers`` (paths of JSON lists) and ``batch_size``. It scores the pairs, writes
[log-likelihood, is greedy] of each, and prints ``{"seconds": [time, processor time]}``, of tokenising and scoring. With
``tasks`` (task configs in lm-eval's format) and ``results`` (a path) it also writes what lm-eval reports of these
tasks, whose requests must be among the pairs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def reported(
    model: HFLM, tasks: list[dict[str, Any]], scores: dict[tuple[str, str], tuple[float, bool]]
) -> dict[str, dict[str, Any]]:
    """Return lm-eval's results of tasks. Raises KeyError for a request that is not among the scored pairs."""
    model.loglikelihood = lambda requests, **_: [scores[request.args] for request in requests]
    evaluation = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, log_samples=False)
    return {
        name: {key: value for key, value in of_task.items() if key.startswith("acc")}
        for name, of_task in evaluation["results"].items()
    }


def main() -> None:
    """Score once for each line of input."""
    job = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what lm-eval prints
    torch.set_num_threads(job["threads"])
    model = HFLM(
        pretrained=job["folder"],
        device="cpu",
        dtype="float32",
        batch_size=1,
        max_length=job["max_length"],
        softmax_dtype=job["softmax_dtype"],
    )
    for line in sys.stdin:
        turn = json.loads(line)
        pairs = [(context, text) for context, text in json.loads(Path(turn["pairs"]).read_text())]
        model.batch_size_per_gpu = turn["batch_size"]
        requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
        begin_s = time.perf_counter(), time.process_time()
        scores = model.loglikelihood(requests, disable_tqdm=True)
        seconds = time.perf_counter() - begin_s[0], time.process_time() - begin_s[1]
        Path(turn["answers"]).write_text(json.dumps(scores))
        if "tasks" in turn:
            Path(turn["results"]).write_text(
                json.dumps(reported(model, turn["tasks"], dict(zip(pairs, scores, strict=True))))
            )
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
