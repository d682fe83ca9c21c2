"""Scoring items by likelihood: smalti's pass beside lm-evaluation-harness's `hf` backend, on the same items and model.

Both get the strings of the prompts, tokenise them and return a log-likelihood for every option; the two are compared.
They take turns; a ratio compares two runs of one round. lm-eval runs in a process of its own, which only waits while
the other works; its batch size is the fastest of three. Processor times matter on a machine that others use. The model
has random weights, the tokenizer is trained on the items' texts.

    make bench NAME=eval_throughput                        ten tasks of ../shared/gauntlet, about 3 minutes
    make bench NAME=eval_throughput ARGS='--data DIR --task arc_easy --limit 20 --rounds 3'
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import ratio_of
from peers import python_of
from record import RecordOption, record

from smalti.config.model import ModelConfig
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.train import train_bpe
from smalti.evals.gauntlet.files import path_of
from smalti.evals.gauntlet.table import BY_NAME
from smalti.evals.likelihood import score_greedy
from smalti.evals.tasks.items import read_items
from smalti.evals.tasks.prompts import Prompt, make_prompts
from smalti.evals.tasks.windows import option_windows
from smalti.model.decoder import Decoder
from smalti.model.huggingface import Companions, LanguageModel, save
from smalti.model.init import init_weights
from smalti.serve.engine.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
TASKS = (
    *("arc_easy", "arc_challenge", "piqa", "copa", "openbook_qa", "boolq", "commonsense_qa", "winogrande"),
    *("lambada_openai", "bigbench_operators"),
)
SEQ_LEN = 2048
BATCH_SIZES = (4, 16, 64)


def _llama(vocab: int, width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = dict(zip(names, (vocab, width, inner, layers, heads), strict=True))
    return {"family": "llama", "max_position_embeddings": SEQ_LEN, **sizes}


SHAPES = {"demo": _llama(4096, 128, 384, 3, 4), "small": _llama(16384, 384, 1024, 6, 6)}
"""As in bench/train_cpu.py."""


Times = tuple[float, float]
"""Seconds, and processor seconds."""


class Peer:
    """lm-eval in its own process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        job = {"folder": str(folder), "max_length": SEQ_LEN, "softmax_dtype": None, "threads": torch.get_num_threads()}
        (folder / "job.json").write_text(json.dumps(job))
        command = [python_of("lm-eval"), ROOT / "bench/peers/lm_eval_hf.py", folder / "job.json"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )

    def score(self, pairs: list[tuple[str, str]], batch_size: int) -> tuple[Times, np.ndarray]:
        """Score pairs of context and continuation; return the time that it took and the log-likelihoods."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        turn = {"pairs": str(self.folder / "pairs.json"), "answers": str(self.folder / "answers.json")}
        Path(turn["pairs"]).write_text(json.dumps(pairs))
        self.process.stdin.write(json.dumps(turn | {"batch_size": batch_size}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"lm-eval ended: {(self.folder / 'log.txt').read_text()[-3000:]}")
        answers = json.loads(Path(turn["answers"]).read_text())
        seconds, processor_s = json.loads(line)["seconds"]
        return (seconds, processor_s), np.array([answer[0] for answer in answers])


def prompts_of(name: str, data: str, limit: int) -> list[Prompt]:
    """Return the prompts of a task."""
    path = path_of(BY_NAME[name], data)
    if path is None:
        raise SystemExit(f"{data} has no file of {name}; name the folder of the Gauntlet's files: --data DIR")
    task = BY_NAME[name].task(path)
    return make_prompts(task, read_items(task), mode="fixed", limit=limit)


def prepare(folder: Path, shape: dict[str, Any], prompts: dict[str, list[Prompt]]) -> Engine:
    """Write a model with random weights and its tokenizer into a folder, and load it."""
    texts = [prompt.text + text for of_task in prompts.values() for prompt in of_task for text in prompt.continuations]
    tokenizer = Tokenizer(train_bpe(texts, shape["vocab_size"]), EOD)
    config = ModelConfig.model_validate(shape)
    model = Decoder(config)
    init_weights(model, config, 1)
    save(LanguageModel(model, Companions.of_documents(tokenizer.eod_id)), folder)
    tokenizer.save(folder)
    return Engine.from_folder(folder, device="cpu")


def measure(name: str, prompts: list[Prompt], engine: Engine, peer: Peer, rounds: int) -> dict[str, Any]:
    """Run both by turns on a task; print and return items per second and the ratio of times."""
    pairs = [
        (EOD + prompt.head + context, text)
        for prompt in prompts
        for context in prompt.contexts
        for text in prompt.continuations
    ]

    def ours() -> tuple[Times, np.ndarray]:
        begin_s = time.perf_counter(), time.process_time()
        windows = [window for prompt in prompts for window in option_windows(engine, prompt, SEQ_LEN, "fixed")[0]]
        nats = score_greedy(engine.model, windows).nats
        return (time.perf_counter() - begin_s[0], time.process_time() - begin_s[1]), -nats

    batch_size = min(BATCH_SIZES, key=lambda size: peer.score(pairs, size)[0][1])
    contenders = {"smalti": ours, "lm-eval": partial(peer.score, pairs, batch_size)}
    times: dict[str, list[Times]] = {side: [] for side in contenders}
    scores = {side: run()[1] for side, run in contenders.items()}
    for turn in range(rounds):
        for side in reversed(contenders) if turn % 2 else contenders:
            times[side].append(contenders[side]()[0])
    difference = float((np.abs(scores["smalti"] - scores["lm-eval"]) / np.maximum(1, -scores["smalti"])).max())
    if difference > 1e-5:
        raise RuntimeError(f"{name}: log-likelihoods are {difference} apart")
    figures: dict[str, Any] = {"items": len(prompts), "requests": len(pairs), "batch_size_of_lm_eval": batch_size}
    figures["largest_relative_difference"] = difference
    for index, clock in enumerate(("time", "processor time")):
        theirs, mine = ([spent[index] for spent in times[side]] for side in ("lm-eval", "smalti"))
        ratio = ratio_of(theirs, mine, names=("lm-eval", "smalti"))
        figures[clock] = {"items_per_s": len(prompts) / ratio.fast_s, **ratio.figures()}
        print(f"{name:20} {clock:15} {len(prompts) / ratio.fast_s:7.1f} items/s  {ratio}", flush=True)
    return figures


def main() -> None:
    """Print a line for each task; ``--record`` also writes bench/results/eval_throughput.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(ROOT.parent / "shared/gauntlet"), help="folder of the Gauntlet's files")
    parser.add_argument("--task", action="append", choices=TASKS, help="default: all ten")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--limit", type=int, default=16, help="items of each task")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each; one thread makes processor times comparable")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/eval_throughput.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = {name: prompts_of(name, options.data, options.limit) for name in options.task or TASKS}
    with tempfile.TemporaryDirectory() as folder:
        engine = prepare(Path(folder), SHAPES[options.shape], prompts)
        peer = Peer(Path(folder))
        try:
            figures = {name: measure(name, of_task, engine, peer, options.rounds) for name, of_task in prompts.items()}
        finally:
            peer.process.communicate()
    if options.record:
        print("wrote", record("eval_throughput", {options.shape: {"threads": options.threads, "tasks": figures}}))


if __name__ == "__main__":
    main()
