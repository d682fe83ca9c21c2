"""`smalti data build` from extracted text to clean text beside datatrove, on one core; and what 10 TB would take.

    git clone --depth 1 https://github.com/adbar/trafilatura
    make bench NAME=build_speed ARGS='--pages trafilatura/tests'                 990 web pages, 4 minutes on one core
    make bench NAME=build_speed ARGS='--pages FOLDER --price 0.04 --hours 24 --cores 32'

*Extraction* is measured apart: HTML to text by each method. The texts of trafilatura then go through both, in turns,
from one Parquet file to another: Smalti's step that annotates (language, markup, the rules of Gopher, C4 and FineWeb,
six kinds of personal data), which measures all rules of every document; and datatrove's filters with the same rules and
its PII formatter (e-mail and IP addresses) by its local executor, which stop at the first reason to drop. Times are of
the processor; imports and what is loaded at the first use are not counted. Once with datatrove's own words (spaCy) and
once with those of Smalti in their place.

*10 TB*: core-hours are bytes / measured rate, since shards of extraction and annotation are independent;
near-duplicates at the rate of bench/dedup.py (``--dedup-rate``). Reading from a store, failures and idle machines are
not in it.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from paired import ratio_of
from peers import python_of
from record import ROOT, RecordOption, record

from smalti.base.errors import UserError
from smalti.data.build.annotate import EXTRACTED, AnnotateOptions, annotate_shard
from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import html_method, html_text
from smalti.data.documents.parquet import RowWriter

RULES = ("gopher-repetition-2021", "gopher-2021", "c4-2019", "fineweb-code-0.01")
SEED = 7
MB = 1_000_000


def pages_of(folder: Path, n: int) -> list[str]:
    """Return a sample of the HTML pages below ``folder``, decoded."""
    paths = sorted(path for path in folder.rglob("*.htm*") if path.is_file())
    random.Random(SEED).shuffle(paths)
    pages: list[str] = []
    for path in paths[:n]:
        try:
            pages.append(decode(path.read_bytes(), is_html=True)[0])
        except UnknownEncoding:
            continue
    if not pages:
        raise SystemExit(f"{folder} has no HTML pages")
    return pages


def extraction(pages: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return method -> rate of HTML and share of text, and the texts of trafilatura."""
    n_bytes = sum(len(page.encode("utf-8", "replace")) for page in pages)
    rows: dict[str, Any] = {}
    texts: list[str] = []
    for name in ("trafilatura", "resiliparse", "tags"):
        try:
            method = html_method(name)
        except UserError as error:
            print(f"{name}: not measured: {error}")
            continue
        html_text(pages[0], method)
        begin_s = time.process_time()
        made = [html_text(page, method).encode("utf-8", "replace").decode() for page in pages]
        cpu_s = time.process_time() - begin_s
        texts = texts or [text for text in made if text]
        n_text = sum(len(text.encode()) for text in made)
        rows[method] = {"html_mb_per_s": n_bytes / MB / cpu_s, "text_of_html": n_text / n_bytes, "cpu_s": cpu_s}
        print(f"{method:24}{n_bytes / MB / cpu_s:8.2f} MB of HTML/s a core, {n_text / n_bytes:.1%} of it is text")
    return rows, texts


def write(texts: list[str], ours: Path, theirs: Path) -> None:
    """Write the same documents as both read them."""
    with RowWriter(ours, EXTRACTED) as writer:
        for number, text in enumerate(texts):
            row = dict.fromkeys(EXTRACTED.names) | {"id": str(number), "source": "web", "kind": "html", "text": text}
            writer.add(row, len(text))
    theirs.mkdir()
    pq.write_table(pa.table({"id": list(map(str, range(len(texts)))), "text": texts}), theirs / "documents.parquet")


def smalti_s(extracted: Path) -> float:
    """Return the processor seconds of Smalti's step."""
    options = AnnotateOptions(RULES, True, "replace", 17, 0.0, None)
    begin_s = time.process_time()
    annotate_shard(extracted.with_name("annotated.parquet"), extracted, options)
    return time.process_time() - begin_s


def datatrove(documents: Path, words: str) -> dict[str, Any]:
    """Run datatrove's pipeline in its environment."""
    output = documents.with_name("datatrove")
    shutil.rmtree(output, ignore_errors=True)
    script = ROOT / "bench" / "peers" / "speed_datatrove.py"
    done = subprocess.run(
        [python_of("dedup-datatrove"), script, documents, output, words], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def cleaning(texts: list[str], folder: Path, rounds: int) -> dict[str, Any]:
    """Print and return both rates and the ratio of times, in turns."""
    extracted, documents = folder / "extracted.parquet", folder / "documents"
    write(texts, extracted, documents)
    n_bytes = sum(len(text.encode()) for text in texts)
    smalti_s(extracted)
    result: dict[str, Any] = {"documents": len(texts), "bytes": n_bytes}
    for words in ("english", "same"):
        slow, fast, kept = [], [], 0
        for number in range(rounds):
            mine = [] if number % 2 else [smalti_s(extracted)]
            other = datatrove(documents, words)
            fast += mine or [smalti_s(extracted)]
            slow.append(other["cpu_s"])
            kept = other["kept"]
        ratio = ratio_of(slow, fast, names=(f"datatrove, {words} words", "smalti"))
        rates = {"smalti_mb_per_s": n_bytes / MB / ratio.fast_s, "datatrove_mb_per_s": n_bytes / MB / ratio.slow_s}
        result[words] = ratio.figures() | rates | {"datatrove_kept": kept}
        print(f"{ratio}; {rates['smalti_mb_per_s']:.2f} and {rates['datatrove_mb_per_s']:.2f} MB of text/s a core")
    return result


def extrapolated(rows: dict[str, Any], clean: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print and return core-hours, cost and machines for HTML by each method, and for text."""
    n_mb = options.terabytes * 1e6
    cases = [(f"HTML, {method}", row["html_mb_per_s"], row["text_of_html"]) for method, row in rows.items()]
    table = []
    print(f"\n{options.terabytes:g} TB of          core-hours: extract   clean  dedup    sum   cost  machines")
    for name, html_rate, share in [*cases, ("text", None, 1.0)]:
        hours = [
            n_mb / html_rate / 3600 if html_rate else 0.0,
            n_mb * share / clean["english"]["smalti_mb_per_s"] / 3600,
            n_mb * share / options.dedup_rate / 3600,
        ]
        n_machines = math.ceil(sum(hours) / options.hours / options.cores)
        cost = sum(hours) * options.price
        row = dict(zip(("extract_h", "clean_h", "dedup_h"), hours, strict=True))
        table.append({"of": name, **row, "core_hours": sum(hours), "cost": cost, "machines": n_machines})
        theirs = n_mb * share / clean["english"]["datatrove_mb_per_s"] / 3600
        table[-1]["datatrove_clean_h"] = theirs
        print(f"{name:24}{hours[0]:15,.0f}{hours[1]:8,.0f}{hours[2]:7,.0f}{sum(hours):7,.0f}{cost:7,.0f}{n_machines:10,}"
              f"   (datatrove cleans in {theirs:,.0f})")  # fmt: skip
    print(f"at {options.price:g} a core-hour, in {options.hours:g} hours, {options.cores} cores a machine")
    return table


def main() -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="a folder of HTML pages, read recursively")
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of timings, at least 3")
    parser.add_argument("--terabytes", type=float, default=10)
    parser.add_argument("--price", type=float, default=0.04, help="of a core-hour, in any currency")
    parser.add_argument("--hours", type=float, default=24, help="in which it shall be done")
    parser.add_argument("--cores", type=int, default=32, help="of a machine")
    parser.add_argument("--dedup-rate", type=float, default=6.5, help="MB of text/s a core (docs/concepts/data)")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/build_speed.json")
    parser.add_argument("--of", help="kind of the pages: the result is build_speed-OF.json")
    options = parser.parse_args()
    rows, texts = extraction(pages_of(options.pages, options.documents))
    with tempfile.TemporaryDirectory() as name:
        clean = cleaning(texts, Path(name), options.rounds)
    table = extrapolated(rows, clean, options)
    if options.record:
        assumed = {name: getattr(options, name) for name in ("terabytes", "price", "hours", "cores", "dedup_rate")}
        figures = {"extraction": rows, "cleaning": clean, "extrapolated": table, "assumed": assumed}
        print("wrote", record(f"build_speed-{options.of}" if options.of else "build_speed", figures))


if __name__ == "__main__":
    main()
