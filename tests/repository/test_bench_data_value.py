"""bench/data_value.py: the pages and repeats of its crawl, its halves, and its tables."""

import itertools
import json
import random
import sys
from collections import Counter

from bench_script import ROOT

sys.path.append(str(ROOT / "bench"))

from data_value import _half, split
from data_value_study.figures import pictures, report
from data_value_study.pages import PAGE_CHARACTERS, PASSAGES, Page, crawl, pages_of, taken

from smalti.evals.data_value.result import compared

WORDS = [f"word{i}" for i in range(500)]


def page(rng: random.Random, number: int) -> Page:
    return Page(f"file{number}", " ".join(rng.choices(WORDS, k=250)), is_changelog=False)


def word_pairs(text: str) -> set[tuple[str, str]]:
    return set(itertools.pairwise(text.split()))


def test_a_crawl_has_passages_exact_copies_and_near_copies():
    rng = random.Random(1)
    pages = [page(rng, number) for number in range(400)]
    spare = [page(rng, number) for number in range(PASSAGES)]
    texts = crawl(pages, spare, random.Random(2))
    assert texts == crawl(pages, spare, random.Random(2))
    counts = Counter(texts)
    copies = sorted(counts.values(), reverse=True)
    assert 0.08 < sum(n > 1 for n in copies) / len(pages) < 0.22
    assert copies[0] > 8  # few have many
    assert sum(n == 2 for n in copies) > sum(n > 4 for n in copies)
    assert all(any(page.text in text for text in counts) for page in pages)
    with_passage = [text for text in counts if any(spare_page.text[:200] in text for spare_page in spare)]
    assert 0.3 < len(with_passage) / len(counts) < 0.5
    near = [text for text in counts if not any(page.text in text for page in pages)]
    assert near
    for text in near[:20]:
        assert max(len(word_pairs(text) & word_pairs(page.text)) for page in pages) > 200


def test_pages_are_paragraphs_of_files(tmp_path):
    folder = tmp_path / "git-doc" / "doc"
    folder.mkdir(parents=True)
    text = "\n\n".join(f"paragraph {number} " + "x" * 480 for number in range(9))
    (folder / "a.txt").write_text(text)
    (folder / "b.html").write_text(text)
    (folder / "perl5delta.pod").write_text(text)
    pages = pages_of(tmp_path, "git-doc")
    assert [(page.file, page.is_changelog) for page in pages] == [
        *[("git-doc/a.txt", False)] * 2, *[("git-doc/perl5delta.pod", True)] * 2
    ]  # fmt: skip
    assert all(page.text in text and len(page.text) >= PAGE_CHARACTERS for page in pages)


def test_no_file_is_on_both_sides_and_halves_have_half_of_the_text():
    rng = random.Random(3)
    pages = [page(rng, number // 3) for number in range(90)]
    train, heldout = split(pages, 60_000)
    assert train
    assert heldout
    assert not {page.file for page in train} & {page.file for page in heldout}
    assert len(taken(pages, len(pages[0].text))) == 1
    texts = {str(number): "x" * (number + 1) for number in range(100)}
    assert abs(sum(map(len, _half(texts).values())) - 2525) < 100


def test_tables_and_plots_have_the_names_of_the_versions():
    curves = {
        letter: [
            {"tokens": [1, 2, 3], "bits_per_byte": {"given": [3.0, 2.0, 1.0 + shift + 0.001 * seed]}}
            for seed in range(3)
        ]
        for letter, shift in (("A", 0.5), ("B", 0.0), ("C", 0.0))
    }
    version = {"documents": 5, "tokens": 1000, "epochs": 2.0}
    figures = {"names": ["raw", "exact", "near"], "versions": dict.fromkeys(curves, version), "curves": curves}
    figures |= compared(curves)
    text = report(json.loads(json.dumps(figures)))
    assert "| exact - raw | given | -0.5000 | -0.5000 to -0.5000 | exact better |" in text
    assert "| near - exact | given | +0.0000 | +0.0000 to +0.0000 | no difference shown |" in text
    charts = pictures("dedup", figures)
    assert list(charts) == ["dedup-value.svg", "dedup-value-difference.svg"]
    assert all(f">{name}<" in chart for chart in charts.values() for name in ("raw", "exact", "near"))
