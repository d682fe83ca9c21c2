"""Training on one GPU: the microbatch that a run finds, its memory and speed beside the plan, and transformers' Llama.

    make gpu                                     # with the tests that need a GPU
    python bench/train_gpu.py --device cuda --record --case llama-3-1b

A case is a preset in bf16 over fp32 weights, packed rows of 2,048 tokens, AdamW, compiled blocks, one rank. The job is
that of ``smalti train`` over token files of random tokens: it chooses its microbatch by the plan and tries it, an
attempt that runs out of memory is followed by one at half. Then four steps run with
``torch.cuda.set_sync_debug_mode("error")``: nothing in them waits for the device. Printed: tokens/s, MFU of the
device's published peak (``cost/flops.py``), the most bytes of live tensors and what the plan said of them, the time of
a step and what the plan said of it.

The peer is transformers' model of the same shape with torch.compile, SDPA, autocast to bf16 and the same fused AdamW,
its plain loss on all logits, rows that are not packed; with the microbatch of ``--peer-tokens``, and ours once more
with that. Each runs in a process of its own, one after the other, ``--rounds`` times.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from paired import ratio_of
from record import RecordOption, record

SEQ_LEN, WARM_STEPS, STEPS, MICROBATCHES = 2048, 2, 4, 2
CASES = {"llama-3-1b": 2**17, "moe-1b": 2**17, "llama-2-7b": 2**14, "mpt-125m": 2**18}
"""Preset -> tokens of a batch."""
NEEDED_BYTES = {"llama-2-7b": 120e9}
"""Of the device; with AdamW in fp32 a parameter takes 16 bytes."""
PEER = "llama-3-1b"


def main() -> None:
    """Print a table; ``--record`` also writes bench/results/train_gpu.json (with ``--name``, another)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda",), default="cuda")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all that the device can hold")
    parser.add_argument("--peer-tokens", type=int, default=8192, help="of the peer's microbatch; 0: no peer")
    parser.add_argument("--rounds", type=int, default=1, help="of ours and the peer's")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/NAME.json")
    parser.add_argument("--name", default="train_gpu", help="of the result")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job = json.loads(options.child)
        print(json.dumps(peer(job) if job["peer"] else ours(job)), flush=True)
        return
    figures: dict[str, Any] = {}
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    for case in options.case or CASES:
        if memory_bytes < NEEDED_BYTES.get(case, 0):
            print(f"{case}: left out, it needs a device of {NEEDED_BYTES[case] / 1e9:.0f} GB")
            continue
        figures[case] = started(case)
        show(case, figures[case])
        if options.peer_tokens and case == PEER:
            figures["peer"] = contest(options.peer_tokens, options.rounds)
        if options.record:
            print("wrote", record(options.name, figures), flush=True)


def started(case: str, tokens: int | None = None, *, peer: bool = False) -> dict[str, Any]:
    """Run one child, again with half the microbatch if it runs out of memory before step 1, as the agent does."""
    with tempfile.TemporaryDirectory(prefix="train-gpu-") as folder:
        job = {"case": case, "tokens": tokens, "folder": folder, "peer": peer}
        attempts = 0
        while True:
            attempts += 1
            command = [sys.executable, "-W", "ignore", __file__, "--child", json.dumps(job)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return {**json.loads(done.stdout.splitlines()[-1]), "attempts": attempts}
            if "OutOfMemory" not in done.stderr or attempts == 4 or peer:
                raise RuntimeError(f"{job} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def show(case: str, figures: dict[str, Any]) -> None:
    """Print the lines of a case."""
    print(
        f"{case}: {figures['microbatch_tokens']:,} tokens at a time (by {figures['microbatch_by']}, attempt "
        f"{figures['attempts']}), {figures['tokens_per_s']:,.0f} tokens/s, MFU {figures['mfu_frac']:.1%}\n"
        f"  live {figures['peak_bytes'] / 1e9:.2f} GB, planned {figures['planned_bytes'] / 1e9:.2f} GB "
        f"({figures['planned_bytes'] / figures['peak_bytes']:.3f}); held by the allocator "
        f"{figures['reserved_bytes'] / 1e9:.2f} GB\n"
        f"  step {figures['step_s']:.3f} s, planned {figures['planned_step_s']:.3f} s "
        f"({figures['planned_step_s'] / figures['step_s']:.2f}); the host is done after {figures['host_s']:.3f} s; "
        f"nothing waited for the device",
        flush=True,
    )


def contest(tokens: int, rounds: int) -> dict[str, Any]:
    """Run Smalti and the peer by turns, on equal microbatches."""
    mine, theirs = [], []
    for _ in range(rounds):
        theirs.append(started(PEER, tokens, peer=True))
        mine.append(started(PEER, tokens))
    names = ("transformers", "smalti")
    seconds = [[step_s for run in runs for step_s in run["steps_s"]] for runs in (theirs, mine)]
    ratio = ratio_of(seconds[0], seconds[1], names=names)
    memory = theirs[0]["peak_bytes"] / mine[0]["peak_bytes"]
    print(f"{PEER}, {tokens:,} tokens at a time: {ratio}; memory {memory:.2f}x")
    return {"tokens": tokens, "ratio": ratio.figures(), "memory_ratio": memory, "smalti": mine, "transformers": theirs}


# ---- children -------------------------------------------------------------------------------------------------------


def ours(job: dict[str, Any]) -> dict[str, Any]:
    """Build the job of the trainer, and time its steps."""
    from smalti.config.hardware import hardware_of_driver
    from smalti.cost.axes import layout_of
    from smalti.cost.layout.predict import predict
    from smalti.cost.memory.per_rank import memory_per_rank
    from smalti.train.job import build
    from smalti.train.step import train_step

    config = config_of(job)
    began = time.perf_counter()
    built = build(config)
    build_s, microbatch = time.perf_counter() - began, built.microbatch_tokens
    events = [json.loads(line) for line in (Path(job["folder"]) / "run" / "events.jsonl").read_text().splitlines()]
    chosen = next(event for event in reversed(events) if event["event"] == "auto_resolved")
    batches = [built.batches.batch(step) for step in range(3)]
    for batch in batches[:WARM_STEPS]:
        train_step(built.state, batch, built.loss)
    torch.cuda.reset_peak_memory_stats()
    took, host_s = [], []
    torch.cuda.synchronize()
    for step in range(STEPS):
        began = time.perf_counter()
        torch.cuda.set_sync_debug_mode("error")
        train_step(built.state, batches[step % 3], built.loss)
        torch.cuda.set_sync_debug_mode("default")
        host_s.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    tokens = sum(part.inputs.numel() for part in batches[0])
    layout, device = layout_of(config, 1), hardware_of_driver(torch.cuda.get_device_name())
    assert device is not None
    planned = memory_per_rank(config, layout=layout, microbatch_tokens=microbatch, device="cuda")
    step_s = float(np.median(took))
    return {
        "microbatch_tokens": microbatch, "microbatch_by": chosen.get("microbatch_by", "config"), "build_s": build_s,
        "step_tokens": tokens, "step_s": step_s, "host_s": float(np.median(host_s)), "steps_s": took,
        "tokens_per_s": tokens / step_s, "mfu_frac": mfu_of(config, tokens / step_s, device),
        "peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved(),
        "planned_bytes": planned.tensors_bytes, "planned_total_bytes": planned.total_bytes,
        "planned_step_s": predict(config, device, layout, microbatch).step_s,
    }  # fmt: skip


def mfu_of(config: Any, tokens_per_s: float, device: Any) -> float:
    """Return the fraction of the published peak in bf16."""
    from smalti.cost.flops import mfu, train_flops_per_token

    return mfu(tokens_per_s, train_flops_per_token(config.model, SEQ_LEN), device.peak("bf16"))


def config_of(job: dict[str, Any]) -> Any:
    """Write token files, and return the config of a run over them."""
    from smalti.config.load import from_dict
    from smalti.config.run import RunConfig
    from smalti.data.tokens.writer import TokenWriter

    folder, fixed = Path(job["folder"]), job["tokens"]
    tree = {
        "name": "bench", "folder": str(folder / "run"), "model": {"preset": job["case"]},
        "data": {"sources": {"made": str(folder / "tokens")}, "seq_len": SEQ_LEN, "stages": [{"weights": {"made": 1}}],
                 "mask_documents": True},
        "train": {
            "duration": "1000step", "global_batch_tokens": MICROBATCHES * fixed if fixed else CASES[job["case"]],
            "microbatch_tokens": fixed or "auto", "optimizer": {"lr": 3e-4}, "schedule": {"warmup": "10step"},
            "parallel": {"ranks": 1, "device": "cuda"},
        },
        "track": {"console": False, "system_every_s": 0},
    }  # fmt: skip
    config = from_dict(RunConfig, tree, "bench").config
    if not (folder / "tokens").exists():
        random = np.random.default_rng(0)
        with TokenWriter(
            folder / "tokens", vocab_size=config.model.vocab_size, eod_id=0, tokenizer_digest="a" * 64
        ) as writer:
            for _ in range(3000):
                length = int(random.integers(50, 2000))
                writer.add(random.integers(1, config.model.vocab_size, length), n_text_bytes=4 * length)
    return config


def peer(job: dict[str, Any]) -> dict[str, Any]:
    """transformers' Llama of the same shape, compiled, as its users train it without a trainer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = config_of(job)
    shape = config.model
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
            rope_theta=shape.rope_theta, attn_implementation="sdpa", use_cache=False,
        )
    ).cuda()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    compiled = torch.compile(model)
    rows = torch.randint(shape.vocab_size, (MICROBATCHES, job["tokens"] // SEQ_LEN, SEQ_LEN), device="cuda")
    took = []
    for step in range(WARM_STEPS + STEPS):
        if step == WARM_STEPS:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for ids in rows:
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled(input_ids=ids, labels=ids).loss
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    step_s = float(np.median(took[WARM_STEPS:]))
    return {
        "step_s": step_s,
        "steps_s": took[WARM_STEPS:],
        "tokens_per_s": rows.numel() / step_s,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    main()
