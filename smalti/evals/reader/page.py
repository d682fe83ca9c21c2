"""One HTML file with all samples: orders, filters, flags and scores work in it without a server.

The samples are JSON in a script element that no browser runs, and ``page.js`` writes them as text nodes only.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from smalti.base.hashing import digest_json
from smalti.evals.reader.flags import FLAGS, VERSION, default_path, list_version
from smalti.evals.reader.order import disagreement, wrong_and_confident
from smalti.evals.reader.reading import Reading
from smalti.evals.samples import Sample
from smalti.track.report.html import document

_FOLDER = Path(__file__).parent
_LONGEST = 20_000
"""Characters of a prompt that are in the page; a longer one is without its middle."""


def page(reading: Reading, order: str) -> bytes:
    """Return the page in UTF-8, which begins with ``order``."""
    css, body, arithmetic, view = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.html", "scores.js", "page.js")
    )
    data = json.dumps(_data(reading, order), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    title = f"{reading.results.suite}: samples of {' and '.join(reading.names)}"
    sections = [f"<style>{css}</style>", body, f'<script type="application/json" id="data">{data}</script>']
    text = document(title, sections, script=arithmetic + view)
    return text.encode("utf-8", "backslashreplace")  # of a lone surrogate in JSON: its escape


def _data(reading: Reading, order: str) -> dict[str, Any]:
    samples = reading.results.samples
    names = reading.names
    return {
        "names": names,
        "folder": str(reading.results.folder),
        "command": _command(reading),
        "about": _about(reading),
        "order": order,
        "key": digest_json([names, reading.results.folder.name, [sample.digest for sample in samples]])[:16],
        "flags": {
            "file": str(reading.flags_path),
            "version": list_version(reading.flags_path),
            "changed": reading.applied.changed,
            "meanings": FLAGS,
            "line_version": VERSION,
        },
        "scores": [
            {
                score.task: {"metric": score.metric, "weights": score.weights, **score.before.to_score()}
                for score in scores
            }
            for scores in (reading.scores, reading.other_scores)
        ],
        "samples": [_sample(reading, sample) for sample in samples],
    }


def _about(reading: Reading) -> list[str]:
    about = reading.results.about
    facts = [f"suite {reading.results.suite}", str(about.get("time", ""))[:16].replace("T", " ")]
    return [fact for fact in facts if fact]


def _command(reading: Reading) -> str:
    """Return the command that reads these samples with their list of flags."""
    words = ["smalti", "eval", "read", str(reading.results.folder)]
    if reading.flags_path != default_path(reading.results.folder):
        words += ["--flags", str(reading.flags_path)]
    return shlex.join(words)


def _sample(reading: Reading, sample: Sample) -> dict[str, Any]:
    return {
        **reading.sample_json(sample),
        "prompt": _shortened(sample.prompt),
        "key": sample.key,
        "confident": wrong_and_confident(sample),
        "disagreement": disagreement(sample),
    }


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n[{len(text) - _LONGEST:,} characters omitted]\n{text[-half:]}"
