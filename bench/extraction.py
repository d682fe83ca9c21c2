"""Extraction of main text on two public gold sets: precision, recall and F1 as in their published evaluations.

    git clone --depth 1 https://github.com/adbar/trafilatura
    git clone --depth 1 https://github.com/scrapinghub/article-extraction-benchmark
    make bench NAME=extraction ARGS='--pages trafilatura/tests --articles article-extraction-benchmark'    two minutes

990 pages with segments that the text must and must not have (``evaldata.json``); a segment counts if it is in the text
with white space made equal. Compared are Smalti's methods from the bytes of a page (its decoding, then ``html``), and
trafilatura by itself with the options of its evaluation. ``--articles``: 181 pages with the text of their article; runs
of four words are compared, each page alike (its ``evaluate.py``). Pages are read, not copied. ``--record`` writes
bench/results/extraction.json.
"""

import argparse
import gzip
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from record import RecordOption, record

from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import html_method, html_text

PUBLISHED = {"trafilatura 2.2.0 (standard)": 0.924, "resiliparse 1.0.9": 0.811, "baseline": 0.815}
"""F1 in docs/evaluation.rst of trafilatura's repository, results of 2026-08-04 on these pages."""
PUBLISHED_ARTICLES = {"trafilatura 2.0.0": 0.958, "html-text 0.7.0": 0.665}
"""F1 in README.rst of article-extraction-benchmark."""


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


def score_articles(extract: Callable[[bytes], str | None], folder: Path) -> dict[str, float]:
    """Return the means of precision and recall of runs of four words, their F1, and the seconds that it took."""
    precisions, recalls = [], []
    begin_s = time.process_time()
    for name, page in json.loads((folder / "ground-truth.json").read_text()).items():
        data = gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes())
        wanted, got = runs(page.get("articleBody", "")), runs(extract(data) or "")
        both = (wanted & got).total()
        precisions += [both / got.total()] if got else []
        recalls += [both / wanted.total()] if wanted else []
    precision, recall = statistics.mean(precisions), statistics.mean(recalls)
    f1 = 2 * precision * recall / (precision + recall)
    return {"precision": precision, "recall": recall, "f1": f1, "cpu_s": time.process_time() - begin_s}


def runs(text: str) -> Counter[tuple[str, ...]]:
    """Return the runs of four words; of a shorter text all of it."""
    words = re.findall(r"\w+", text)
    return Counter(run for at in range(max(1, len(words) - 3)) if (run := tuple(words[at : at + 4])))


def main() -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, required=True, help="a clone of adbar/trafilatura, or its tests")
    parser.add_argument("--articles", type=Path, help="a clone of scrapinghub/article-extraction-benchmark")
    parser.add_argument("--methods", default="trafilatura,tags", help="of html, of a recipe")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/extraction.json")
    options = parser.parse_args()
    tests = options.pages / "tests" if (options.pages / "tests").is_dir() else options.pages
    pages = []
    for entry in json.loads((tests / "evaldata.json").read_text()).values():
        path = next(p for folder in ("cache", "eval") if (p := tests / folder / entry["file"]).is_file())
        pages.append((path.read_bytes(), entry))
    methods: dict[str, Callable[[bytes], str | None]] = {"trafilatura alone": plain_trafilatura}
    methods |= {f"html: {name}": smalti(name) for name in options.methods.split(",")}
    print(f"{len(pages)} pages")
    rows = table({name: partial(score, extract, pages) for name, extract in methods.items()})
    print("published F1:", PUBLISHED)
    figures = {"pages": len(pages), "method": html_method("auto"), "published_f1": PUBLISHED, "rows": rows}
    if options.articles:
        print("\narticles")
        rows = table({name: partial(score_articles, extract, options.articles) for name, extract in methods.items()})
        print("published F1:", PUBLISHED_ARTICLES)
        figures["articles"] = {"published_f1": PUBLISHED_ARTICLES, "rows": rows}
    if options.record:
        print("wrote", record("extraction", figures))


def table(measures: dict[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print and return the scores of each method."""
    rows = {}
    print(f"{'method':<20} precision  recall     F1  CPU s")
    for name, measure in measures.items():
        row = rows[name] = measure()
        print(
            f"{name:<20} {row['precision']:9.3f} {row['recall']:7.3f} {row['f1']:6.3f} {row['cpu_s']:6.1f}", flush=True
        )
    return rows


if __name__ == "__main__":
    main()
