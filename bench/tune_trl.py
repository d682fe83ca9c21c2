"""Supervised tuning on the CPU: packed tuning and LoRA by Smalti beside TRL and peft, on the same chats.

    make bench NAME=tune_trl ARGS='--record'       # about 30 minutes; the peers are installed on first use

The chats ask for functions of the installed Python's library; the answers are in the loss. Both sides start from the
same weights (a random Llama; for LoRA also the same adapter of rank 16 on all matrices) and use the same template,
AdamW with the same settings, clipping and a constant rate; both are eager, their default on a CPU, and recompute
nothing. Each runs its own loop in its own process; they take turns of a step and wait on a pipe in between. TRL has
three forms:

- ``rows``: the rows that Smalti packs, in their order, as TRL's packing gives them, so both see the same batches: the
  losses of every step must be equal, else the script fails;
- ``packed``: packing=True (best fit) from the same chats. In both forms a microbatch is one row: TRL joins the rows of
  a microbatch, and without FlashAttention scores all of their tokens against each other, so two rows take longer;
- ``padded``: without packing, in microbatches of 8 chats (TRL's default), as many as give about the same tokens.

Tokens/s count tokens of chats, never padding. For every chat both must have the same tokens and the same of them in the
loss. bf16 is autocast over fp32 weights in TRL, over frozen bf16 weights for LoRA (as here).
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from paired import Ratio, ratio_of
from peers import python_of
from record import RecordOption, record
from train_cpu import SHAPES, Shape

from smalti.cli.working_directory import load_run
from smalti.config.adapter import AdapterConfig
from smalti.config.run import RunConfig
from smalti.cost.params import count
from smalti.data.examples.folder import ExamplesRecord
from smalti.data.examples.source import ExampleSource
from smalti.data.stream.stream import Stream
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.patterns import EOD
from smalti.data.tokenizer.train import train_bpe
from smalti.model.adapters import peft
from smalti.model.adapters.adapter import Adapter, names_of
from smalti.model.adapters.lora import draw
from smalti.model.decoder import Decoder
from smalti.model.huggingface import save_folder
from smalti.model.init import init_weights

HERE = Path(__file__).resolve().parent
CONTENDERS = ("smalti", "rows", "packed", "padded")
SETTINGS = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "clip_norm": 1.0}
SPECIALS = (EOD, "<|im_start|>", "<|im_end|>")
WARM_STEPS, MICROBATCH_CHATS, TEMPLATE_TOKENS, CHATS = 2, 8, 24, 1000
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
ADAPTER = AdapterConfig(rank=16, alpha=32.0)


@dataclass
class Contender:
    """One trainer in its own process."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    steps: list[dict[str, float]] = field(default_factory=list)
    """Of each step: seconds, processor_s, loss, tokens, loss_tokens."""

    def answer(self) -> dict[str, Any]:
        """Return the next message that the process writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def step(self) -> None:
        """Run one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.steps.append(self.answer())

    def seconds_per_token(self, clock: str, tokens: str = "tokens") -> list[float]:
        """Return the time of a token in each step after the warm-up."""
        return [step[clock] / step[tokens] for step in self.steps[WARM_STEPS:]]


# ---- model, chats and rows ------------------------------------------------------------------------------------------


def functions() -> Iterator[tuple[str, str]]:
    """Yield (what to write, the code) of the documented functions of the installed Python's library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)) and len(node.body) > 1:
                signature = f"{node.name}({ast.unparse(node.args)})"
                node.body = node.body[1:]
                yield f"Write the Python function {signature} of {path.stem}.\n\n{text}", ast.unparse(node)


def write_base(place: Path, shape: Shape) -> None:
    """Write a random model with its tokenizer, an adapter of it, and chats that fit into a row."""
    chats = list(dict.fromkeys(functions()))
    Random(17).shuffle(chats)
    tokenizer = Tokenizer(
        train_bpe([part for chat in chats for part in chat], shape.model["vocab_size"], SPECIALS), EOD
    )
    names = ("prompt", "completion")
    short = (chat for chat in chats if len(tokenizer.encode("".join(chat))) + TEMPLATE_TOKENS <= shape.tokens)
    lines = [json.dumps(dict(zip(names, chat, strict=True))) + "\n" for chat in islice(short, CHATS)]
    (place / "chats.jsonl").write_text("".join(lines))
    model = Decoder(shape.config)
    init_weights(model, shape.config, seed=17)
    save_folder(place / "base", shape.config, model.state_dict(), eod_id=tokenizer.eod_id, dtype=torch.float32)
    tokenizer.save(place / "base")
    pairs = {}
    for layer, names in ADAPTER.paths(shape.config).items():
        for weight in (f"blocks.{layer}.{name}.weight" for name in names):
            outputs, inputs = model.get_parameter(weight).shape
            of_a, of_b = names_of(weight)
            pairs[weight] = (draw(of_a, (ADAPTER.rank, inputs), 17), draw(of_b, (outputs, ADAPTER.rank), 17))
    (place / "adapter").mkdir()
    peft.save(place / "adapter", Adapter(ADAPTER.scale, pairs), shape.config, ADAPTER, str(place / "base"))


def write_recipe(place: Path, shape: Shape, method: str, precision: str, options: argparse.Namespace) -> Path:
    """Write the recipe of ``smalti tune sft``."""
    adapter = {"rank": ADAPTER.rank, "alpha": ADAPTER.alpha, "init_from": str(place / "adapter")}
    recipe = {
        "name": f"{method}-{precision}",
        "folder": str(place / f"run-{method}-{precision}"),
        "init_from": str(place / "base"),
        "tune": {
            "examples": {"files": [str(place / "chats.jsonl")], "template": "chatml", "heldout_frac": 0.0},
            "prepared": str(place / "prepared"),
        },
        "train": {
            "duration": f"{WARM_STEPS + options.turns}step",
            "global_batch_tokens": shape.sequences * shape.tokens,
            "optimizer": SETTINGS | {"weight_decay": 0.0},
            "schedule": {"warmup": "0step", "decay": "0step"},
            "precision": {"compute": precision},
            "parallel": {"threads": options.threads, "device": "cpu"},
        },
        "track": {"console": False},
        **({"adapter": adapter} if method == "lora" else {}),
    }
    path = place / f"{method}-{precision}.yaml"
    path.write_text(json.dumps(recipe))
    return path


def packed_rows(config: RunConfig) -> list[list[dict[str, list[int]]]]:
    """Return the rows of each step as TRL's packing writes them: whole sequences, without the padding."""
    length = config.length
    stream = Stream(config.data, seed=config.seed, length=length, microbatch_tokens=config.train.global_batch_tokens)
    steps = []
    for step in range(length.total_steps):
        (batch,) = stream.batch(step)
        assert batch.joints is not None
        rows = []
        for row in range(len(batch.tokens)):
            joints = sorted(batch.joints.column[batch.joints.row == row].tolist())
            packed: dict[str, list[int]] = {"input_ids": [], "labels": [], "seq_lengths": []}
            for begin, end in zip(joints, [*joints[1:], batch.seq_len], strict=True):
                labels = [-100, *batch.targets[row, begin:end].tolist()]
                if max(labels) >= 0:  # else it is the padding
                    packed["input_ids"] += [
                        int(batch.inputs[row, begin]),
                        *batch.tokens[row, begin + 1 : end + 1].tolist(),
                    ]
                    packed["labels"] += labels
                    packed["seq_lengths"].append(len(labels))
            rows.append(packed)
        steps.append(rows)
    return steps


def labelled_chats(config: RunConfig) -> list[tuple[list[int], list[int]]]:
    """Return (ids, labels) of every chat as Smalti has tokenized it."""
    folder = config.data.sources["examples"].path
    source = ExampleSource(folder, ExamplesRecord.load(folder))
    ids, in_loss = np.asarray(source.array("tokens"), dtype=np.int64), np.asarray(source.array("in_loss"))
    ends = source.array("ends")[:-1]
    labels = np.where(in_loss, ids, -100)
    return [(a.tolist(), b.tolist()) for a, b in zip(np.split(ids, ends), np.split(labels, ends), strict=True)]


# ---- the contest ----------------------------------------------------------------------------------------------------


def start(name: str, job: dict[str, Any], python: Path, place: Path) -> Contender:
    """Start a contender."""
    folder = place / f"{job['method']}-{job['precision']}-{name}"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps({**job, "form": name, "folder": str(folder)}))
    child = HERE / "peers" / ("tune_smalti.py" if name == "smalti" else "tune_trl_trainer.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(python), "-W", "ignore", str(child), str(folder / "job.json")],
            env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    return Contender(name, process, folder / "log")


def contest(place: Path, shape: Shape, method: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one table: start all contenders, run them by turns, and check that they compute the same."""
    recipe = write_recipe(place, shape, method, precision, options)
    config = load_run(str(recipe), []).config
    steps, chats = packed_rows(config), labelled_chats(config)
    mean_tokens = statistics.mean(len(ids) for ids, _ in chats)
    in_rows = statistics.mean(sum(len(row["input_ids"]) for row in rows) for rows in steps)
    (place / "rows.json").write_text(json.dumps([row for rows in steps for row in rows]))
    job = {
        **SETTINGS, "method": method, "precision": precision, "threads": options.threads, "recipe": str(recipe),
        "base": str(place / "base"), "tokenizer": config.data.tokenizer, "adapter": str(place / "adapter"),
        "chats": str(place / "chats.jsonl"), "rows": str(place / "rows.json"), "seq_len": shape.tokens,
        "rows_a_step": shape.sequences, "microbatch_chats": MICROBATCH_CHATS,
        "microbatches": max(1, round(in_rows / mean_tokens / MICROBATCH_CHATS)),
    }  # fmt: skip
    contenders: list[Contender] = []
    try:
        for name in CONTENDERS:
            python = Path(sys.executable) if name == "smalti" else python_of("tune")
            contenders.append(start(name, job, python, place))
        ready = {contender.name: contender.answer() for contender in contenders}
        same_masks(chats, json.loads(Path(ready["padded"]["chats"]).read_text()))
        for turn in range(WARM_STEPS + options.turns):
            for contender in contenders if turn % 2 else reversed(contenders):
                contender.step()
    finally:
        for contender in contenders:
            contender.process.kill()
            contender.process.wait()
    ours, same = contenders[0], contenders[1]
    for step, of_same in zip(ours.steps, same.steps, strict=True):
        step |= {key: of_same[key] for key in ("tokens", "loss_tokens")}
    apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours.steps, same.steps, strict=True))
    if not apart < LOSS_TOLERANCE[precision]:
        curves = [[round(step["loss"], 4) for step in contender.steps] for contender in (ours, same)]
        raise RuntimeError(f"{method} {precision}: losses of a step differ by {apart:.2e}: {curves}")
    return summary(contenders, apart)


def same_masks(ours: Sequence[tuple[list[int], list[int]]], theirs: Sequence[Sequence[list[int]]]) -> None:
    """Raise RuntimeError unless every chat has the same tokens, and the same of them in the loss."""
    mine, other = (sorted((list(ids), list(labels)) for ids, labels in chats) for chats in (ours, theirs))
    if mine != other:
        pair = next(([a, b] for a, b in zip(mine, other, strict=False) if a != b), None)
        raise RuntimeError(f"{len(mine)} chats here, {len(other)} in TRL; the first that differ (ids, labels): {pair}")


# ---- figures --------------------------------------------------------------------------------------------------------


def summary(contenders: list[Contender], apart: float) -> dict[str, Any]:
    """Return the figures that are printed and recorded."""
    ours, rates = contenders[0], {}
    ratios: dict[str, Any] = {}
    for contender in contenders:
        kinds = {"tokens_per_s": "tokens", "loss_tokens_per_s": "loss_tokens"}
        per_token = {name: contender.seconds_per_token("seconds", kind) for name, kind in kinds.items()}
        rates[contender.name] = {name: 1 / statistics.median(seconds) for name, seconds in per_token.items()}
        if contender is ours:
            continue
        for name, clock, tokens in (
            ("tokens", "seconds", "tokens"),
            ("tokens in the loss", "seconds", "loss_tokens"),
            ("tokens, processor time", "processor_s", "tokens"),
        ):
            slow, fast = (each.seconds_per_token(clock, tokens) for each in (contender, ours))
            ratio = ratio_of(slow, fast, names=(f"trl {contender.name}", "smalti"))
            ratios.setdefault(contender.name, {})[name] = ratio.figures()
    return {
        "contenders": rates,
        "ratios": ratios,
        "loss_first": ours.steps[0]["loss"],
        "loss_last": ours.steps[-1]["loss"],
        "largest_difference_of_a_loss": apart,
        "tokens_a_step": statistics.mean(step["tokens"] for step in ours.steps),
        "loss_frac": sum(step["loss_tokens"] for step in ours.steps) / sum(step["tokens"] for step in ours.steps),
        "steps": len(ours.steps),
    }


def report(key: str, figures: dict[str, Any]) -> None:
    """Print one table."""
    print(
        f"\n{key}: {figures['steps']} steps of {figures['tokens_a_step']:,.0f} tokens, {figures['loss_frac']:.0%} in "
        f"the loss; loss {figures['loss_first']:.4f} -> {figures['loss_last']:.4f}, on the same rows at most "
        f"{figures['largest_difference_of_a_loss']:.1e} from TRL's\n"
    )
    for name, row in figures["contenders"].items():
        print(f"  {name:8} {row['tokens_per_s']:8,.0f} tokens/s, {row['loss_tokens_per_s']:8,.0f} in the loss")
    for of_peer in figures["ratios"].values():
        for name, ratio in of_peer.items():
            print(f"  {name:24} {Ratio(**ratio)}")
    sys.stdout.flush()


def main() -> None:
    """Print a table for each method and precision; ``--record`` also writes bench/results/tune_trl.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of bench/train_cpu.py; default: small, 23.2M")
    parser.add_argument("--method", choices=("full", "lora"), action="append", help="default: both")
    parser.add_argument("--precision", choices=("fp32", "bf16"), action="append", help="default: both")
    parser.add_argument("--turns", type=int, default=21, help="steps of each contender after two of warm-up")
    parser.add_argument("--threads", type=int, default=2, help="of each contender")
    parser.add_argument("--quick", action="store_true", help="LoRA of a small model in fp32, 3 turns: about a minute")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/tune_trl.json")
    options = parser.parse_args()
    if options.quick:
        if options.record:
            parser.error("--quick measures too little for --record")
        options.shape, options.method, options.precision, options.turns = "demo", ["lora"], ["fp32"], 3
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    print(
        f"{options.shape}: {count(shape.config).total / 1e6:.1f}M parameters, rows of {shape.tokens} tokens, "
        f"{shape.sequences} a step; {options.threads} thread(s) each",
        flush=True,
    )
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tune-trl-") as place:
        write_base(Path(place), shape)
        for method in options.method or ("full", "lora"):
            for precision in options.precision or ("fp32", "bf16"):
                key = f"{options.shape} {method} {precision}"
                figures[key] = contest(Path(place), shape, method, precision, options)
                report(key, figures[key])
    if options.record:
        print("wrote", record("tune_trl", {"threads": options.threads, "tables": figures}))


if __name__ == "__main__":
    main()
