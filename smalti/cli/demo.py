"""``smalti demo``: the whole pipeline on an embedded corpus, as the commands that a user would type.

Each stage is a child process that runs exactly the printed command; the demo adds the order, the length of the training
and the table at the end. Ctrl-C and SIGTERM are passed on to the stage, which saves its work; run again, the demo
resumes. No stage outlives the demo.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from smalti.cli.children import run_child
from smalti.cli.train import trials

app = typer.Typer(add_completion=False, rich_markup_mode=None)

RUN = "runs/demo"
TRIAL_STEPS = 24
RAW = "data/demo/raw"
UNIQUE = "data/demo/unique"
PROMPTS = (
    "def read_config(path):\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self",
)


@app.command(epilog="Example: smalti demo --minutes 1")
def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="TRACK.A=VALUE", help="Trackers of the training run.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Approximate length of the training, 0.05 to 600.")] = 2.75,
    gauntlet: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Also run the Gauntlet's tasks that fit the context; DIR has its files."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Then tune the model on synthetic instructions; continues a finished demo.")
    ] = False,
) -> None:
    """Run the whole pipeline on documents of the installed Python: curate, tokenize, train, export, evaluate, generate.

    Works in the current folder (data/demo and runs/demo), on two CPU cores, without network. The training
    takes --minutes, the other stages a few more.
    """
    from smalti.base.clock import now_s
    from smalti.base.errors import UserError
    from smalti.base.units import format_seconds
    from smalti.config.eval import suites
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.evals.tasks.find import find_tasks

    if not 0.05 <= minutes <= 600:
        raise UserError(f"--minutes {minutes} is out of range", allowed="0.05 to 600", hint="smalti demo --minutes 1")
    track = tuple(overrides or ())
    if unknown := [override for override in track if not override.startswith("track.")]:
        raise UserError(
            f"smalti demo takes no {unknown[0]}",
            allowed="changes to track, such as 'track.sinks=[mlflow]'; the rest is fixed",
            hint=f"after the demo: smalti train demo name=mine {unknown[0]}",
        )
    load(RunConfig, "demo", track)  # raises on a wrong override before the first stage
    if gauntlet is not None:
        find_tasks(suites()["gauntlet"].model_copy(update={"data": gauntlet}))  # raises where DIR has none of its files
    start_s = now_s()
    if chat and Path(RUN, "report.html").is_file():  # of the last stage
        _require_no_gauntlet(gauntlet)
        print(f"{RUN} is finished and used as it is")
    else:
        _pretrain(minutes, track, gauntlet)
        print(_summary(now_s() - start_s))
    if chat:
        from smalti.cli.demo_chat import tune

        tune(RUN, track, stage)
    else:
        print(_next_steps())
    typer.echo(f"done in {format_seconds(now_s() - start_s)}", err=True)


def _require_no_gauntlet(gauntlet: str | None) -> None:
    from smalti.base.errors import UserError

    if gauntlet is not None:
        raise UserError(
            f"--gauntlet has no effect with --chat, as {RUN} is finished",
            hint=f"smalti eval run {RUN} --suite gauntlet data={gauntlet}",
        )


def _pretrain(minutes: float, track: tuple[str, ...], gauntlet: str | None) -> None:
    """Run the stages from documents to the report."""
    stage("Documents: library sources and documentation of the installed Python", "data", "documents", RAW)
    stage("Curate: normalise, quality rules, exact dedup, held-out split", "data", "curate", "demo-curate")
    stage("Dedup: drop near-duplicates, and training documents near a held-out one", "data", "dedup", "demo-dedup")
    stage("Tokenize: train a byte-level BPE, write token files", "data", "tokenize", "demo-tokenize")
    duration, rate = _duration(minutes)
    stage("Plan: the cost of this run", "plan", "time", "demo", *duration, *rate)
    title = "Train: a small Llama on two ranks; rank 1 is killed on purpose, and the run continues by itself"
    stage(title, "train", "demo", *duration, *_kill(duration), *track)
    stage("Export: a Hugging Face folder, compared with transformers", "export", RUN, *_verify())
    stage("Evaluate: bits per byte against gzip and xz, two tasks", "eval", "run", RUN)
    if gauntlet is not None:
        suite = ("--suite", "gauntlet", f"data={gauntlet}", "limit=100", "cut_prompts=false")
        stage("Evaluate: the Gauntlet", "eval", "run", RUN, *suite)
    for prompt in PROMPTS:
        options = ("--max-tokens", "96", "--temperature", "0.7", "--save")
        stage("Generate", "chat", RUN, "--prompt", prompt, *options)
    stage("Report: one page with every curve", "runs", "report", RUN)


def stage(title: str, *arguments: str) -> None:
    """Print a title and the command and run it; exit with its code if that is not 0."""
    from smalti.base.errors import ExitCode

    print(f"\n== {title}\n$ {_shown(arguments)}", flush=True)
    code = run_child([sys.executable, "-m", "smalti", *arguments])
    if code != ExitCode.DONE:
        what = "the demo has stopped (run again, it continues here): this command"
        print(f"{what} exited with code {code}:\n  {_shown(arguments)}", file=sys.stderr)
        raise typer.Exit(code)


def _verify() -> tuple[str, ...]:
    """Return the option to compare with transformers if it is installed, else print that it is not."""
    from importlib.util import find_spec

    if find_spec("transformers") is not None:
        return ("--verify",)
    print("\ntransformers is not installed (pip install 'smalti[verify]'): the export is only read back by Smalti")
    return ()


def _shown(arguments: tuple[str, ...]) -> str:
    """Return the command quoted for a shell; arguments with newlines in $'...' form."""
    import shlex

    def quoted(word: str) -> str:
        if "\n" in word:
            return "$'" + word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
        return shlex.quote(word)

    return " ".join(["smalti", *(quoted(word) for word in arguments)])


def _duration(minutes: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the override of the duration, and the option --rate of the plan: (duration, rate).

    A trial measures the time of a step; the number of steps and the FLOP/s follow. A run that has begun keeps its
    duration.
    """
    from smalti.base.errors import UserError
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.plan.run_plan import plan_run
    from smalti.track.run import RunFolder

    try:
        folder = RunFolder.read(RUN)
        begun = folder.config().train.duration
    except UserError:
        begun = None
    if begun is not None:
        state = "is finished and used as it is" if folder.status().get("state") == "done" else "is continued"
        print(
            f"\n{RUN} {state}: it keeps its length, {begun}, whatever --minutes says (to start over, remove the folder)"
        )
        return (f"train.duration={begun}",), ()
    step_s = _trial_step_s()
    print(f"{step_s * 1000:.0f} ms per step")
    plan = plan_run(load(RunConfig, "demo", []).config)
    rate = plan.total_flops / plan.steps / step_s
    return (f"train.duration={max(20, round(minutes * 60 / step_s))}step",), ("--rate", f"{rate:.4g}")


def _kill(duration: tuple[str, ...]) -> tuple[str, ...]:
    """Return the override that kills rank 1 soon after the first checkpoint, which is of a quarter of the run.

    Empty for an earlier run whose length is not in steps.
    """
    length = duration[0].removeprefix("train.duration=").removesuffix("step")
    if not length.isdigit():
        return ()
    steps = int(length)
    step = min(steps, steps // 4 + max(5, steps // 60))
    return (f"chaos.faults=[{{kind: sigkill, rank: 1, step: {step}}}]",)


def _recovery() -> list[tuple[str, str]]:
    """Return a line for each fault of the training: detection, restart, and the steps that were repeated."""
    from smalti.base.clock import wall_s
    from smalti.track.goodput import ledger, read_history
    from smalti.track.report.interruptions import how_detected, what_happened, what_was_done

    result = ledger(read_history(RUN, wall_s()))
    lines = []
    for fault in result.interruptions if result is not None else ():
        repeated = fault.step - (fault.resumed_step or 0)
        lines.append(("interruption", f"{what_happened(fault)} at step {fault.step}, {how_detected(fault)}"))
        lines.append(("", f"{what_was_done(fault)}, {repeated} steps repeated"))
    return lines


def _trial_step_s() -> float:
    """Return the seconds of a step on this machine, over the second half of a trial."""
    stage("Trial: measure the time of a step", "train", "demo", "--try", str(TRIAL_STEPS), "train.eval_every=1run")
    lines = Path(trials.FOLDER, "demo", "metrics.jsonl").read_text().splitlines()
    hours = {row["step"]: row["time/train"] for row in map(json.loads, lines) if "time/train" in row}
    return float(hours[TRIAL_STEPS] - hours[TRIAL_STEPS // 2]) * 3600 / (TRIAL_STEPS - TRIAL_STEPS // 2)


def _newest_results(suite: str) -> dict[str, Any]:
    files = sorted(Path(RUN).glob(f"evals/{suite}/*/results.json"))
    return dict(json.loads(files[-1].read_text())) if files else {"tasks": {}}


def _summary(total_s: float) -> str:
    """Return the table at the end: what was trained, its speed and its scores."""
    from smalti.base.units import format_count, format_frac, format_seconds
    from smalti.cli.tables import pairs
    from smalti.plan.run_plan import plan_run
    from smalti.track.report.read import read_run
    from smalti.track.run import RunFolder

    plan = plan_run(RunFolder.read(RUN).config())
    record = read_run(RUN)
    rates = [value for value in record.series("throughput/tokens_per_sec")[1] if value == value]
    mfus = [value for value in record.series("throughput/device/mfu")[1] if value == value]
    lines = [
        ("near-duplicates", _near_duplicates()),
        ("parameters", format_count(plan.params.total)),
        ("trained on", f"{format_count(plan.tokens)} tokens in {plan.steps} steps"),
    ]
    if rates:
        lines.append(("speed", f"{format_count(_median(rates))} tokens/s"))
    if mfus:
        lines[-1] = ("speed", f"{lines[-1][1]}, MFU {format_frac(_median(mfus))} of the measured matmul peak")
    for name, task in _newest_results("demo")["tasks"].items():
        lines.append((name, _score(task)))
    lines += _core_average(_newest_results("gauntlet"))
    lines += _recovery()
    lines.append(("total time", format_seconds(total_s)))
    return "\n== Results\n" + pairs(lines)


def _core_average(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the Gauntlet's core average, where it was run, and that it is partial, where it is."""
    mean = results.get("gauntlet", {}).get("core_average")
    if not mean:
        return []
    lines = [("core average", _score({**mean, "metric": "above chance"}))]
    if mean["n_missing"]:
        names = ", ".join(results["tasks"])
        lines.append(("", f"partial: without {mean['n_missing']} benchmarks of the Gauntlet; it has {names}"))
    return lines


def _near_duplicates() -> str:
    from smalti.base.store import read_json

    record = read_json(f"{UNIQUE}/report.json")
    dropped = sum(splits["train"]["documents"]["dropped"] for splits in record["sources"].values())
    near_heldout = record["dedup"]["near_heldout_documents"]
    return f"{dropped} training documents dropped, {near_heldout} of them near a held-out one"


def _score(task: dict[str, Any]) -> str:
    text = f"{task['value']:.3f} {task['metric'].replace('_', ' ')}"
    if task.get("interval"):
        text += " [{:.3f}, {:.3f}]".format(*task["interval"])
    baselines = {"gzip": "gzip -9", "xz": "xz -9", "chance": "chance"}
    for key, value in task.items():
        for start, label in baselines.items():
            if key.startswith(start) and isinstance(value, int | float):
                text += f", {label} {value:.3f}"
    return text


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _next_steps() -> str:
    from smalti.cli.tables import pairs

    steps = [
        (f"smalti chat {RUN}", "generate text (it is a base model: it continues text)"),
        ("smalti demo --chat", "tune it to follow simple instructions, in a few minutes"),
        (f"smalti serve {RUN}", "serve it over HTTP: OpenAI's API and a chat page"),
        (f"smalti plan verify {RUN} --measure", "compare the plan with the measurement"),
        ("smalti train demo-moe", "train an MoE on the same data"),
        ("smalti train demo-continue", "continue on more prose while replaying code; reports gains and losses"),
        ("smalti train demo name=longer train.duration=3000step", "train the same model for longer"),
        ("smalti data curate --help", "use your own documents: folders, JSONL, Parquet"),
    ]
    return f"\n== Next steps\n{pairs(steps)}\n\nAll curves on one page: {RUN}/report.html"
