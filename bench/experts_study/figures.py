"""Figures of the study: tables, intervals, the FLOPs that the dense model needs for an MoE's loss, plots.

Intervals are of Student's t over the seeds, 95 %; a difference is of runs with the same seed.
"""

import itertools
import math
import statistics
from typing import Any

from experts_study.order import best_rate
from experts_study.runs import Result, Study, scores
from experts_study.settings import KINDS, Length, Run, config_of
from smalti.base.chart import Cross, Series, line_chart
from smalti.cost.params import count

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5 % quantile of Student's t by degrees of freedom."""
Results = dict[Run, Result]


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean, and the half width of its 95 % interval; infinite for one value."""
    if len(values) == 1:
        return values[0], math.inf
    half = T_975[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def seeds_of(study: Study, results: Results, length: Length) -> list[int]:
    """Return the seeds of a length: those that it calls for; of recorded runs, those that every kind has finished."""
    seeds = list(range(max(study.seeds, length.min_seeds)))
    if not study.only_recorded:
        return seeds
    rates = {kind: best_rate(scores(results), kind, length, study.grid_seeds) for kind in length.kinds}
    best = [(kind, lr) for kind, lr in rates.items() if lr is not None]
    return [seed for seed in seeds if all(Run(kind, length.steps, lr, seed) in results for kind, lr in best)]


def best_runs(study: Study, results: Results, kind: str, length: Length) -> list[Result]:
    """Return the results of a kind at its best rate, by seed; empty before all seeds are finished."""
    lr = best_rate(scores(results), kind, length, study.grid_seeds)
    seeds = seeds_of(study, results, length)
    runs = [Run(kind, length.steps, lr, seed) for seed in seeds] if lr is not None else []
    return [results[run] | {"lr": lr} for run in runs] if all(run in results for run in runs) else []


def summary(study: Study, results: Results) -> dict[str, dict[str, Any]]:
    """Return for each length, by its tokens, a row for each kind that is finished."""
    lengths = {}
    for length in study.size.lengths:
        rows = {kind: _row(study, results, kind, length) for kind in length.kinds}
        lengths[str(length.steps * study.size.batch_tokens)] = {kind: row for kind, row in rows.items() if row}
    return {tokens: rows for tokens, rows in lengths.items() if rows}


def _row(study: Study, results: Results, kind: str, length: Length) -> dict[str, Any] | None:
    runs = best_runs(study, results, kind, length)
    dense = best_runs(study, results, "dense", length)
    if not runs or not dense:
        return None
    config = config_of(study.place, study.size, Run(kind, length.steps, runs[0]["lr"], 0))
    params, steps = count(config.model), config.length.total_steps
    last = [run["bits_per_byte"][-1] for run in runs]
    mean, half = interval(last)
    less, less_half = interval([run["bits_per_byte"][-1] - loss for run, loss in zip(dense, last, strict=True)])
    row = {
        "lr": runs[0]["lr"],
        "seeds": len(runs),
        "params_total": params.total,
        "params_active": params.active,
        "steps": steps,
        "tokens": steps * study.size.batch_tokens,
        "flops": steps * runs[0]["flops_per_step"],
        "bits_per_byte": mean,
        "bits_per_byte_half": half,
        "less_than_dense": less,
        "less_than_dense_half": less_half,
        "by_source": {name: statistics.mean(run["by_source"][name] for run in runs) for name in runs[0]["by_source"]},
        "tokens_per_s": statistics.mean(run["tokens_per_s"] for run in runs),
        "train_s": statistics.mean(run["train_s"] for run in runs),
    }
    return row | dense_flops(study, results, last, row["flops"])


def dense_flops(study: Study, results: Results, targets: list[float], flops: int) -> dict[str, Any]:
    """Return how many times ``flops`` the dense model needs for the losses ``targets`` (one for each seed).

    For each seed a power law goes through the ends of the dense runs of two neighbouring lengths, those around the
    target or the nearest ones; a length without the seed counts with the mean of its seeds. The
    result is the geometric mean over the seeds, with the interval as a factor, and whether a target was outside the
    lengths. Empty if the dense loss does not fall.
    """
    ends = [best_runs(study, results, "dense", length) for length in study.size.lengths]
    ends = [runs for runs in ends if runs]
    if len(ends) < 2:
        return {}
    logs, outside = [], False
    for seed, target in enumerate(targets):
        points = [(_flops(study, runs[0]), _of_seed([run["bits_per_byte"][-1] for run in runs], seed)) for runs in ends]
        needed = flops_for(points, target)
        if needed is None:
            return {}
        logs.append(math.log(needed / flops))
        outside = outside or not points[-1][1] <= target <= points[0][1]
    mean, half = interval(logs)
    return {
        "dense_flops_ratio": math.exp(mean),
        "dense_flops_ratio_factor": math.exp(half) if half < 700 else math.inf,
        "dense_flops_extrapolated": outside,
    }


def _of_seed(losses: list[float], seed: int) -> float:
    return losses[seed] if seed < len(losses) else statistics.mean(losses)


def flops_for(points: list[tuple[float, float]], target: float) -> float | None:
    """Return the FLOPs at which the power law through two of ``points`` (FLOPs, loss) reaches ``target``.

    None if the loss does not fall between the two.
    """
    pairs = list(itertools.pairwise(points))
    (low, high), (more, less) = next((pair for pair in pairs if pair[1][1] <= target), pairs[-1])
    if less >= high:
        return None
    slope = math.log(more / low) / math.log(less / high)
    return low * (target / high) ** slope


def _flops(study: Study, run: Result) -> float:
    return float(run["eval_steps"][-1] * run["flops_per_step"])


def grid(study: Study, results: Results) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return held-out bits per byte by tokens, kind and rate, the mean of the seeds that choose the rate.

    None where one of them diverged.
    """
    table: dict[str, dict[str, dict[str, float | None]]] = {}
    lengths, losses = {length.steps: length for length in study.size.lengths}, scores(results)
    for run in sorted(results, key=lambda run: (run.steps, list(KINDS).index(run.kind), run.lr)):
        seeds = lengths[run.steps].grid(run.kind, run.lr, study.grid_seeds)
        if all(seed in results for seed in seeds):
            rates = table.setdefault(str(run.steps * study.size.batch_tokens), {}).setdefault(run.kind, {})
            mean = statistics.mean(losses[seed] for seed in seeds)
            rates[f"{run.lr:g}"] = mean if math.isfinite(mean) else None
    return table


def gains(study: Study, results: Results) -> dict[str, dict[str, list[float]]]:
    """Return for each MoE of the last length its gain over dense during training: tokens, bits per byte, half width."""
    curves = {}
    last = study.size.lengths[-1]
    dense = best_runs(study, results, "dense", last)
    for kind in last.kinds[1:]:
        runs = best_runs(study, results, kind, last)
        if dense and runs:
            pairs = [zip(a["bits_per_byte"], b["bits_per_byte"], strict=True) for a, b in zip(dense, runs, strict=True)]
            columns = list(zip(*([x - y for x, y in pair] for pair in pairs), strict=True))
            means = [interval(list(column)) for column in columns]
            tokens = [step * study.size.batch_tokens for step in dense[0]["eval_steps"]]
            curves[kind] = {"tokens": tokens, "gain": [m for m, _ in means], "gain_half": [h for _, h in means]}
    return curves


def show(study: Study, results: Results, speed: dict[str, dict[str, float]]) -> None:
    """Print the tables of the page."""
    for tokens, kinds in grid(study, results).items():
        rates = sorted({float(lr) for row in kinds.values() for lr in row})
        print(f"\nBits per byte by learning rate, the seeds that choose, {int(tokens) / 1e6:.2f}M tokens\n")
        print(_line(["", *(f"{lr:g}" for lr in rates)]))
        print(_line(["---"] * (len(rates) + 1)))
        for kind, row in kinds.items():
            print(_line([kind, *(_loss(row, lr) for lr in rates)]))
    if diverged := [run.name for run, score in scores(results).items() if not math.isfinite(score)]:
        print(f"\nDiverged, so their rates are never the best: {', '.join(diverged)}")
    for tokens, rows in summary(study, results).items():
        seeds = max(row["seeds"] for row in rows.values())
        print(f"\nAt each one's best rate, {int(tokens) / 1e6:.2f}M tokens, {seeds} seeds, 95 % intervals\n")
        heads = "|parameters|active|rate|steps|TFLOP|bits per byte|less than dense|FLOPs of dense for it"
        print(_line(heads.split("|")))
        print(_line(["---"] * 9))
        for kind, row in rows.items():
            print(_line([kind, *_cells(kind, row)]))
    if speed:
        print("\nTime of a FLOP, beside a dense run at the same time")
    for kind, pair in speed.items():
        print(f"{kind}: {pair['time_per_flop']:.2f} times dense")


def _loss(row: dict[str, float | None], lr: float) -> str:
    loss = row.get(f"{lr:g}", math.nan)
    return "diverged" if loss is None else "-" if math.isnan(loss) else f"{loss:.4f}"


def _cells(kind: str, row: dict[str, Any]) -> list[str]:
    less = f"{row['less_than_dense']:.4f} ± {row['less_than_dense_half']:.4f}"
    needed = "-"
    if kind != "dense" and "dense_flops_ratio" in row:
        ratio, factor = row["dense_flops_ratio"], row["dense_flops_ratio_factor"]
        needed = f"{ratio:.2f} ({ratio / factor:.2f} to {ratio * factor:.2f})"
        needed += ", extrapolated" * row["dense_flops_extrapolated"]
    return [
        f"{row['params_total'] / 1e6:.2f}M",
        f"{row['params_active'] / 1e6:.2f}M",
        f"{row['lr']:g}",
        str(row["steps"]),
        f"{row['flops'] / 1e12:.2f}",
        f"{row['bits_per_byte']:.4f} ± {row['bits_per_byte_half']:.4f}",
        less if kind != "dense" else "-",
        needed,
    ]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def pictures(study: Study, results: Results) -> dict[str, str]:
    """Plot bits per byte over tokens and over rates, and the gain over dense over tokens."""
    last = study.size.lengths[-1]
    heldout = []
    for colour, kind in enumerate(KINDS):
        runs = best_runs(study, results, kind, last) if kind in last.kinds else []
        if runs:
            x = [step * study.size.batch_tokens / 1e6 for step in runs[0]["eval_steps"]]
            heldout += [Series(kind, x, run["bits_per_byte"], faint=True, colour=colour) for run in runs]
            columns = zip(*(run["bits_per_byte"] for run in runs), strict=True)
            heldout.append(Series(kind, x, [statistics.mean(column) for column in columns], colour=colour))
    rates = []
    for kind, row in next(iter(grid(study, results).values()), {}).items():
        losses = {float(lr): loss for lr, loss in row.items() if loss is not None}
        rates.append(Series(kind, list(losses), list(losses.values()), colour=list(KINDS).index(kind)))
    seeds = f"mean of {len(seeds_of(study, results, last))} seeds"
    return {
        "experts-heldout.svg": line_chart(
            heldout, title=f"Held-out bits per byte: {seeds}, each thin", x_label="million tokens", log_y=True
        ),
        "experts-gain.svg": _gain_chart(study, results),
        "experts-rates.svg": line_chart(
            rates, title="Held-out bits per byte of the shortest runs", x_label="learning rate", log_x=True
        ),
    }


def _gain_chart(study: Study, results: Results) -> str:
    """Plot the gain at the ends of the lengths with intervals, and during the longest runs."""
    series, crosses = [], []
    lengths = summary(study, results)
    for colour, kind in enumerate(KINDS):
        beside = 1.02**colour  # the intervals of a length are beside each other
        ends = [(int(tokens) / 1e6 * beside, rows[kind]) for tokens, rows in lengths.items() if kind in rows]
        if kind == "dense" or not ends:
            continue
        gain = [row["less_than_dense"] for _, row in ends]
        series.append(Series(kind, [x for x, _ in ends], gain, colour=colour))
        for x, row in ends:
            half = row["less_than_dense_half"]
            label = f"{kind}: {row['less_than_dense']:.4f} ± {half:.4f}"
            inside = (row["less_than_dense"] - half, row["less_than_dense"] + half) if math.isfinite(half) else None
            crosses.append(Cross(x, row["less_than_dense"], label, y_interval=inside, colour=colour))
    for kind, curve in gains(study, results).items():
        millions = [tokens / 1e6 for tokens in curve["tokens"]]
        colour = list(KINDS).index(kind)
        series.append(Series(f"{kind}, during the longest runs", millions, curve["gain"], dashed=True, colour=colour))
    return line_chart(
        series,
        title="Bits per byte less than dense, at equal FLOPs",
        x_label="million tokens",
        log_x=True,
        crosses=crosses,
    )
