"""Quality rules of `smalti data build` beside datatrove's, on the same real and damaged pages.

    make bench NAME=build_rules ARGS='--pages FOLDER'            10,000 pages, about 8 minutes on one core
    make bench NAME=build_rules ARGS='--pages FOLDER --documents 500'

``FOLDER`` has HTML pages, such as those of Debian's documentation packages (``apt-get download``, ``dpkg-deb -x``). A
seeded sample of them is read without tags; a third are damaged, so that rules have documents on both sides of their
limit. Whether each rule alone drops each document, in Smalti and in datatrove; once with datatrove's own word splitter
(spaCy) and once with that of Smalti's rules. ``--record`` writes bench/results/build_rules.json.
"""

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import python_of
from record import ROOT, RecordOption, record

from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import without_tags
from smalti.data.prepare.curate.normalize import normalize
from smalti.data.prepare.curate.rules.measure import Text
from smalti.data.prepare.curate.rules.presets import PRESETS
from smalti.data.prepare.curate.rules.rule import Preset

NAMES = ("gopher-repetition-2021", "gopher-2021", "c4-2019", "fineweb-code-0.01")
SEED = 5
MOST_CHARACTERS = 100_000
EXAMPLES = 3


def damaged(text: str, draw: random.Random) -> str:
    """Return a text that is nearer to the limit of some rule."""
    lines = text.split("\n")
    words = text.split()
    kinds: list[Callable[[], str]] = [
        lambda: " ".join(words[: draw.randint(20, 90)]),
        lambda: text + " #" * int(len(words) * draw.uniform(0.05, 0.2)),
        lambda: text + " ..." * int(len(words) * draw.uniform(0.05, 0.2)),
        lambda: "\n".join(("- " if draw.random() < 0.93 else "") + line for line in lines),
        lambda: "\n".join(line + ("..." if draw.random() < 0.4 else "") for line in lines),
        lambda: "\n".join(lines + draw.choices(lines, k=int(len(lines) * draw.uniform(0.05, 0.7)))),
        lambda: "\n\n".join(text.split("\n\n") * 2) if draw.random() < 0.5 else text + "\n\n" + text[: len(text) // 3],
        lambda: " ".join(words + words[: 12] * int(len(words) * draw.uniform(0.002, 0.03))),
        lambda: " ".join(word + " " + str(draw.randint(1, 9999)) * (draw.random() < 0.3) for word in words),
        lambda: "\n".join(line.rstrip(".!?") if draw.random() < 0.9 else line for line in lines),
        lambda: "\n".join(word for word in words),
        lambda: text.replace(" the ", " ").replace(" of ", " ").replace(" and ", " ").replace(" to ", " "),
        lambda: text + draw.choice(["\nLorem ipsum dolor sit amet is what it says.", "\nA {bracket} is here.", " "]),
    ]  # fmt: skip
    return draw.choice(kinds)()


def documents(folder: Path, n: int) -> list[str]:
    """Return the texts of a sample of pages, every third of them damaged."""
    draw = random.Random(SEED)
    paths = sorted(path for path in folder.rglob("*.htm*") if path.is_file())
    draw.shuffle(paths)
    texts: list[str] = []
    for path in paths:
        if len(texts) == n:
            return texts
        try:
            page, _ = decode(path.read_bytes()[: 4 * MOST_CHARACTERS], is_html=True)
        except UnknownEncoding:
            continue
        text = normalize(without_tags(page))[:MOST_CHARACTERS]
        if len(text) > 200:
            texts.append(normalize(damaged(text, draw)) if len(texts) % 3 == 2 else text)
    raise SystemExit(f"{folder} has only {len(texts):,} pages with text; name a larger folder or fewer --documents")


def decisions(texts: list[str]) -> dict[str, list[bool]]:
    """Return for each rule of the presets whether it drops each text."""
    dropped: dict[str, list[bool]] = {}
    for preset in (PRESETS[name] for name in NAMES):
        for text in texts:
            for rule, name, score in _scores(preset, text):
                dropped.setdefault(name, []).append(not rule.passes(score))
    return dropped


def _scores(preset: Preset, text: str) -> Any:
    measured = Text(text)
    for rule in preset.rules:
        yield rule, f"{preset.name}/{rule.name}", rule.score(measured)
    if preset.edit is not None:
        edited = Text(preset.edit(text))
        for rule in preset.rules_after_edit:
            yield rule, f"{preset.name}/{rule.name}", rule.score(edited)


def datatrove(source: Path, words: str) -> Any:
    """Run datatrove in its environment; returns its result."""
    to = source.with_name(f"{words}.json")
    script = ROOT / "bench" / "peers" / "rules_datatrove.py"
    subprocess.run([python_of("dedup-datatrove"), script, source, to, words], check=True, capture_output=True)
    return json.loads(to.read_text())


def compare_rules(texts: list[str], source: Path) -> dict[str, Any]:
    """Print and return how often both agree, by rule and word splitter."""
    mine, rows = decisions(texts), {}
    theirs = {words: datatrove(source, words) for words in ("same", "english")}
    print(f"{'rule':<55} dropped  same words: only ours, only theirs   its words: only ours, only theirs")
    for name, dropped in mine.items():
        row: dict[str, Any] = {"dropped": sum(dropped)}
        for words, of_rule in theirs.items():
            pairs = [(a, b) for a, b in zip(dropped, of_rule[name], strict=True) if b is not None]
            row[words] = {"compared": len(pairs), "only_ours": sum(a and not b for a, b in pairs),
                          "only_theirs": sum(b and not a for a, b in pairs)}  # fmt: skip
        differing = [
            n for n, (a, b) in enumerate(zip(dropped, theirs["same"][name], strict=True)) if b is not None and a != b
        ]
        row["examples"] = [{"document": n, "text": texts[n][:80]} for n in differing[:EXAMPLES]]
        rows[name] = row
        same, english = row["same"], row["english"]
        print(f"{name:<55} {row['dropped']:7,} {same['only_ours']:21,} {same['only_theirs']:12,} "
              f"{english['only_ours']:21,} {english['only_theirs']:12,}")  # fmt: skip
    return rows


def main() -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="a folder of HTML pages, read recursively")
    parser.add_argument("--documents", type=int, default=10_000, help="how many")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/build_rules.json")
    options = parser.parse_args()
    texts = documents(options.pages, options.documents)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "documents.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        rows = compare_rules(texts, source)
    if options.record:
        print("wrote", record("build_rules", {"documents": len(texts), "rules": rows}))


if __name__ == "__main__":
    main()
