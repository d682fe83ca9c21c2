"""Results folders for tests of the reader."""

import math
from pathlib import Path
from typing import Any

from smalti.evals.results import TaskResult, write

MARKUP = "</script><script>document.title='changed'</script><img src=x onerror=\"document.title='changed'\"><b>bold</b>"


def ranked(index: int, choice: int, probability: float, *, gold: int = 0, key: str = "choices") -> dict[str, Any]:
    """A sample of three choices, of which ``choice`` has ``probability``."""
    shares = [probability if place == choice else (1 - probability) / 2 for place in range(3)]
    return {
        "index": index,
        "prompt": f"Question {index}?\nAnswer:",
        key: [" red", " green", " blue"],
        "log_likelihoods": [math.log(share) - 3 for share in shares],
        "gold": gold,
        "choice": choice,
        "correct": choice == gold,
        "gold_probability": shares[gold],
    }


def generated(index: int, answer: str, parsed: str | None, *, truncated: bool = False) -> dict[str, Any]:
    """A sample of a generation task, whose right answer is its index."""
    return {
        "index": index,
        "id": f"q{index}",
        "prompt": f"{MARKUP} What is {index}?",
        "answer": answer,
        "parsed": parsed,
        "answers": [str(index)],
        "truncated": truncated,
        "correct": parsed == str(index),
        "strict": True,
    }


def document(index: int, nats: float) -> dict[str, Any]:
    """A held-out document of 100 bytes."""
    return {"index": index, "beginning": f"Document {index}", "n_bytes": 100, "n_tokens": 30, "nats": nats}


def write_results(folder: Path, samples: dict[str, list[dict[str, Any]]], *, suite: str = "mine", **about: Any) -> Path:
    """Write ``evals/<suite>/<time>/`` into a folder and return that path; ``samples``: those of each task."""
    parts = [TaskResult(name, {}, rows) for name, rows in samples.items()]
    report = {"suite": suite, "model": folder.name, "time": "2026-01-01T00:00:00.000Z", "tasks": {}, **about}
    return Path(write(folder / "evals" / suite, report, parts))


def example(folder: Path, *, shift: int = 0) -> Path:
    """Write 30 ranked items, 6 generated ones, 40 in two categories, 4 of the Gauntlet and 12 documents.

    ``shift`` changes what the model answers.
    """
    colours = [ranked(index, (index + shift) % 3, 0.4 + index / 100) for index in range(30)]
    numbers = [
        generated(0, f"{MARKUP} so 0", "0"),
        generated(1, "one", None),
        generated(2, f"{2 + shift}", str(2 + shift)),
        generated(3, "three and three and", None, truncated=True),
        generated(4, "\x1b[31m4\u202e", "4"),
        generated(5, "six", "6"),
    ]
    topics = [
        ranked(index, index * 7 % 11 % 2, 0.6) | {"category": "ab"[index > 19], "cluster": index // 4}
        for index in range(40)
    ]
    copa = [ranked(index, index % 2, 0.3) for index in range(4)]
    texts = [document(index, 70.0 + index * 37 % 50 + shift) for index in range(12)]
    tasks = {"colours": colours, "numbers": numbers, "topics": topics, "copa": copa, "heldout/prose": texts}
    return write_results(folder, tasks, step=5, gauntlet={"mode": "fixed", "missing": {}, "scores": {"copa": 0.0}})
