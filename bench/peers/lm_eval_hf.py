"""lm-evaluation-harness's `hf` backend on pairs of context and continuation; runs in the environment lm-eval.

    python bench/peers/lm_eval_hf.py job.json

job.json: ``folder`` of the model, ``pairs`` and ``answers`` (paths of JSON lists), ``batch_size``, ``max_length``,
``threads``, ``softmax_dtype`` (None: as the logits). For each line of input it scores all pairs and prints
``{"seconds": s}``; the answers are [log-likelihood, is greedy], of the last time. Loading is not timed, tokenising is.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM


def main() -> None:
    """Score once for each line of input."""
    job = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # lm-eval prints what batch size it found
    torch.set_num_threads(job["threads"])
    model = HFLM(
        pretrained=job["folder"],
        device="cpu",
        dtype="float32",
        batch_size=job["batch_size"],
        max_length=job["max_length"],
        softmax_dtype=job["softmax_dtype"],
    )
    pairs = json.loads(Path(job["pairs"]).read_text())
    requests = [
        Instance("loglikelihood", {}, (context, continuation), index)
        for index, (context, continuation) in enumerate(pairs)
    ]
    for _ in sys.stdin:
        begin_s = time.perf_counter()
        scores = model.loglikelihood(requests, disable_tqdm=True)
        seconds = time.perf_counter() - begin_s
        Path(job["answers"]).write_text(json.dumps(scores))
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
