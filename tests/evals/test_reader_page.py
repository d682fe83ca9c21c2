"""The reader's page: what it may load and run, and what it does in Chromium."""

import json
import re
import shutil
import time
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from reading_samples import MARKUP, example, ranked, write_results

from smalti.cli.main import run as smalti
from smalti.evals.reader.page import page
from smalti.evals.reader.reading import Reading, read
from smalti.evals.reader.scores import TaskScores

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def data_of(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


def test_samples_are_data_and_one_script_may_run(tmp_path: Path) -> None:
    example(tmp_path)
    text = page(read(str(tmp_path)), "confident").decode()
    assert MARKUP not in text
    assert data_of(text)["samples"][30]["prompt"] == f"{MARKUP} What is 0?"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 1
    assert f"script-src 'sha256-{b64encode(sha256(scripts[0].encode()).digest()).decode()}'" in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
        assert word not in scripts[0], word


def test_a_long_prompt_is_without_its_middle(tmp_path: Path) -> None:
    write_results(tmp_path, {"t": [ranked(0, 1, 0.8) | {"prompt": "a" * 20_000 + "b" * 10_000}]})
    prompt = data_of(page(read(str(tmp_path)), "index").decode())["samples"][0]["prompt"]
    assert prompt == "a" * 10_000 + "\n[10,000 characters omitted]\n" + "b" * 10_000


class Opened:
    """A page in Chromium, with all that its console reported and all addresses that it asked for."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.page = browser.new_page(viewport={"width": 1440, "height": 900}, accept_downloads=True)
        self.problems: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(path.as_uri())

    def keys(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def visit(self, fragment: str) -> None:
        """Change the address, and wait until the page has followed it."""
        change = "addEventListener('hashchange', () => done(), {once: true}); location.hash = address"
        self.page.evaluate(f"address => new Promise(done => {{ {change} }})", fragment)

    def cells(self, task: str, model: str = "") -> list[str]:
        texts = self.page.evaluate(
            "[...document.querySelector('#scores tbody').rows].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        return next(list(cells) for cells in texts if cells[0] == task and model in cells[1])


def cells_of(score: TaskScores) -> list[str]:
    """The numbers of a row of the page's table."""
    cells = []
    for each in (score.before, score.after):
        assert each is not None
        assert each.interval is not None
        cells += [f"{each.value:.3f}", "{:.3f} to {:.3f}".format(*each.interval), f"{each.n:,}"]
    return cells


def interval_of(cell: str) -> list[float]:
    return [float(end) for end in cell.split(" to ")]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_samples_are_read_and_flagged_in_a_browser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    example(tmp_path / "one")
    example(tmp_path / "two", shift=1)
    path, exported = tmp_path / "page.html", tmp_path / "exported.jsonl"
    both = [str(tmp_path / "one"), "--other", str(tmp_path / "two")]
    assert smalti(["eval", "read", *both, "--html", str(path), "--sort", "confident"]) == 0
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = Opened(browser, path)
        _read(opened)
        _flag(opened)
        with opened.page.expect_download() as download:
            opened.page.click("#download")
        download.value.save_as(exported)
        opened.page.click("#close")
        page_cells = {
            task: opened.cells(task, "one")
            for task in ("colours", "numbers", "topics", "heldout/prose", "core average")
        }
        opened.page.screenshot(path=str(tmp_path / "page.png"))
        assert _kept(opened) == "Export 6 flags"
        opened.page.emulate_media(color_scheme="dark")
        opened.page.set_viewport_size({"width": 390, "height": 800})
        assert not opened.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        assert opened.problems == []
        assert {url.partition(":")[0] for url in opened.urls} <= {"file", "data", "blob"}
        browser.close()
    _import(tmp_path, exported, page_cells)
    assert "6 lines added" in capsys.readouterr().out


def _kept(opened: Opened) -> str | None:
    """Return what the page offers to export after a reload.

    Chromium hands what a page has written to localStorage to its other processes a moment later, and a reload may be in
    another one: on a busy machine the first finds nothing.
    """
    end_s = time.monotonic() + 20
    while True:
        opened.page.reload()
        offered: str | None = opened.page.text_content("#export-open")
        if offered != "Export flags" or time.monotonic() > end_s:
            return offered
        opened.page.wait_for_timeout(250)


def _read(opened: Opened) -> None:
    """Filter, search, order; a sample with markup is text."""
    page = opened.page
    assert page.text_content("#count") == "92 of 92 samples"
    assert page.locator("#detail h2").text_content() == "colours 29"
    assert page.locator(".row").count() < 92  # only the rows in sight exist
    page.select_option("#task", "numbers")
    page.select_option("#sort", "index")
    assert page.text_content("#count") == "6 of 92 samples"
    assert page.locator("#detail pre").first.text_content() == f"{MARKUP} What is 0?"
    assert page.locator("#detail b b, #detail img, #detail script, .row b, .row img").count() == 0
    assert page.title() == "mine: samples of one, step 5 and two, step 5"
    page.select_option("#show", "unparsed")
    assert page.locator(".row .name").all_text_contents() == ["numbers q1", "numbers q3"]
    page.select_option("#show", "")
    opened.keys("/")
    page.keyboard.type("six\n")
    assert page.locator(".row .name").all_text_contents() == ["numbers q5"]
    assert page.url.endswith("#task=numbers&sort=index&q=six&item=numbers%3Aq5")
    opened.visit("#task=numbers&show=truncated")  # an address that somebody sent
    assert page.locator(".row .name").all_text_contents() == ["numbers q3"]
    opened.visit("#task=numbers&sort=index&item=numbers:q4")
    assert page.locator("#detail pre").nth(1).text_content() == "\\x1b[31m4\\u{202e}"


def _flag(opened: Opened) -> None:
    """Flag six items by keys, and change one flag twice."""
    page = opened.page
    opened.keys("j", "3", "n")
    page.keyboard.type("six is right\n")
    assert opened.cells("numbers", "one")[-1] == "1 accepted"
    page.select_option("#task", "colours")
    opened.keys("2", "j", "1", "2", "2")  # the second one has no flag in the end
    opened.keys("j", "1")
    page.select_option("#task", "topics")
    opened.keys("2")
    page.select_option("#task", "copa")
    opened.keys("j", "3")
    assert opened.cells("core average", "one")[-1] == "1 accepted"
    page.select_option("#task", "heldout/prose")
    assert page.is_disabled("#detail .buttons button:nth-child(3)")
    opened.keys("k", "2")
    assert page.locator(".row .chip").all_text_contents() == ["ambiguous"]
    page.select_option("#task", "")
    page.select_option("#flag", "flagged")
    assert page.text_content("#count") == "6 of 92 samples"
    assert opened.cells("colours", "one")[-1] == opened.cells("colours", "two")[-1] == "2 excluded"
    assert opened.cells("numbers", "two")[-1] == "1 accepted"  # the second model gave the same answer
    opened.keys("e")


def _import(folder: Path, exported: Path, page_cells: dict[str, list[str]]) -> None:
    """The list has what was made in the page, and the scores of both are equal."""
    assert smalti(["eval", "read", str(folder / "one"), "--import", str(exported)]) == 0
    after: Reading = read(str(folder / "one"))
    assert {name: flag.flag for name, flag in after.applied.flags.items()} == {
        "numbers:q5": "answer-acceptable",
        "colours:0": "ambiguous",
        "colours:2": "label-wrong",
        "topics:0": "ambiguous",
        "copa:1": "answer-acceptable",
        "heldout/prose:0": "ambiguous",
    }
    assert after.applied.flags["numbers:q5"].note == "six is right"
    for score in after.scores:
        if score.task not in page_cells:
            continue
        cells, expected = page_cells[score.task][3:-1], cells_of(score)
        if score.task in ("topics", "heldout/prose"):  # scaled in the page
            assert interval_of(cells[4]) == pytest.approx(interval_of(expected[4]), abs=0.02)
            cells[4] = expected[4]
        assert cells == expected
