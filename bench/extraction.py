"""Extraction of main text on trafilatura's evaluation pages: precision, recall and F1 as in its published evaluation.

    git clone https://github.com/adbar/trafilatura
    make bench NAME=extraction ARGS='--pages trafilatura/tests'       two minutes on one core

990 pages with segments that the text must and must not have (``evaldata.json``); a segment counts if it is in the text
with white space made equal. Compared are Smalti's methods from the bytes of a page (its decoding, then ``html``), and
trafilatura by itself with the options of its evaluation. Pages are read, not copied. ``--record`` writes
bench/results/extraction.json.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import RecordOption, record

from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import html_method, html_text

PUBLISHED = {"trafilatura 2.2.0 (standard)": 0.924, "resiliparse 1.0.9": 0.811, "baseline": 0.815}
"""F1 in docs/evaluation.rst of trafilatura's repository, results of 2026-08-04 on these pages."""


def smalti(method: str) -> Callable[[bytes], str | None]:
    """Return Smalti's extraction by a method of ``html``."""
    resolved = html_method(method)

    def extract(page: bytes) -> str | None:
        try:
            return html_text(decode(page, is_html=True)[0], resolved)
        except UnknownEncoding:
            return None

    return extract


def plain_trafilatura(page: bytes) -> str | None:
    """Extract as trafilatura's evaluation does, its standard row."""
    import trafilatura

    text: str | None = trafilatura.extract(page, include_comments=False, include_tables=True, include_formatting=False)
    return text


def plain(text: str) -> str:
    """Make white space equal."""
    return re.sub(r"\s+", " ", text).strip()


def score(extract: Callable[[bytes], str | None], pages: list[tuple[bytes, dict[str, Any]]]) -> dict[str, float]:
    """Return precision, recall and F1 of the segments of all pages, and the seconds that it took."""
    hits = wrong = missed = 0
    begin_s = time.process_time()
    for page, wanted in pages:
        text = plain(extract(page) or "")
        n_hits = sum(plain(segment) in text for segment in wanted["with"])
        hits, missed = hits + n_hits, missed + len(wanted["with"]) - n_hits
        wrong += sum(plain(segment) in text for segment in wanted["without"])
    precision, recall = hits / max(1, hits + wrong), hits / (hits + missed)
    f1 = 2 * precision * recall / max(1e-9, precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1, "cpu_s": time.process_time() - begin_s}


def main() -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="the folder tests of trafilatura's repository")
    parser.add_argument("--methods", default="trafilatura,tags", help="of html, of a recipe")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/extraction.json")
    options = parser.parse_args()
    pages = []
    for entry in json.loads((options.pages / "evaldata.json").read_text()).values():
        path = next(p for folder in ("cache", "eval") if (p := options.pages / folder / entry["file"]).is_file())
        pages.append((path.read_bytes(), entry))
    methods: dict[str, Callable[[bytes], str | None]] = {"trafilatura alone": plain_trafilatura}
    methods |= {f"html: {name}": smalti(name) for name in options.methods.split(",")}
    rows = {}
    print(f"{len(pages)} pages\n{'method':<20} precision  recall     F1  CPU s")
    for name, extract in methods.items():
        row = rows[name] = score(extract, pages)
        print(
            f"{name:<20} {row['precision']:9.3f} {row['recall']:7.3f} {row['f1']:6.3f} {row['cpu_s']:6.1f}", flush=True
        )
    print("published F1:", PUBLISHED)
    if options.record:
        figures = {"pages": len(pages), "method": html_method("auto"), "published_f1": PUBLISHED, "rows": rows}
        print("wrote", record("extraction", figures))


if __name__ == "__main__":
    main()
