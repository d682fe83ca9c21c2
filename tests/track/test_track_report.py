"""The report: from the run folder alone, complete and escaped, also for a killed run."""

import html.parser
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from synthetic_run import metric_rows, write_lines, write_run

from smalti.base.errors import DataError
from smalti.track.report import write_report
from smalti.track.report.curves import mixture_chart
from smalti.track.report.read import read_run, smooth

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "link", "line", "rect", "circle", "path", "polygon", "br"}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "demo")


class Checker(html.parser.HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_page_holds_every_part(run_folder: Path) -> None:
    path = write_report(run_folder)
    assert path == str(run_folder / "report.html")
    text = Path(path).read_text()
    for part in (
        "Loss, nats per token (dashed: resumed)",
        "held-out: prose",
        "Mixture: share of tokens",
        "Learning rate",
        "Tokens per second",
        "Model FLOPs utilisation",
        "gzip -9 1.810",
        "not distinguishable from chance",
        "rank_died",
        "global_batch_tokens: 8192",
        "6.1M",
        "2.4M active",
        "of 830 GFLOP/s",
        "provides a simple interface",
    ):
        assert part in text, part


def test_an_eval_in_the_timeline_is_words_and_not_json(run_folder: Path) -> None:
    metrics = {f"metrics/eval/{one}/bits_per_byte": bits for one, bits in (("code", 2.8124), ("prose", 2.9816))}
    metrics |= {"metrics/eval_ema/code/bits_per_byte": 2.7}
    loss = {"metrics/eval/code/LanguageCrossEntropy": 6.0}
    with (run_folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "eval", "step": 7, "metrics": {**loss, **metrics}}) + "\n")
        file.write(json.dumps({"event": "eval", "step": 8, "metrics": loss}) + "\n")
        file.write(json.dumps({"event": "odd", "metrics": {"a": 1.5}, "codes": [0, 1], "more": {"b": "<"}}) + "\n")
    text = Path(write_report(run_folder)).read_text()
    timeline = text[text.index("<h2>Timeline") : text.index("<h2>Config")]
    for words in (
        "step 7, code 2.812, prose 2.982, code (EMA) 2.700 bits/byte",
        "code 6.000 nats/token",
        "codes 0 1, more b &lt;, a 1.5",
    ):
        assert words in timeline
    assert "{" not in timeline


def test_training_loss_is_the_mean_of_the_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "demo")
    write_lines(folder / "metrics.jsonl", [{"step": n, "loss/train/total": 9.0 if n < 99 else n - 96.0}
                                           for n in range(1, 101)])  # fmt: skip
    assert read_run(folder).tail_mean("loss/train/total", frac=0.05) == pytest.approx((9 * 3 + 3 + 4) / 5)
    assert "mean of the last 5 % of steps" in Path(write_report(folder)).read_text()


def test_partial_averages_are_named(run_folder: Path) -> None:
    prefix = "icl/metrics/eval_gauntlet"
    scores = {f"{prefix}/copa": 0.6, f"{prefix}/core_average": 0.2, f"{prefix}/core_average/n_missing": 29}
    write_lines(run_folder / "metrics.jsonl", [{"step": 1, "time/token": 64, **scores}])
    path = run_folder / "evals/demo/2026-03-01T12-07-00.000Z/results.json"
    mean = {"value": 0.125, "interval": None, "n": 3, "partial": "partial: without squad"}
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"gauntlet": {"categories": {"world_knowledge": mean | {"n": 1}}, "core_average": mean}}
        )
    )
    text = Path(write_report(run_folder)).read_text()
    assert "Partial averages: core_average (without 29); the benchmarks that they have: copa." in text
    for cell in ("0.125", "world knowledge", "1 task<", "3 categories<"):
        assert cell in text, cell
    assert "partial: without squad" in text
    assert text.count(": score over tokens") == 4  # a title and a label of each of two


def test_page_is_well_formed_and_escaped(run_folder: Path) -> None:
    text = Path(write_report(run_folder)).read_text()
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.seen
    assert "&lt;/pre&gt;&lt;script&gt;" in text
    assert "Read &lt;b&gt;lines&lt;/b&gt; &amp; more" in text


def test_page_needs_nothing_from_outside(run_folder: Path) -> None:
    text = Path(write_report(run_folder)).read_text()
    assert not re.search(r"(src|href)=[\"'](?!data:)|url\(|@import|https?://", text)


def test_equal_folders_give_equal_pages(run_folder: Path) -> None:
    first = Path(write_report(run_folder)).read_text()
    assert Path(write_report(run_folder)).read_text() == first


def test_counted_parameters_win_over_events(run_folder: Path) -> None:
    text = Path(write_report(run_folder, parameters=(7_000_000, 7_000_000))).read_text()
    assert "<dd>7M</dd>" in text
    assert "6.1M" not in text.split("<h2>Timeline")[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "missing", ["config.yaml", "metrics.jsonl", "events.jsonl", "evals", "samples.jsonl", "status.json"]
)
def test_any_part_may_be_missing(run_folder: Path, missing: str) -> None:
    path = run_folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    checker = Checker()
    checker.feed(Path(write_report(run_folder)).read_text())
    assert checker.open == []


def test_run_killed_while_writing(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    write_lines(folder / "metrics.jsonl", metric_rows(7))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss/tra')
    (folder / "status.json").write_text('{"state": "runn')
    text = Path(write_report(folder)).read_text()
    assert "<dt>Steps</dt><dd>7 " in text
    assert "Not evaluated yet" in text


def test_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: young\n")
    assert "No step has been logged yet" in Path(write_report(tmp_path)).read_text()


def test_values_of_the_wrong_kind_break_nothing(run_folder: Path) -> None:
    results = next(run_folder.glob("evals/*/*/results.json"))
    results.write_text(json.dumps({"tasks": {"a": {"metric": "bits_per_byte", "value": None, "interval": [None, 1]}}}))
    write_lines(run_folder / "metrics.jsonl", [{"step": 1, "loss/train/total": None}, {"step": "x"}, {"step": 2}])
    (run_folder / "config.yaml").write_text("[: not yaml")
    assert "no data" in Path(write_report(run_folder)).read_text()


def test_not_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no run folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path)


def test_a_step_written_twice_is_one_row(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "a": 1, "b": 1}, {"step": 2, "a": 2}, {"step": 1, "a": 9}])
    run = read_run(tmp_path)
    assert run.series("a") == ([1.0, 2.0], [9.0, 2.0])
    assert run.last("b") == 1


def test_the_mixture_has_few_spans_of_many_sequences(tmp_path: Path) -> None:
    """A share among few sequences changes from span to span, which is unreadable in a small chart."""
    for steps, spans in ((40, 1), (2000, 48)):
        folder = write_run(tmp_path / str(steps), steps=steps)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["data"] = {**(config.get("data") or {}), "seq_len": 4096}  # two sequences a step
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        chart = mixture_chart(read_run(folder))
        assert chart is not None
        areas = re.findall(r'<(?:polygon|path)[^>]*(?:points|d)="([^"]*)"', chart)
        assert areas
        corners = max(len(re.findall(r"[\d.]+[ ,][\d.]+", area)) for area in areas)
        assert corners <= 4 * (spans + 1)


def test_answers_to_questions_are_folded_below_the_texts(run_folder: Path) -> None:
    page = Path(write_report(run_folder)).read_text()
    samples = page[page.index("<h2>Samples</h2>") :]
    texts, folded, questions = samples.partition("<details><summary>Answers to ")
    assert folded
    assert "Generated by the model" in texts
    assert "arithmetic" not in texts
    assert "arithmetic" in questions


def test_newest_samples_are_shown(run_folder: Path) -> None:
    write_lines(run_folder / "samples.jsonl", [{"prompt": f"p{n}.", "completion": "c"} for n in range(20)])
    assert [sample["prompt"] for sample in read_run(run_folder).samples] == [f"p{n}." for n in range(19, 7, -1)]


@pytest.mark.parametrize(
    ("duration", "steps"),
    [("600step", "600"), ("2e6tok", "245"), ("5min", "?"), ("null", "?"), ("[1]", "?"), ("1e999tok", "?")],
)
def test_steps_of_the_whole_run(run_folder: Path, duration: str, steps: str) -> None:
    config = run_folder / "config.yaml"
    config.write_text(config.read_text().replace("600step", duration))
    assert f"<dd>600 <small>of {steps}</small>" in Path(write_report(run_folder)).read_text()


def test_newest_results_of_a_suite(run_folder: Path) -> None:
    old = next(run_folder.glob("evals/demo/*"))
    shutil.copytree(old, old.with_name("2026-02-01T00-00-00.000Z"))
    assert [result.time for result in read_run(run_folder).evals] == [old.name]


def test_smoothing_keeps_a_constant_and_passes_gaps() -> None:
    smoothed = smooth([2.0, 2.0, float("nan"), 2.0], window=10)
    assert smoothed[:2] == pytest.approx([2.0, 2.0])
    assert smoothed[2] != smoothed[2]
    assert smoothed[3] == pytest.approx(2.0)


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(run_folder: Path, scheme: str, tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("neither chromium nor chromium-browser nor google-chrome is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    path = Path(write_report(run_folder))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme=scheme)
        problems: list[str] = []
        requests: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.mouse.move(600, 600)
        shot = page.screenshot(path=str(tmp_path / f"report-{scheme}.png"), full_page=True)
        overflow = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        page.set_viewport_size({"width": 390, "height": 800})
        narrow = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
        browser.close()
    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert len(shot) > 50_000
    assert not overflow
    assert not narrow


def _with_experts(folder: Path, layers: int, experts: int = 8) -> str:
    """The report of the synthetic run with metrics of experts; layer i is the more uneven the larger i is."""
    rows = metric_rows(40)
    for row in [row for row in rows if "loss/train/total" in row]:
        for layer in range(layers):
            row[f"moe/load_imbalance/layer{layer}"] = 1 + layer / 10
            row[f"moe/router_entropy/layer{layer}"] = 0.9
            row[f"moe/dead_experts_frac/layer{layer}"] = 0.0
        load = {f"moe/load/layer{layer}": [1.0] * (experts - 1) + [0.0] for layer in range(layers)}
        rows.append({"step": row["step"], **load})
    write_lines(folder / "metrics.jsonl", rows)
    return Path(write_report(folder)).read_text()


def test_experts_have_a_section_with_a_heatmap_of_each_layer(run_folder: Path) -> None:
    text = _with_experts(run_folder, 3)
    section = text[text.index("<h2>Experts") : text.index("<h2>Evaluation")]
    assert [layer for layer in range(9) if f"Layer {layer}: load of each expert" in section] == [0, 1, 2]
    assert section.count("<figure>") == 6
    assert "are not shown" not in section
    assert "at 0: expert 7" in section
    checker = Checker()
    checker.feed(text)
    assert checker.open == []


def test_of_many_layers_the_most_uneven_are_shown(run_folder: Path) -> None:
    text = _with_experts(run_folder, 9)
    assert [layer for layer in range(9) if f"Layer {layer}: load of each expert" in text] == [3, 4, 5, 6, 7, 8]
    assert "3 of 9 layers are not shown" in text


def test_a_collapse_is_named_above_its_charts_and_in_the_timeline(run_folder: Path) -> None:
    with (run_folder / "events.jsonl").open("a") as file:
        event = {"event": "router_collapsed", "step": 120, "layers": [0, 2], "hint": "train.optimizer.lr=<1"}
        file.write(json.dumps(event) + "\n")
    text = Path(write_report(run_folder)).read_text()
    assert "have collapsed: step 120, layers 0 2. hint: train.optimizer.lr=&lt;1" in text
    assert "step 120, layers 0 2, hint train.optimizer.lr=&lt;1" in text[text.index("<h2>Timeline") :]


def test_a_run_that_recorded_no_layers_has_the_chart_of_all(run_folder: Path) -> None:
    text = Path(write_report(run_folder)).read_text()
    assert text.count("Busiest expert over the average") >= 1
    assert "load of each expert" not in text
    rows = [{key: value for key, value in row.items() if not key.startswith("moe/")} for row in metric_rows(10)]
    write_lines(run_folder / "metrics.jsonl", rows)
    assert "<h2>Experts" not in Path(write_report(run_folder)).read_text()
