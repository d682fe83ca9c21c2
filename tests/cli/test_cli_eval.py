"""``smalti eval`` as it is typed: a run, a folder from elsewhere with another tokenizer, and what is refused."""

import json
from pathlib import Path

import pytest
from tiny_models import llama_config, tiny_model
from tiny_runs import TEXTS, add_checkpoint, tiny_run

from smalti.base.errors import UserError
from smalti.cli.eval.run import _print_truncated, _require_effect
from smalti.cli.main import run as smalti
from smalti.config.eval import EvalConfig
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.distributed.checkpoint.export import export
from smalti.model.huggingface import save_folder

QUICK = ["n=4", "shots=1", "resamples=20"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("eval"))
    export(run)
    return run


def test_a_run_prints_a_table_and_keeps_the_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "run", str(run), *QUICK]) == 0
    out = capsys.readouterr().out
    for text in ("heldout/code", "bits per byte", "gzip -9", "xz -9", "arithmetic", "chance 0.100", "brackets"):
        assert text in out, text
    stored = json.loads(next(run.glob("evals/demo/*/results.json")).read_text())
    assert (stored["model"], stored["step"], stored["seq_len"]) == ("tiny", 20, 32)
    assert stored["compute_dtype"] == stored["tasks"]["heldout/code"]["compute_dtype"] == "fp32"
    assert "| heldout/code | bits per byte |" in (run / "export/README.md").read_text()
    assert stored["tasks"]["heldout/code"]["n_bytes"] == sum(len(text.encode()) for text in TEXTS[:2])


def test_json_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "run", str(run), "--json", "tasks=[brackets]", "n=4", "shots=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["tasks"]) == ["brackets"]
    assert found["config"]["n"] == 4


def test_a_foreign_model_is_measured_on_the_same_bytes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer(train_bpe(["quite another text " * 5], 270), "<|endoftext|>")
    config = llama_config(vocab_size=tokenizer.vocab_size)
    save_folder(tmp_path / "other", config, tiny_model(config).state_dict(), eod_id=tokenizer.eod_id)
    tokenizer.save(tmp_path / "other")
    heldout = load(RunConfig, str(run)).config.data.heldout["code"]
    arguments = ["eval", "run", str(tmp_path / "other"), "--suite", "heldout", f"heldout.code={heldout}", "--json"]
    assert smalti(arguments) == 0
    score = json.loads(capsys.readouterr().out)["tasks"]["heldout/code"]
    assert score["n_bytes"] == sum(len(text.encode()) for text in TEXTS[:2])
    assert score["n_tokens"] == sum(len(tokenizer.encode(text)) + 1 for text in TEXTS[:2])
    assert smalti(arguments[:-1]) == 0
    assert "not saved; --output FOLDER keeps" in capsys.readouterr().out
    assert smalti([*arguments[:-1], "--output", str(tmp_path / "results")]) == 0
    folder = capsys.readouterr().out.partition("read the samples: smalti eval read ")[2].strip()
    assert [f"{folder}/samples.jsonl"] == [str(path) for path in tmp_path.glob("results/evals/heldout/*/samples.jsonl")]


def test_an_old_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run(tmp_path)
    export(run)
    add_checkpoint(run, load(RunConfig, str(run)).config, 40)
    assert smalti(["eval", "run", str(run)]) == 2
    err = capsys.readouterr().err
    assert "is of step 20; the newest checkpoint is of step 40" in err
    assert f"hint: smalti export {run}" in err
    export(run)
    assert smalti(["eval", "run", str(run), "tasks=[brackets]", "n=4", "shots=1"]) == 0


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--suite", "demp"], ("there is no suite 'demp'", "did you mean --suite demo?")),
        (["seeds=3"], ("seeds", "seed")),
        (["n=none"], ("n", "none")),
        (["tasks=[arithmetics]"], ("arithmetics",)),
        (["tasks=[brackets]", "max_bytes=9"], ("max_bytes has no effect on brackets", "hint: remove it")),
        (["limit=3"], ("limit has no effect on heldout, arithmetic, brackets (suite demo)",)),
        (["tasks=[brackets]", "task_shots=1"], ("task_shots has no effect",)),
        (["tasks=[brackets]", "--output", "/proc/x"], ("--output /proc/x cannot be made",)),
        (["tasks=brackets"], ("hint: 'tasks=[brackets]'",)),
        (["tasks=[none.yaml]"], ("there is no task file none.yaml",)),
        (["tasks=[rows.jsonl]"], ("is a file of rows", "'tasks=[mine.yaml]'")),
    ],
)
def test_bad_requests_exit_2(
    run: Path, arguments: list[str], texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert smalti(["eval", "run", str(run), *arguments]) == 2
    err = capsys.readouterr().err
    for text in texts:
        assert text in err


def test_an_interrupted_evaluation_says_what_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("smalti.evals.suite.run", interrupt)
    assert smalti(["eval", "run", str(run), "tasks=[brackets]"]) == 130
    assert "interrupted; finished tasks are kept" in capsys.readouterr().err
    assert smalti(["eval", "run", str(run), "tasks=[brackets]", "--no-cached"]) == 130
    assert "hint: without --no-cached finished tasks are kept" in capsys.readouterr().err


def test_a_checkpoint_is_no_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "run", str(run / "checkpoints/step-00000020")]) == 2
    assert f"hint: smalti export {run} --step 20 --output FOLDER" in capsys.readouterr().err


def test_tasks_of_lm_eval_read_few_options() -> None:
    config = EvalConfig(suite="lm-eval", tasks=("piqa",))
    _require_effect(config, ["limit=5", "tasks=[piqa]", "seq_len=64"])
    _require_effect(EvalConfig(tasks=("needle_64",)), ["n=5"])
    with pytest.raises(UserError, match="shots has no effect on needle_64"):
        _require_effect(EvalConfig(tasks=("needle_64",)), ["shots=5"])
    with pytest.raises(UserError, match=r"shots has no effect on piqa \(suite lm-eval\)"):
        _require_effect(config, ["limit=5", "shots=5"])


def test_the_gauntlet_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "data"
    (folder / "world_knowledge").mkdir(parents=True)
    rows = [{"query": f"q{i}", "choices": ["a", "b", "c", "d"], "gold": i % 4} for i in range(6)]
    (folder / "world_knowledge/arc_easy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"data={folder}", "limit=4", "seq_len=90"]
    assert smalti(["eval", "run", str(run), "--suite", "gauntlet", *arguments]) == 0
    out = capsys.readouterr().out
    for text in (
        "arc_easy",
        "world knowledge",
        "1 of 6 tasks",
        "1 of 5 categories",
        "partial: without jeopardy, bigbench_qa_wikidata, arc_challenge, mmlu, triviaqa_sm_sub",
        "and 4 more",
        "no average of programming",
        "missing: mmlu",
    ):
        assert text in out, text
    assert smalti(["eval", "run", str(run), "tasks=[arc_easy]", "mode=v0.3", *arguments, "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["tasks"]["arc_easy"]
    assert (score["n"], score["chance"], score["mode"]) == (4, 0.25, "v0.3")
    assert {"accuracy", "stderr", "interval"} <= set(score)
    assert smalti(["eval", "run", str(run), "tasks=[arc_easy]", *arguments, "shots=0"]) == 2
    assert "hint: task_shots is for tasks of files" in capsys.readouterr().err
    assert smalti(["eval", "run", str(run), "tasks=[arc_easy]", *arguments, "task_shots=0", "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["tasks"]["arc_easy"]
    assert (score["shots"], score["cut_frac"]) == (0, 0.0)
    assert smalti(["eval", "run", str(run), "tasks=[arc_easy]", *arguments, "task_shots=0", "mode=v0.3"]) == 2
    assert "task_shots has no effect in mode v0.3" in capsys.readouterr().err
    assert smalti(["eval", "data", str(folder)]) == 0
    assert "missing" in capsys.readouterr().out
    assert smalti(["eval", "data", str(folder), "--check", "--json"]) == 3
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["files"]) == 39
    assert "39 of 39 files are missing or different" in captured.err


def test_a_hint_where_most_answers_are_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {
        "sums": {"truncated_frac": 0.5, "max_new_tokens": 14},
        "gsm8k": {"truncated_frac": 1.0, "max_new_tokens": 400},  # its file is not the user's
        "mine_answer": {"truncated_frac": 0.75},  # of lm-eval
        "words": {"truncated_frac": 0.4, "max_new_tokens": 9},
        "arc_easy": {},
    }
    _print_truncated(tasks)
    assert capsys.readouterr().out.splitlines() == [
        "sums: 50.0% of the answers end at the token limit, 14",
        "hint: in the task's file, max_new_tokens: 28, or stop: [TEXT], the text that ends an answer",
        "gsm8k: 100.0% of the answers end at the token limit, 400",
        "mine_answer: 75.0% of the answers end at the token limit",
    ]


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["eval", "ls"]) == 0
    assert "arithmetic" in capsys.readouterr().out
    assert smalti(["eval", "ls", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"suites", "tasks", "gauntlet"}


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("run", "ls", "data", "lint"):
        assert smalti(["eval", verb, "--help"]) == 0
        assert f"Example: smalti eval {verb}" in capsys.readouterr().out


@pytest.mark.slow
def test_contamination_of_a_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"query": TEXTS[2], "choices": ["plain", "bare"], "gold": 0, "id": "planted"},
        {"query": "a question about something that is in none of the documents", "choices": ["a", "b"], "gold": 1},
    ]
    Path("task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("task.yaml").write_text("{kind: choice, file: task.jsonl}")
    assert smalti(["eval", "run", str(run), "tasks=[task.yaml]", "--dtype", "fp32", "--output", str(run)]) == 0
    capsys.readouterr()
    command = ["eval", "contamination", str(run), "tasks=[task.yaml, brackets]"]
    assert smalti([*command, "--documents", "listed.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "of dirty" in out
    assert "not checked, because generated or held out: brackets" in out
    assert Path("listed.jsonl").read_text() == '{"source": "code", "document": 2}\n'
    (results,) = [
        path for path in run.glob("evals/demo/*/results.json") if "task" in json.loads(path.read_text())["tasks"]
    ]
    assert json.loads(results.read_text())["tasks"]["task"]["contamination"]["dirty"]["n"] == 1
    assert smalti([*command, "--json", "--results", str(results.parent)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["scanned_tokens"], again["tasks"]["task"]["dirty"]) == (0, 1)
    assert again["scores"]["task"]["contamination"]["clean"]["n"] == 1
    with Path("task.jsonl").open("a") as file:
        file.write(json.dumps(rows[0]))
    assert smalti([*command, "--results", str(results.parent)]) == 2
    assert "has no accuracy of these files" in capsys.readouterr().err
    assert smalti([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] is None
    assert smalti(["eval", "contamination", str(run)]) == 2
    assert "has no task of a file" in capsys.readouterr().err
    assert smalti(["eval", "contamination", str(tmp_path), "tasks=[task.yaml]"]) == 2
