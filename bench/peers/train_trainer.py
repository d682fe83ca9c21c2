"""Hugging Face ``Trainer`` on the exported model, one step at a time; started by bench/train_cpu.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from train_turns import Turns
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Rows(IterableDataset):
    """The benchmark's rows one by one, as a causal model takes them: the labels are the inputs."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        step = 0
        while True:
            for row in self._turns.batch(step):
                yield {"input_ids": row, "labels": row}
            step += 1


class TakeTurns(TrainerCallback):
    """Waits for the parent before each step; the loss is what Trainer logs."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The batch has been read."""
        self._turns.boundary()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After the step."""
        self._turns.loss = float(logs.get("loss", self._turns.loss))


def main() -> None:
    """Train as a user does; only the optimizer is handed in, so that all contenders decay the same parameters."""
    turns = Turns()
    job = turns.job
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    turns.logits(lambda ids: model(input_ids=ids).logits)
    arguments = TrainingArguments(
        output_dir=job["folder"],
        max_steps=1_000_000,
        per_device_train_batch_size=turns.rows.shape[1],
        bf16=job["precision"] == "bf16",
        max_grad_norm=job["clip_norm"],
        lr_scheduler_type="constant",
        torch_compile=job["compile"],
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        remove_unused_columns=False,
    )
    optimizer = turns.adamw(model.named_parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    callbacks: list[Any] = [TakeTurns(turns)]
    Trainer(model, arguments, train_dataset=Rows(turns), optimizers=(optimizer, constant), callbacks=callbacks).train()


if __name__ == "__main__":
    main()
