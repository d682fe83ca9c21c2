"""The table of measured figures in README.md, from bench/results; the rest of that page is written by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- measured: written by `make docs` from bench/results -->\n", "<!-- end of measured -->\n"


def page() -> str:
    """README.md with its table written anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "".join(_rows()) + END + rest.partition(END)[2]


def _rows() -> Iterator[str]:
    yield "| what | figure | on |\n|---|---|---|\n"
    for name, text, link in (
        ("train_gpu", _training, "concepts/train/benchmarks-gpu.md"),
        ("moe-gpu", _experts, "concepts/train/benchmarks-gpu.md"),
        ("experts", _study, "concepts/model/experts-study.md"),
        ("meshes", _meshes, "concepts/distributed/meshes.md"),
        ("same_curve", _curve, "concepts/data/stream.md"),
        ("stream_elastic", _elastic, "decisions/0010-past-and-future-of-a-run.md"),
        ("stream_start", _start, "concepts/data/benchmarks.md"),
        ("stream", _stream, "concepts/data/benchmarks.md"),
        ("parity-logits", _parity, "concepts/model/families.md"),
        ("engine", _engine, "concepts/serve/serving.md"),
    ):
        result = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        what, figure = text(result["figures"])
        machine = result["machine"]
        device = machine["gpu"] or f"{machine['cores']} cores, {machine['processor']}"
        device = ", ".join(result["figures"].get("machines", [device]))  # where the runs were elsewhere
        yield f"| [{what}](docs/{link}) | {figure} | {device}, {result['date'][:10]} |\n"


def _training(figures: dict[str, Any]) -> tuple[str, str]:
    shown = [
        f"{name} {case['tokens_per_s']:,.0f} tokens/s, MFU {case['mfu_frac']:.1%}"
        for name, case in figures.items()
        if "mfu_frac" in case
    ]
    return "training on one GPU, BF16, AdamW, compiled", "; ".join(shown)


def _experts(figures: dict[str, Any]) -> tuple[str, str]:
    shown = [f"{case['ratio']:.2f} times the speed of {case['slow']}" for case in figures.values()]
    return "a layer of 16 experts against that of transformers, forward and backward", "; ".join(shown)


def _study(figures: dict[str, Any]) -> tuple[str, str]:
    row = figures["arms"]["4 of 16"]
    longest = max(run["steps"] for run in figures["runs"])
    ends = {(run["kind"], run["seed"]): run["bits_per_byte"][-1] for run in figures["runs"] if run["steps"] == longest}
    gains = [ends["dense", seed] - end for (kind, seed), end in ends.items() if kind == "4 of 16"]
    return (
        f"4 of 16 experts beside a dense model at equal training FLOPs, {row['tokens'] / 1e6:.1f}M tokens, "
        f"{row['seeds']} seeds",
        f"{row['less_than_dense']:.3f} ± {row['less_than_dense_half']:.3f} held-out bits per byte below dense; the "
        f"seeds {min(gains):.2f} to {max(gains):.2f}",
    )


def _meshes(figures: dict[str, Any]) -> tuple[str, str]:
    rows = [row for name, cases in figures.items() if name != "proofs" for row in cases if row["model"] == "dense"]
    worst = max(row["loss"] for row in rows)
    ranks, n_meshes = sorted({row["ranks"] for row in rows}), len({row["mesh"] for row in rows})
    return (
        f"{n_meshes} meshes of {ranks[0]} to {ranks[-1]} ranks against one process, dense, fp32",
        f"loss of any of 20 steps at most {worst:.1e} apart",
    )


def _curve(figures: dict[str, Any]) -> tuple[str, str]:
    worst = max(figures["largest_difference"].values())
    return "one loss curve on 1, 2, 3, 4, 6 and 8 ranks", f"{figures['steps']} steps, at most {worst:.1e} apart"


def _elastic(figures: dict[str, Any]) -> tuple[str, str]:
    return (
        "runs killed and resumed on other numbers of ranks",
        f"{figures['cases']} runs, {figures['kills']} kills: {figures['different']} with another order of tokens",
    )


def _start(figures: dict[str, Any]) -> tuple[str, str]:
    return (
        f"start two thirds through {figures['tokens'] / 1e12:.0f} trillion tokens",
        f"{figures['smalti']['first_s']:.2g} s from the process to the first microbatch",
    )


def _stream(figures: dict[str, Any]) -> tuple[str, str]:
    row = figures["table"]["tokens/s, u16 batches"]
    return (
        "reading the stream, one process",
        f"{row['smalti']['median'] / 1e6:.0f}M tokens/s, {row['mosaic']['ours_better']['ratio']:.2g} times "
        "mosaicml-streaming",
    )


def _parity(figures: dict[str, Any]) -> tuple[str, str]:
    errors = [
        error
        for kind, by_family in figures["relative_error"].items()
        if kind != "bfloat16"
        for error in by_family.values()
    ]
    families = len(figures["relative_error"]["rows"])
    return f"logits of {families} families against transformers, fp32", f"relative error at most {max(errors):.1e}"


def _engine(figures: dict[str, Any]) -> tuple[str, str]:
    ratio = figures["small fp32 rows 16: one by one"]["ratio"]
    return "16 concurrent requests against one at a time (3M parameters)", f"{ratio:.1f} times the tokens/s"
