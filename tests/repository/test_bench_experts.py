"""The study of experts compares what it says it does: equal FLOPs, equal active parameters, each at its best rate."""

import argparse
import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from bench_script import ROOT, bench

from smalti.config.model import MoEConfig
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count
from smalti.train import job
from smalti.train.recorder import NotFinite

sys.path.append(str(ROOT / "bench"))

from experts_study import corpus, figures, runs, settings
from experts_study.order import all_runs, best_rate, next_runs
from experts_study.settings import DECIDING, KINDS, Place, Run, Size

PLACE = Place(Path("runs"), Path("tokens"))


@pytest.fixture(scope="module")
def experts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_experts", ROOT / "bench" / "experts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def study(tmp_path: Path) -> runs.Study:
    place = Place(tmp_path / "runs", tmp_path / "tokens")
    return runs.Study(Size(), 3, 1, place, data={"code/train": "d"}, code="c", commit="abc", machine="m")


def test_experts_are_kept_in_balance_as_in_the_demo() -> None:
    recipe = yaml.safe_load((ROOT / "smalti/config/recipes/demo-moe.yaml").read_text())["model"]["moe"]
    demo = MoEConfig.model_validate(recipe)
    assert {name: getattr(demo, name) for name in settings.MOE} == settings.MOE


@pytest.mark.parametrize("size", [Size(), settings.QUICK])
def test_equal_flops_and_equal_active_parameters(size: Size) -> None:
    steps = size.lengths[0].steps
    configs = {kind: settings.config_of(PLACE, size, Run(kind, steps, 4e-3, 1)) for kind in KINDS}
    step = {kind: train_flops_per_token(config.model, size.seq_len) for kind, config in configs.items()}
    dense = count(configs["dense"].model)
    for kind, config in configs.items():
        params = count(config.model)
        rest = steps * step["dense"] - config.length.total_steps * step[kind]
        assert 0 <= rest < step[kind], "as many whole steps as the dense model's FLOPs allow"
        assert params.active - params.router == dense.active
        assert params.mlp_active == dense.mlp
        assert (config.seed, config.data) == (1, configs["dense"].data)
        assert config.train.optimizer == configs["dense"].train.optimizer
        if config.model.moe is not None:
            assert config.model.moe.norm_topk_prob == (kind != "1 of 8"), "one normalised weight has no gradient"


def test_every_kind_is_measured_as_often_at_each_length() -> None:
    for length in Size().lengths:
        for kind in length.kinds:
            config = settings.config_of(PLACE, Size(), Run(kind, length.steps, 4e-3, 0))
            every = int(config.train.eval_every.removesuffix("step"))
            assert math.ceil(config.length.total_steps / every) == length.evaluations


def simulated(size: Size, best: dict[str, float], seeds: int = 3) -> dict[Run, float]:
    """Scores of a whole study in which each kind has its lowest loss at its rate in ``best``."""
    scores: dict[Run, float] = {}
    while called := next_runs(scores, size, seeds, 1):
        scores |= {run: 2 + abs(math.log(run.lr / best.get(run.kind, 3e-3))) for run in called}
    return scores


def test_the_best_rates_reach_the_next_length_with_all_seeds_and_edges_are_extended() -> None:
    size = Size()
    scores = simulated(size, {"dense": 9e-3, "4 of 16": 0.4e-3})
    tried = {(kind, length.steps): {run.lr for run in scores if (run.kind, run.steps) == (kind, length.steps)}
             for kind in KINDS for length in size.lengths}  # fmt: skip
    assert tried["2 of 8", 256] == {1e-3, 2e-3, 4e-3, 8e-3}
    assert tried["dense", 256] == {1e-3, 2e-3, 4e-3, 8e-3, 16e-3}
    assert tried["4 of 16", 256] == {0.25e-3, 0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3}
    assert tried["2 of 8", 1024] >= {2e-3, 4e-3}
    assert tried["dense", 4096] == {8e-3}
    assert tried["2 of 8", 4096] == set()
    for kind in DECIDING:
        for length in size.lengths:
            best = best_rate(scores, kind, length, 1)
            seeds = {run.seed for run in scores if (run.kind, run.steps, run.lr) == (kind, length.steps, best)}
            assert seeds == set(range(max(3, length.min_seeds)))


def test_the_forecast_of_all_runs_holds_those_that_are_finished() -> None:
    size = Size()
    scores = simulated(size, {})
    assert set(all_runs(scores, size, 3, 1)) == set(scores)
    part = dict(list(scores.items())[:10])
    expected = all_runs(part, size, 3, 1)
    assert set(part) < set(expected)
    assert abs(len(expected) - len(scores)) <= 2 * len(KINDS)


def test_a_rate_that_diverged_is_never_the_best() -> None:
    length = Size().lengths[0]
    scores = {Run("dense", 256, 1e-3, 0): 3.0, Run("dense", 256, 8e-3, 0): math.nan}
    assert best_rate(scores, "dense", length, 1) == 1e-3
    scores[Run("dense", 256, 4e-3, 0)] = 2.5
    assert best_rate(scores, "dense", length, 1) == 4e-3
    scores[Run("dense", 256, 4e-3, 2)] = math.inf
    assert best_rate(scores, "dense", length, 1) == 1e-3, "a seed of the table diverged"


@pytest.mark.parametrize("limit", [3e-3, 0.0])
def test_a_study_with_rates_that_diverge_ends(
    study: runs.Study, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    results: dict[Run, runs.Result] = {}
    while called := next_runs(runs.scores(results), study.size, 3, 1):
        results |= {run: {"bits_per_byte": [None if run.lr > limit else 2 - run.lr]} for run in called}
    assert {run.lr for run in results if run.kind == "2 of 8" and run.seed == 2} == ({2e-3} if limit else set())
    assert figures.grid(study, results)["1048576"]["dense"]["0.004"] is None
    assert min(run.lr for run in results) == (1e-3 if limit else 0.125e-3)
    if not limit:
        figures.show(study, results, {})
        assert "| dense | diverged |" in capsys.readouterr().out


def test_a_run_that_diverges_is_finished(study: runs.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object, **__: object) -> None:
        raise NotFinite(7, math.nan, 1.0)

    monkeypatch.setattr(job, "run", diverge)
    run = Run("dense", 256, 1e-3, 0)
    result = runs.train(study.config(run), "abc", "m")
    assert "loss is nan at step 7" in result["diverged"]
    assert result == study.result(run)
    assert runs.scores({run: result}) == {run: math.inf}


def test_a_result_is_kept_over_commits_but_not_over_changes_of_settings_data_or_code(
    study: runs.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("4 of 16", 256, 1e-3, 0)
    path = runs.result_path(study.config(run))
    assert path == runs.result_path(replace(study, commit="def", machine="other", seeds=5).config(run))
    changed = [
        replace(study, code="d"),
        replace(study, data={"code/train": "e"}),
        replace(study, size=replace(study.size, layers=5)),
        replace(study, size=replace(study.size, eval_tokens=1024)),
    ]
    monkeypatch.setitem(settings.MOE, "z_loss_coef", 0.5)
    others = [runs.result_path(study.config(run)), *(runs.result_path(other.config(run)) for other in changed)]
    assert path not in others
    dense = Run("dense", 256, 1e-3, 0)
    monkeypatch.setitem(settings.MOE, "z_loss_coef", 0.25)
    before = runs.result_path(study.config(dense))
    monkeypatch.undo()
    assert before == runs.result_path(study.config(dense)), "settings of MoEs leave the dense runs as they are"


def test_the_digest_of_code_ignores_comments_and_docstrings(tmp_path: Path) -> None:
    file = tmp_path / "smalti/model/decoder.py"
    file.parent.mkdir(parents=True)
    digests = []
    for text in ('"""A."""\ndef f():\n    return 1\n', '"""B."""\n\n\ndef f():\n    """C."""\n    return 1  # D\n',
                 '"""A."""\ndef f():\n    return 2\n'):  # fmt: skip
        file.write_text(text)
        digests.append(runs.code_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]
    assert all(list(ROOT.glob(pattern)) for pattern in runs.CODE)


def test_finished_runs_are_read_and_the_missing_ones_called_for(study: runs.Study) -> None:
    first = next_runs({}, study.size, 3, 1)
    path = runs.result_path(study.config(first[0]))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"bits_per_byte": [2.5, 2.0], "commits": ["abc"]}))
    assert runs.scores(study.results()) == {first[0]: 2.0}


def test_an_unfinished_study_continues_from_recorded_runs(study: runs.Study, tmp_path: Path) -> None:
    first, second = next_runs({}, study.size, 3, 1)[:2]
    kept = runs.by_name(study, {first: {"bits_per_byte": [2.0]}, second: {"bits_per_byte": [3.0]}})
    elsewhere = replace(
        study, place=Place(tmp_path / "elsewhere", tmp_path / "other"), recorded=json.loads(json.dumps(kept))
    )
    assert runs.scores(elsewhere.results()) == {first: 2.0, second: 3.0}
    assert replace(elsewhere, code="changed").results() == {}


def test_a_step_that_was_repeated_after_a_stop_counts_once(study: runs.Study) -> None:
    config = study.config(Run("dense", 256, 1e-3, 0))
    Path(config.run_folder).mkdir(parents=True)
    rows = [{"step": step, "time/token": step * 100, "time/train": hours} for step, hours in ((1, 1), (2, 2), (2, 3))]
    rows.append({"step": 2, "metrics/eval/code/bits_per_byte": 1.0, "metrics/eval/prose/bits_per_byte": 2.0})
    (Path(config.run_folder) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runs.read(config)
    assert (result["eval_steps"], result["bits_per_byte"]) == ([2], [0.75 * 1.0 + 0.25 * 2.0])
    assert result["tokens_per_s"] == pytest.approx(200 / (3 * 3600))
    rows.append({"step": 2, "metrics/eval/code/bits_per_byte": None})
    (Path(config.run_folder) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert runs.read(config)["bits_per_byte"] == [None], "not finite"


def test_interval_of_three_by_hand() -> None:
    mean, half = figures.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert figures.interval([2.0]) == (2.0, math.inf)


def test_flops_for_a_loss_by_a_power_law() -> None:
    points = [(flops, 8 * flops**-0.5) for flops in (1.0, 4.0, 16.0)]
    assert figures.flops_for(points, 8 * 2**-0.5) == pytest.approx(2.0)
    assert figures.flops_for(points, 8 * 64**-0.5) == pytest.approx(64.0), "beyond the lengths"
    assert figures.flops_for([(1.0, 2.0), (4.0, 2.1)], 1.9) is None


def filled(study: runs.Study) -> dict[Run, runs.Result]:
    """Results of a whole study in which dense falls as a power law and 4 of 16 needs half its FLOPs."""
    scores = simulated(study.size, {})
    results = {}
    configs = {
        (run.kind, run.steps): settings.config_of(study.place, study.size, run) for run in scores if run.seed == 0
    }
    for run, score in scores.items():
        config = configs[run.kind, run.steps]
        flops = train_flops_per_token(config.model, study.size.seq_len) * study.size.batch_tokens
        steps, times = config.length.total_steps, 2.0 if run.kind == "4 of 16" else 1.0
        count_of = settings.evaluations_of(study.size, run.steps)
        at = [steps * (i + 1) // count_of for i in range(count_of)]
        losses = [(score - 1) * 30 * (times * flops * step) ** -0.1 + 0.001 * run.seed for step in at]
        results[run] = {
            "eval_steps": at, "bits_per_byte": losses, "by_source": {"code": 1.0, "prose": 2.0},
            "flops_per_step": flops, "tokens_per_s": 1000.0, "train_s": 1.0, "commits": ["abc"], "machine": "m",
        }  # fmt: skip
    return results


def test_figures_of_a_whole_study(study: runs.Study, experts: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    results = filled(study)
    result = experts.figures_of(study, {"packages": []}, results)
    assert list(result["lengths"]) == ["1048576", "4194304", "16777216"]
    assert list(result["arms"]) == list(DECIDING)
    row = result["arms"]["4 of 16"]
    assert row["less_than_dense"] > 0
    assert row["dense_flops_ratio"] == pytest.approx(2.0, rel=0.02)
    assert row["dense_flops_extrapolated"]
    assert json.loads(json.dumps(result))["size"]["lengths"][2]["kinds"] == list(DECIDING)
    assert len(result["gains"]["4 of 16"]["gain"]) == 16
    assert all(gain > 0 for gain in result["gains"]["4 of 16"]["gain"])
    figures.show(study, results, {"4 of 16": {"time_per_flop": 1.5}})
    printed = capsys.readouterr().out
    assert "4 of 16: 1.50 times dense" in printed
    pictures = figures.pictures(study, results)
    assert all("no data" not in svg and svg.startswith("<svg") for svg in pictures.values())


@pytest.mark.parametrize("commit", ["abc-dirty", "unknown"])
def test_runs_of_changed_checkouts_are_not_recorded(experts: ModuleType, commit: str) -> None:
    results = {Run("dense", 1, 1.0, seed): {"commits": commits} for seed, commits in enumerate((["a"], ["b", "a"]))}
    assert experts.commits_of(results) == ["a", "b"]
    results[Run("dense", 1, 1.0, 2)] = {"commits": ["a", commit]}
    with pytest.raises(SystemExit, match="not recorded"):
        experts.commits_of(results)


def test_missing_packages_are_named(experts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("apt-get")

    monkeypatch.setattr(subprocess, "run", absent)
    options = argparse.Namespace(quick=False, seeds=3, grid_seeds=1, show=False, recorded=False)
    with pytest.raises(SystemExit, match=r"calibre could not be downloaded: apt-get\nhint: run this on Debian 12"):
        experts.study_of(options, tmp_path)


def test_too_little_data_for_the_longest_run_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data-debian-2048").mkdir()
    sources = {name: {"train": {"n_tokens": 12_000_000}} for name in settings.SHARES}
    (tmp_path / "data-debian-2048/corpus.json").write_text(json.dumps({"sources": sources}))
    with pytest.raises(corpus.NoData, match="code: 12,000,000 unique tokens, and the longest run reads 12,582,912"):
        corpus.prepare(tmp_path, Size(), {})


def test_a_study_is_continued_with_the_same_versions_of_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], cwd: Path, **_: object) -> None:
        assert command == ["apt-get", "download", "-q", "python3-django=3:3.2.25-0+deb12u7"]
        (cwd / "python3-django_3%3a3.2.25-0+deb12u7_all.deb").touch()

    monkeypatch.setattr(subprocess, "run", download)
    (tmp_path / "python3-django_3%3a3.2.25-0+deb12u8_all.deb").touch()
    found = corpus.package(tmp_path, "python3-django", "3:3.2.25-0+deb12u7")
    assert found.name == "python3-django_3%3a3.2.25-0+deb12u7_all.deb"


def test_recorded_runs_are_shown_without_their_data(study: runs.Study) -> None:
    row = {"eval_steps": [256], "bits_per_byte": [2.2]}
    recorded = replace(study, recorded={"dense-256-lr0.001-0": row})
    assert recorded.results() == {}, "a result of other data"
    assert replace(recorded, only_recorded=True).results() == {Run("dense", 256, 1e-3, 0): row}


def test_recorded_seeds_are_those_that_every_kind_has(study: runs.Study) -> None:
    length = Size().lengths[-1]
    ends = {(kind, seed): 2 - seed / 10 for kind in DECIDING for seed in range(5)}
    del ends["dense", 3]
    results = {Run(kind, length.steps, 4e-3, seed): {"bits_per_byte": [end]} for (kind, seed), end in ends.items()}
    assert figures.best_runs(study, results, "4 of 16", length) == [], "six are called for"
    recorded = replace(study, only_recorded=True)
    for kind in DECIDING:
        found = [run["bits_per_byte"] for run in figures.best_runs(recorded, results, kind, length)]
        assert found == [[2.0], [1.9], [1.8], [1.6]]


def test_show_prepares_no_data(experts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = tmp_path / "data-debian-2048" / "raw"
    unfinished.mkdir(parents=True)
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(experts, "machine", lambda: {"processor": "p", "gpu": "g"})
    monkeypatch.setattr(sys, "argv", ["experts.py", "--show", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="data-debian-2048 has no finished data"):
        experts.main()
    sources = {name: {split: {"n_tokens": 20_000_000, "digest": "d"} for split in ("train", "heldout")}
               for name in settings.SHARES}  # fmt: skip
    (tmp_path / "data-debian-2048/corpus.json").write_text(json.dumps({"sources": sources}))
    with pytest.raises(SystemExit, match="no run of this code and these settings is finished"):
        experts.main()
    assert [path.name for path in tmp_path.iterdir()] == ["data-debian-2048"]
    assert unfinished.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--record"], "leave out --quick"),
        (["--quick", "--picture"], "leave out --quick"),
        (["--show", "--picture"], "--picture needs all runs"),
    ],
)
def test_results_are_replaced_only_by_those_of_a_whole_study(
    experts: ModuleType,
    study: runs.Study,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr(experts, "PICTURES", ROOT / "no" / "pictures")
    monkeypatch.setattr(experts, "study_of", lambda *_: (study, {}))
    monkeypatch.setattr(runs.Study, "results", lambda _: {Run("dense", 256, 1e-3, 0): {"bits_per_byte": [2.0]}})
    monkeypatch.setattr(sys, "argv", ["experts.py", "--folder", str(tmp_path / "study"), *arguments])
    with pytest.raises(SystemExit) as ended:
        experts.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_quick_run_prints_a_row_for_each_and_is_not_repeated(tmp_path: Path) -> None:
    tables = [bench("experts.py", "--quick", "--folder", str(tmp_path), *more) for more in ([], ["--show"])]
    for table in tables:
        rows = [line.split(" | ") for line in table.splitlines() if line.count(" | ") == 8]
        names = [row[0].removeprefix("| ") for row in rows if row[0] not in ("|", "| ---", "| ")]
        assert names == [*KINDS, *DECIDING]
        assert all(0 < float(row[6].split(" ± ")[0]) < 9 for row in rows if "±" in row[6])
    assert "1 of 8: " in tables[0]
