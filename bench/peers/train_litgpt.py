"""litgpt's own pretraining loop (``litgpt.pretrain.fit``), one step at a time; started by bench/train_cpu.py.

``main`` follows ``litgpt.pretrain.main`` line by line, but for the weights, which are given, compile, which is a
choice here, and AdamW, which is fused here and there on CUDA only.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.loggers.logger import Logger
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.model import GPT
from litgpt.pretrain import fit
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from train_turns import Turns


class Rows(IterableDataset):
    """Batches [sequences, tokens + 1] as litgpt's data modules give them; the last token of a row is not counted."""

    def __init__(self, turns: Turns, *, takes_turns: bool) -> None:
        self._turns = turns
        self._takes_turns = takes_turns

    def __iter__(self) -> Iterator[torch.Tensor]:
        step = 0
        while True:
            if self._takes_turns:
                self._turns.boundary()
            yield torch.nn.functional.pad(self._turns.batch(step), (0, 1), value=-100)
            step += 1


class LossOnly(Logger):
    """Hands the logged loss to the parent."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    name = property(lambda self: "loss")
    version = property(lambda self: 0)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Called by litgpt after each step."""
        self._turns.loss = float(metrics["loss"])

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Not used."""


def config_of(folder: Path, tokens: int) -> Config:
    """litgpt's config of a Llama in a Hugging Face folder."""
    theirs = json.loads((folder / "config.json").read_text())
    return Config(
        name="bench",
        block_size=tokens,
        vocab_size=theirs["vocab_size"],
        padded_vocab_size=theirs["vocab_size"],
        n_layer=theirs["num_hidden_layers"],
        n_head=theirs["num_attention_heads"],
        n_query_groups=theirs["num_key_value_heads"],
        n_embd=theirs["hidden_size"],
        intermediate_size=theirs["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=int(theirs["rope_parameters"]["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=theirs["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )


def main() -> None:
    """Pretrain as ``litgpt pretrain`` does."""
    turns = Turns()
    job, (_, sequences, tokens) = turns.job, turns.rows.shape
    folder = Path(job["model"])
    fabric = L.Fabric(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if job["precision"] == "bf16" else "32-true",
        loggers=[LossOnly(turns)],
    )
    fabric.launch()
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config_of(folder, tokens), {}, weights, load_file(folder / "model.safetensors"))
    model: Any = GPT(config_of(folder, tokens))
    model.load_state_dict(weights)
    turns.logits(model)
    named = list(model.named_parameters())
    if job["compile"]:
        model = torch.compile(model)
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(turns.adamw(named))
    loaders = [
        torch.utils.data.DataLoader(Rows(turns, takes_turns=takes_turns), batch_size=None)
        for takes_turns in (True, False)
    ]
    train_loader, check_loader = fabric.setup_dataloaders(*loaders)
    state = {"model": model, "optimizer": optimizer, "train_dataloader": train_loader, "iter_num": 0, "step_count": 0}
    train = TrainArgs(
        save_interval=None,
        log_interval=1,
        global_batch_size=sequences,
        micro_batch_size=sequences,
        max_tokens=10**12,
        max_norm=job["clip_norm"],
        min_lr=job["lr"],
        lr_warmup_steps=0,
    )
    fit(
        fabric=fabric,
        devices=1,
        state=state,
        train_dataloader=train_loader,
        val_dataloader=check_loader,
        out_dir=Path(job["folder"]),
        tokenizer_dir=None,
        train=train,
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
    )


if __name__ == "__main__":
    main()
