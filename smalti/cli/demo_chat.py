"""``smalti demo --chat``: tunes the demo's model on synthetic instructions, and prints what it learned and lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHAT_RUN = "runs/demo-chat"
INSTRUCTIONS = "data/demo/instructions"
SUITE = "instructions"
TASK = f"{INSTRUCTIONS}/instructions.yaml"
PROMPTS = ("Swap these words: path level", "Separate with commas: path level", "Which is larger, 17 or 41?")


def tune(run: str, track: tuple[str, ...], stage: Callable[..., None]) -> None:
    """Run the stages after those of the demo, from the instructions to the tables.

    ``run``: the demo's. ``track``: changes to track. ``stage``: runs a command, after a title.
    """
    from smalti.track.line_file import read_lines
    from smalti.tune import instructions

    print("\n== Instructions: synthetic conversations; the held-out ones ask about other words and numbers")
    print(f"""$ python -c 'from smalti.tune.instructions import write; write("{INSTRUCTIONS}")'""", flush=True)
    instructions.write(INSTRUCTIONS)
    tasks = ("eval", "run", run, f"suite={SUITE}", f"tasks=[{TASK}, heldout, arithmetic, brackets]")
    stage("Evaluate before: held-out instructions, text and two tasks", *tasks)
    stage("Tune: the answers are in the loss, and text is replayed", "tune", "sft", "demo-chat", *track)
    stage("Export: with the chat template and the token that ends an answer", "export", CHAT_RUN)
    stage("Evaluate after", *tasks[:2], CHAT_RUN, *tasks[3:])
    saved = {row.get("prompt") for row in read_lines(f"{CHAT_RUN}/samples.jsonl")}  # by an earlier command
    for prompt in PROMPTS:
        save = () if prompt in saved else ("--save",)
        stage("Ask", "chat", CHAT_RUN, "--prompt", prompt, "--temperature", "0", *save)
    stage("Report: one page with every curve", "runs", "report", CHAT_RUN)
    print(summary(run, CHAT_RUN))


def summary(before: str, after: str) -> str:
    """Return the tables of the newest results of both runs: exact answers by kind, what was lost, and conversations."""
    from smalti.cli.tables import table

    folders = [_newest(run) for run in (before, after)]
    tasks = [json.loads((folder / "results.json").read_text())["tasks"] for folder in folders]
    exact = [scores.pop(SUITE) for scores in tasks]
    rows = [("all kinds, equally weighted", *map(_score, exact))]
    rows += [(kind, *(_score(side["categories"][kind]) for side in exact)) for kind in exact[1]["categories"]]
    lost = [
        (name, score["metric"].replace("_", " "), _score(score), _score(tasks[1][name]), _change(score, tasks[1][name]))
        for name, score in tasks[0].items()
        if name in tasks[1]
    ]
    return "\n".join(
        [
            f"\n== Results: exact answers to {exact[1]['n']} held-out instructions, with 95 % intervals",
            table(("instruction", "before", "after"), rows),
            "\n== What was lost: bits per byte (lower is better) and accuracies of the base model",
            table(("task", "metric", "before", "after", "change"), lost),
            "\n== Held-out conversations",
            *_conversations(folders[1] / "samples.jsonl", n=4),
            f"\nsmalti chat {after} talks to it; {after}/report.html has all curves",
        ]
    )


def _newest(run: str) -> Path:
    return sorted(Path(run).glob(f"evals/{SUITE}/*/results.json"))[-1].parent


def _score(score: dict[str, Any]) -> str:
    value = score["value"] if "value" in score else score["accuracy"]
    if not score.get("interval"):
        return f"{value:.3f}"
    return "{:.3f} [{:.3f}, {:.3f}]".format(value, *score["interval"])


def _change(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the change: relative of bits per byte, absolute of accuracies."""
    from smalti.track.report.continued import percent

    if before["metric"] == "accuracy":
        return f"{after['value'] - before['value']:+.3f}"
    return percent(after["value"] / before["value"] - 1)


def _conversations(path: Path, n: int) -> list[str]:
    """Return the first conversations of several turns and others by turns, with the right answer where it differs."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    samples = [row for row in rows if row["task"] == SUITE]
    chosen = samples[: len({row["category"] for row in samples})][-n:]
    lines = []
    for row in chosen:
        right = "" if row["correct"] else f"   (right: {row['answers'][0]})"
        lines.append(f"{row['prompt']} {row['answer'].strip()}{right}\n")
    return lines
