"""A dense model and MoEs at equal training FLOPs, each at its own best learning rate.

    make bench NAME=experts ARGS='--record --picture'   all of it; prints its time at the start, many hours on two cores
    make bench NAME=experts ARGS=--quick                a test in under a minute; its figures mean nothing
    make bench NAME=experts ARGS=--show                 the tables of what is finished; runs nothing
    make bench NAME=experts ARGS='--recorded --record --picture'    of the recorded runs, whatever is missing

Every kind tries a grid of learning rates for 1M tokens, extended where the best is at an edge; its two best rates are
tried for 4M tokens, and the best of dense and of 4 of 16 trains for 16M. Rates are compared with the first seed; the
best of a length gets all seeds (the longest at least six), and a rate that diverges is never the best. Runs have the
same width, depth, batch, schedule and data: less than one epoch of Debian's packages. Active parameters are equal: an
expert is as wide as the dense MLP divided by the number of active experts. The FLOPs of the router are compensated by
fewer steps.

The same command resumes a stopped study. With ``--record`` it keeps its finished runs in
bench/results/experts_runs.json until the study is whole, and continues from those of another machine, with the same
versions of the packages. The longest runs keep their checkpoints. ``experts_study/`` has its parts.
"""

import argparse
import fcntl
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experts_study import corpus, figures, runs
from experts_study.order import all_runs
from experts_study.settings import MOE, QUICK, Place, Run, Size
from record import RESULTS, RecordOption, commit_of, machine, record

from smalti.base.chart import standalone

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "concepts" / "pictures"
UNFINISHED = RESULTS / "experts_runs.json"
"""Runs of a study that is not finished."""


def study_of(options: argparse.Namespace, folder: Path) -> tuple[runs.Study, dict[str, Any]]:
    """Return the study, with its data prepared, and the description of the data."""
    size = QUICK if options.quick else Size()
    unfinished = json.loads(UNFINISHED.read_text())["figures"] if UNFINISHED.exists() else {}
    recorded, versions = unfinished.get("runs", {}), {p["name"]: p["version"] for p in unfinished.get("packages", [])}
    try:
        if options.recorded:
            figures_then = json.loads((RESULTS / "experts.json").read_text())["figures"]
            tokens, data = folder, figures_then["data"]
            recorded = {
                Run(row["kind"], row["steps"], row["lr"], row["seed"]).name: row for row in figures_then["runs"]
            }
        else:
            tokens, data = corpus.read(folder, size) if options.show else corpus.prepare(folder, size, versions)
    except corpus.NoData as error:
        sys.exit(str(error))
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    study = runs.Study(
        size=size,
        seeds=2 if options.quick else options.seeds,
        grid_seeds=min(options.grid_seeds, options.seeds),
        place=Place(folder / "runs", tokens, device),
        data={
            f"{name}/{split}": row["digest"] for name, rows in data["sources"].items() for split, row in rows.items()
        },
        code=runs.code_digest(),
        commit=commit_of(ROOT),
        machine=str(machine()["gpu" if device == "cuda" else "processor"]),
        recorded=recorded,
        only_recorded=options.recorded,
    )
    return study, data


def execute(
    study: runs.Study, packages: list[dict[str, str]], jobs: int, keep: bool
) -> tuple[dict[runs.Run, runs.Result], dict[str, dict[str, float]]]:
    """Run what is missing; return the results and the measured speeds. Exits with 1 if runs failed."""
    speed = runs.speeds(study)
    with runs.pool(jobs) as executor:
        forecast = runs.Forecast(study, speed)
        results = study.results()
        if others := len(study.recorded) - sum(name in study.recorded for name in runs.by_name(study, results)):
            report(f"{others} recorded runs are of other data, settings or code, and are not used")
            if keep:
                report(f"hint: they would be replaced; rename {UNFINISHED.relative_to(ROOT)}, or leave out --record")
                sys.exit(2)
        every = all_runs(runs.scores(results), study.size, study.seeds, study.grid_seeds)
        hours = forecast.seconds([run for run in every if run not in results]) / 3600
        report(f"{len(every)} runs, {len(results)} finished; {hours:.1f} core-hours left, {hours / jobs:.1f} h in all")

        def record_unfinished(finished: dict[runs.Run, runs.Result]) -> None:
            if keep:
                record(UNFINISHED.stem, {"packages": packages, "runs": runs.by_name(study, finished)})

        results = runs.run_all(study, executor, jobs, forecast, report, record_unfinished)
    if runs.next_runs(runs.scores(results), study.size, study.seeds, study.grid_seeds):
        sys.exit("runs failed, see above; the same command tries them again")
    return results, speed


def report(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def lock(folder: Path) -> None:
    """Hold the folder until the process ends. Exits with 2 where another study runs in it."""
    try:
        fcntl.flock(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report(f"another study runs in {folder}\nhint: wait for it, or give another --folder")
        sys.exit(2)


def shown(study: runs.Study) -> tuple[dict[runs.Run, runs.Result], dict[str, dict[str, float]]]:
    """Return the finished results and the measured speeds. Exits with 1 if there are none."""
    results = study.results()
    if not results:
        sys.exit(f"no run of this code and these settings is finished in {study.place.folder}")
    return results, runs.stored_speeds(study)


def commits_of(results: dict[runs.Run, runs.Result]) -> list[str]:
    """Return the commits of the runs. Exits with 1 where a run is of code in no commit."""
    commits = sorted({commit for result in results.values() for commit in result["commits"]})
    if strange := [commit for commit in commits if commit == "unknown" or commit.endswith("-dirty")]:
        sys.exit(f"not recorded: runs come from changed checkouts: {', '.join(strange)}\nhint: delete their results")
    return commits


def figures_of(study: runs.Study, data: dict[str, Any], results: dict[runs.Run, runs.Result]) -> dict[str, Any]:
    """Return what is recorded; ``arms`` are the kinds at the longest length."""
    lengths = figures.summary(study, results)
    return {
        "size": asdict(study.size),
        "moe": MOE,
        "seeds": study.seeds,
        "grid_seeds": study.grid_seeds,
        "data": data,
        "commits": commits_of(results),
        "machines": sorted({result["machine"] for result in results.values()}),
        "arms": lengths[max(lengths, key=int)],
        "lengths": lengths,
        "grid": figures.grid(study, results),
        "gains": figures.gains(study, results),
        "runs": runs.as_rows(results),
    }


def main() -> None:
    """Run the study and print its tables; ``--record`` also writes bench/results/experts.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny models on the installed Python, two seeds")
    parser.add_argument("--seeds", type=int, default=3, choices=range(2, 11), metavar="2..10")
    parser.add_argument("--grid-seeds", type=int, default=1, choices=range(1, 11), metavar="1..10",
                        help="runs of each learning rate, by which the best is chosen")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="runs at one time, a core each; a GPU takes several")
    parser.add_argument("--folder", default=str(ROOT / "build" / "bench-experts"), help="where data and runs are kept")
    parser.add_argument("--show", action="store_true", help="only print the tables of the finished runs")
    parser.add_argument("--recorded", action="store_true", help="use the runs of bench/results/experts.json, "
                        "whatever the data and code here")  # fmt: skip
    parser.add_argument("--record", action=RecordOption, help="write bench/results/experts.json")
    parser.add_argument("--picture", action="store_true", help=f"write {PICTURES.relative_to(ROOT)}/experts-*.svg")
    options = parser.parse_args()
    folder = Path(options.folder)
    if options.quick and (options.record or options.picture):
        parser.error("--record and --picture replace the study's results: leave out --quick")
    if options.show and options.record:
        parser.error("--record needs all runs: leave out --show")
    if options.recorded and (options.quick or options.show):
        parser.error("--recorded shows the runs of bench/results/experts.json: leave out --quick and --show")
    if not (options.show or options.recorded):
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
    study, data = study_of(options, folder)
    if options.recorded or options.show:
        results, speed = shown(study)
    else:
        results, speed = execute(study, data["packages"], options.jobs, options.record)
    if (
        options.picture
        and not options.recorded
        and runs.next_runs(runs.scores(results), study.size, study.seeds, study.grid_seeds)
    ):
        parser.error("--picture needs all runs, and some are missing: leave out --show")
    figures.show(study, results, speed)
    if options.picture:
        PICTURES.mkdir(exist_ok=True)
        for name, svg in figures.pictures(study, results).items():
            (PICTURES / name).write_text(standalone(svg) + "\n")
            print("wrote", PICTURES / name)
    if options.record:
        result = figures_of(study, data, results) | {"speed": speed}
        print(f"the runs come from {len(result['commits'])} commits")
        print("wrote", record("experts", result))
        if not options.recorded:
            UNFINISHED.unlink(missing_ok=True)  # its runs are in the result


if __name__ == "__main__":
    main()
