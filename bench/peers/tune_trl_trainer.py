"""TRL's ``SFTTrainer``, with peft for LoRA, one step at a time; started by bench/tune_trl.py.

``form`` of the job: ``rows`` (rows that are packed already), ``packed`` (packing=True) or ``padded`` (no packing).
"""

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from train_turns import Turns
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

CHATML = """\
{{- bos_token }}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content + "<|im_end|>" }}{%- endgeneration %}
    {%- else %}{{- message.content + "<|im_end|>" }}{%- endif %}
    {{- "\\n" }}
{%- endfor %}"""
"""The template of the chats, with the marks that ``assistant_only_loss`` needs."""


class CountingTrainer(SFTTrainer):
    """Counts the tokens of each step and sums its loss, which Trainer's log rounds."""

    turns: Turns

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """One microbatch; its loss is divided by the tokens of the whole step."""
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        loss_tokens = int((inputs["labels"][:, 1:] != -100).sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.turns.loss += float(loss)
        self.turns.counts["tokens"] += tokens
        self.turns.counts["loss_tokens"] += loss_tokens
        return loss


class TakeTurns(TrainerCallback):
    """Waits for the parent before each step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first batch of the step has been read."""
        self._turns.boundary()
        self._turns.loss, self._turns.counts = 0.0, {"tokens": 0, "loss_tokens": 0}


def arguments(job: dict[str, Any]) -> SFTConfig:
    """Return TRL's settings for the form of the job."""
    by_row = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": job["rows_a_step"]}
    form = {
        "rows": {**by_row, "padding_free": True, "max_length": None},
        "packed": {**by_row, "packing": True, "max_length": job["seq_len"], "assistant_only_loss": True},
        "padded": {
            "per_device_train_batch_size": job["microbatch_chats"],
            "gradient_accumulation_steps": job["microbatches"],
            "max_length": job["seq_len"],
            "assistant_only_loss": True,
        },
    }[job["form"]]
    if job["form"] == "rows":
        form |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "train_sampling_strategy": "sequential"}
    return SFTConfig(
        output_dir=str(Path(job["folder"]) / "run"),
        max_steps=1_000_000,
        learning_rate=job["lr"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=job["clip_norm"],
        lr_scheduler_type="constant",
        bf16=job["precision"] == "bf16",
        gradient_checkpointing=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        **form,
    )


def dataset(job: dict[str, Any]) -> Dataset:
    """Return the packed rows, or the chats as messages."""
    if job["form"] == "rows":
        return Dataset.from_list(json.loads(Path(job["rows"]).read_text()))
    chats = [json.loads(line) for line in Path(job["chats"]).read_text().splitlines()]
    roles = {"prompt": "user", "completion": "assistant"}
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": chat[key]} for key, role in roles.items()]} for chat in chats]
    )


def main() -> None:
    """Train as a user does."""
    turns = Turns()
    job = turns.job
    frozen_bf16 = job["method"] == "lora" and job["precision"] == "bf16"
    model: Any = AutoModelForCausalLM.from_pretrained(
        job["base"], dtype=torch.bfloat16 if frozen_bf16 else torch.float32, attn_implementation="sdpa"
    )
    if job["method"] == "lora":
        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    tokenizer.chat_template = CHATML
    CountingTrainer.turns = turns
    trainer = CountingTrainer(
        model,
        arguments(job),
        train_dataset=dataset(job),
        processing_class=tokenizer,
        callbacks=[TakeTurns(turns)],
    )
    path = Path(job["folder"]) / "chats.json"
    if job["form"] == "padded":
        rows = trainer.train_dataset
        path.write_text(json.dumps(list(zip(rows["input_ids"], rows["labels"], strict=True))))
    turns.ready(chats=str(path))
    trainer.train()


if __name__ == "__main__":
    main()
