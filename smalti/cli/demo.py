"""``smalti demo``: the whole job on an embedded corpus, as the commands that a user would type.

Each stage is a child process started with exactly the command that is printed; the demo adds nothing but the order, the
length of the training and the table at the end. Run again, it goes on where it was: Ctrl-C and SIGTERM are left to the
stage, which saves what it can, and no stage outlives the demo.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

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
        list[str] | None, typer.Argument(metavar="TRACK.A=VALUE", help="Where the training is tracked.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="About how long the training lasts, 0.05 to 600.")] = 2.75,
) -> None:
    """Documents from the installed Python -> curated -> tokens -> trained, measured, exported model that answers.

    Works in the present folder (data/demo and runs/demo), on two CPU cores, without network, in under six minutes.
    """
    from smalti.base.clock import now_s
    from smalti.base.errors import UserError
    from smalti.base.units import format_seconds

    if not 0.05 <= minutes <= 600:
        raise UserError(f"--minutes {minutes}", allowed="0.05 to 600", hint="smalti demo --minutes 1")
    track = tuple(overrides or ())
    if strange := [one for one in track if not one.startswith("track.")]:
        raise UserError(
            f"smalti demo takes no {strange[0]}",
            allowed="changes to track, as 'track.sinks=[mlflow]'; all else is the demo's",
            hint=f"after the demo: smalti train demo name=mine {strange[0]}",
        )
    start_s = now_s()
    stage("Documents: library sources and documentation of the installed Python", "data", "documents", RAW)
    stage("Curate: normalise, quality rules, exact dedup, held-out split", "data", "curate", "demo-curate")
    stage("Dedup: near-duplicates, and training documents near to a held-out one, go", "data", "dedup", "demo-dedup")
    stage("Tokenize: train a byte-level BPE, write token files", "data", "tokenize", "demo-tokenize")
    duration, rate = _duration(minutes)
    stage("Plan: what this run costs", "plan", "time", "demo", *duration, *rate)
    stage("Train: a mixture of experts on two ranks", "train", "demo", *duration, *track)
    stage("Export: a Hugging Face folder, reloaded in transformers and compared", "export", RUN, *_verify())
    stage("Evaluate: bits per byte beside gzip and xz, two tasks", "eval", "run", RUN)
    for prompt in PROMPTS:
        options = ("--max-tokens", "96", "--temperature", "0.7", "--save")
        stage("Generate", "chat", RUN, "--prompt", prompt, *options)
    stage("Report: one page with every curve", "runs", "report", RUN)
    print(_summary(now_s() - start_s))
    print(_next_steps())
    typer.echo(f"done in {format_seconds(now_s() - start_s)}", err=True)


def stage(title: str, *arguments: str) -> None:
    """Print a title and the command, run it, and leave with its exit code if that is not 0."""
    from smalti.base.errors import ExitCode

    print(f"\n== {title}\n$ {_shown(arguments)}", flush=True)
    code = _run([sys.executable, "-m", "smalti", *arguments])
    if code != ExitCode.DONE:
        print(f"the demo stops here: '{_shown(arguments)}' ended with exit code {code}", file=sys.stderr)
        raise typer.Exit(code)


def _run(command: list[str]) -> int:
    """Run a child to its end and return its exit code (128 + n after signal n), passing signals on to it.

    The child has a process group of its own, so that a Ctrl-C in the terminal reaches it through us and just once: its
    second one means "at once, without saving".
    """
    from smalti.fleet.launch.local import die_with_parent

    heard: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if child is not None:
            child.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_parent(signal.SIGTERM)
        )
        for number in heard:  # while it was being started
            child.send_signal(number)
        code = child.wait()
    finally:
        for known, handler in before.items():
            signal.signal(known, handler)
    if code == 0 and heard:  # it was as good as done; we are told to stop all the same
        return 128 + heard[-1]
    return code if code >= 0 else 128 - code


def _verify() -> tuple[str, ...]:
    """Compare with transformers where it is installed (the extra ``verify``), and say so where it is not."""
    from importlib.util import find_spec

    if find_spec("transformers") is not None:
        return ("--verify",)
    print("\ntransformers is not installed (pip install 'smalti[verify]'): the export is read back by Smalti alone")
    return ()


def _shown(arguments: tuple[str, ...]) -> str:
    """The command as a shell takes it; text with newlines in $'...' form."""
    import shlex

    def quoted(word: str) -> str:
        if "\n" in word:
            return "$'" + word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
        return shlex.quote(word)

    return " ".join(["smalti", *(quoted(word) for word in arguments)])


def _duration(minutes: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """How many steps fit into the time, by a trial of some steps; of a run that has begun, its own number. And the rate
    of FLOPs of that trial, for the plan."""
    from smalti.base.errors import UserError
    from smalti.config.load import load
    from smalti.config.run import RunConfig
    from smalti.plan.run_plan import plan_run
    from smalti.track.run import RunFolder

    try:
        begun = RunFolder.read(RUN).config().train.duration
    except UserError:
        begun = None
    if begun is not None:
        print(f"\n{RUN} has begun: it goes on to its own end, {begun} (remove the folder to start anew)")
        return (f"train.duration={begun}",), ()
    step_s = _trial_step_s()
    print(f"{step_s * 1000:.0f} ms a step")
    plan = plan_run(load(RunConfig, "demo", []).config)
    rate = plan.total_flops / plan.steps / step_s
    return (f"train.duration={max(20, round(minutes * 60 / step_s))}step",), ("--rate", f"{rate:.4g}")


def _trial_step_s() -> float:
    """Seconds of a step here, over the later half of a short run in a folder that is thrown away."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        options = (f"folder={folder}/trial", f"train.duration={TRIAL_STEPS}step", "train.eval_every=1run")
        stage("Trial: how fast this machine trains the model", "train", "demo", *options)
        lines = Path(folder, "trial", "metrics.jsonl").read_text().splitlines()
    hours = {row["step"]: row["time/train"] for row in map(json.loads, lines) if "time/train" in row}
    return float(hours[TRIAL_STEPS] - hours[TRIAL_STEPS // 2]) * 3600 / (TRIAL_STEPS - TRIAL_STEPS // 2)


def _newest_results() -> dict[str, Any]:
    found = sorted(Path(RUN).glob("evals/demo/*/results.json"))
    return dict(json.loads(found[-1].read_text())) if found else {"tasks": {}}


def _summary(total_s: float) -> str:
    """The table at the end: what was trained, how fast, how good."""
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
        ("parameters", f"{format_count(plan.params.total)}, {format_count(plan.params.active)} active for a token"),
        ("trained on", f"{format_count(plan.tokens)} tokens in {plan.steps} steps"),
    ]
    if rates:
        lines.append(("speed", f"{format_count(_median(rates))} tokens/s"))
    if mfus:
        lines[-1] = ("speed", f"{lines[-1][1]}, MFU {format_frac(_median(mfus))} of the measured matmul peak")
    for name, task in _newest_results()["tasks"].items():
        lines.append((name, _score(task)))
    lines.append(("whole demo", format_seconds(total_s)))
    return "\n== What came out\n" + pairs(lines)


def _near_duplicates() -> str:
    from smalti.base.store import read_json

    record = read_json(f"{UNIQUE}/report.json")
    dropped = sum(splits["train"]["documents"]["dropped"] for splits in record["sources"].values())
    near_heldout = record["dedup"]["near_heldout_documents"]
    return f"{dropped} training documents dropped, {near_heldout} of them near to a held-out one"


def _score(task: dict[str, Any]) -> str:
    text = f"{task['value']:.3f} {task['metric'].replace('_', ' ')}"
    if task.get("interval"):
        text += " [{:.3f}, {:.3f}]".format(*task["interval"])
    beside = {"gzip": "gzip -9", "xz": "xz -9", "chance": "chance"}
    for key, value in task.items():
        for start, label in beside.items():
            if key.startswith(start) and isinstance(value, int | float):
                text += f", {label} {value:.3f}"
    return text


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _next_steps() -> str:
    from smalti.cli.tables import pairs

    steps = [
        (f"smalti chat {RUN}", "talk to it (it continues text; it was never taught to answer)"),
        (f"smalti serve {RUN}", "the same over HTTP: OpenAI's API and a chat page"),
        (f"smalti plan verify {RUN} --measure", "what the plan predicts against what was measured"),
        ("smalti train demo-dense", "its dense twin on the same data"),
        ("smalti train demo-continue", "it learns more prose, with code replayed; what it learned and what it kept"),
        ("smalti train demo name=longer train.duration=3000step", "the same model, longer"),
        ("smalti data curate --help", "your own documents: folders, JSONL, Parquet; then data dedup and data tokenize"),
    ]
    return f"\n== Go on\n{pairs(steps)}\n\nEvery curve on one page, in a browser: {RUN}/report.html"
