"""``smalti train``: what is refused before a process starts, and a real run that is killed and resumed."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_in_process import run_cli
from train_process import losses, train, write_recipe, write_tokens

from smalti.cli.main import run as run_command
from smalti.cli.train.app import _evaluation
from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.data.stream.inputs import read_inputs
from smalti.data.tokens.writer import TokenWriter
from smalti.distributed.group.lost import lost_peer
from smalti.evals.in_loop import heldout_hook
from smalti.track.progress import read_slots, slot_file
from smalti.track.run import RunFolder

DryRun = Callable[..., tuple[int, str, str]]
LIMIT_BYTES = 12_000
"""More than any file of a toy run but its metrics and checkpoints."""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    write_recipe(tmp_path)
    return tmp_path


@pytest.fixture
def dry_run(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Of the recipe in ``work``, in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(work)

    def of(*arguments: str) -> tuple[int, str, str]:
        code = run_command(["train", "r.yaml", "--dry-run", *arguments])
        return code, *capsys.readouterr()

    return of


def test_print_config_starts_nothing(work):
    done = run_cli(work, "train", "r.yaml", "seed=3", "--print-config")
    assert done.stderr == ""
    assert done.returncode == 0
    assert any(line.split() == ["seed:", "3", "#", "command", "line"] for line in done.stdout.splitlines())
    assert not (work / "runs").exists()


@pytest.mark.slow
def test_dry_run_prints_the_plan_and_starts_nothing(work, dry_run):
    code, out, err = dry_run()
    assert code == 0, err
    assert "40 steps x 256 tokens" in out
    assert "2 ranks on cpu" in out
    assert not (work / "runs").exists()


@pytest.mark.usefixtures("no_rehearsal")
@pytest.mark.slow
def test_the_dry_run_tells_what_is_not_by_default(work, dry_run):
    (work / "none.jsonl").write_text("")
    changes = ["data.skip=[[0,10],[0,9]]", "data.takedowns=none.jsonl", "data.fetch.cache=kept"]
    _, out, err = dry_run("data.shuffle.mode=window", "data.stages.1.seq_len=64", *changes)
    for line in (
        "stage 1    from step 32, seq_len 64",
        "shuffle    window: 64 chunks of 524k tokens",
        "skip       positions [0, 10), then [0, 9), each in the positions that remain after those before it",
        "takedowns  0 documents of none.jsonl: the list is empty, so it has no effect",
        "cache      kept, at most 100.0 GiB",
    ):
        assert line in out.splitlines(), out + err
    assert not (work / "kept").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.sources.a=tokens/none"],
         ["data.sources.a = tokens/none does not exist (seen from ", "hint: smalti data tokenize"]),
        (["data.heldout.h=data/demo/tokens/x"], ["data.heldout.h = data/demo", "hint: smalti demo writes it"]),
        (["data.heldout.h=one/heldout"],
         ["no document of this source was held out", "hint: remove it from data.heldout"]),
        (["folder=s3://bucket/run"], ["'s3://bucket/run' is not a local path", "hint: name a folder on a disk"]),
        (["data.sources.a=tokens"], ["data.sources.a = tokens", "holds no token files"]),
        (["folder=r.yaml"], ["r.yaml cannot be written or read: Not a directory", "hint: name another folder"]),
        (["folder=r.yaml/x"], ["r.yaml cannot be written or read: Not a directory"]),
        (["train.parallel.replicate=3"], ["replicate=3 does not divide the 2 ranks", "1, 2", "replicate=2"]),
        (["train.duration=1step"], ["data.stages[1] ends at", "it begins at step 1", "make the run longer"]),
        (["model.vocab_size=300"], ["model.vocab_size=300 is smaller than the 512", "hint: model.vocab_size=512"]),
        (["init_from=nowhere"], ["init_from = nowhere does not exist"]),
        (["data.seq_len=2048", "train.global_batch_tokens=20480", "data.sources.a=tokens/short"],
         ["(tokens/short) has ", "less than one sequence"]),
        (["data.sources.b=tokens/foreign"], ["(tokens/foreign) has tokenizer_digest=cdcd", "by one tokenizer"]),
        (["train.optimizer.lrr=1"], ["did you mean train.optimizer.lr=1?"]),
        (["data.takedowns=none.jsonl"], ["data.takedowns = none.jsonl is not a file", "leave data.takedowns out"]),
        (["data.fetch.cache=r.yaml/x"], ["data.fetch.cache=r.yaml/x cannot be used"]),
        (["data.sources.a={path: numbers, format: raw, files: [t.npy]}"],
         ["source 'a' holds the token id 4,095 at its token 4,095 (numbers); model.vocab_size=512"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(work, overrides, words, monkeypatch, capsys):
    monkeypatch.chdir(work)
    write_tokens(work / "tokens/foreign", 9, tokenizer="cd" * 32)
    with TokenWriter(work / "tokens/short", vocab_size=512, eod_id=0, tokenizer_digest="ab" * 32) as writer:
        writer.add(np.arange(1, 100), 400)
    (work / "numbers").mkdir()
    np.save(work / "numbers/t.npy", np.arange(100_000))
    write_tokens(work / "one/train", 9)
    assert run_command(["train", "r.yaml", *overrides]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert "Traceback" not in said
    assert not (work / "runs").exists()


@pytest.mark.exhaustive
def test_the_dry_run_refuses_the_folder_of_another_run_as_the_run_would(work, dry_run):
    run = work / "runs/t"
    run.mkdir(parents=True)
    shown = run_cli(work, "train", "r.yaml", "--print-config").stdout
    (run / "config.yaml").write_text(shown)
    assert "would start at step 0" in dry_run()[1]
    (run / "checkpoints/step-00000010").mkdir(parents=True)
    (run / "checkpoints/step-00000010/COMPLETE").write_text("")
    assert "would resume from step 10" in dry_run()[1]
    code, _, err = dry_run("train.optimizer.lr=0.5")
    assert code == 2
    assert "holds another run" in err
    assert "train.optimizer.lr: 0.001 -> 0.5" in err


@pytest.mark.usefixtures("no_rehearsal")
@pytest.mark.slow
def test_a_run_that_cannot_be_exported_is_told_before_it_starts(dry_run):
    assert "warning    this run has no tokenizer" in dry_run()[1]
    _, text, _ = dry_run("model.family=decoder", "train.parallel.ranks=1")
    assert "warning    family decoder has no Hugging Face form" in text
    assert "1 rank on" in text


@pytest.mark.usefixtures("no_rehearsal")
@pytest.mark.slow
def test_sources_gone_through_too_often_are_warned_of_as_by_plan_data(work, dry_run, monkeypatch, capsys, caplog):
    """By the dry run, by the start, and by rank 0 where no agent has looked at the data before."""
    long = "train.duration=200step"
    run_command(["plan", "data", "r.yaml", long, "--allow-repeats"])
    lines = re.findall(r"(?m)^warning: (source .*)$", capsys.readouterr().out)
    assert [line.split("'")[1] for line in lines] == ["a", "b"]
    assert re.findall(r"(?m)^warning    (source .*)$", dry_run(long)[1]) == lines
    monkeypatch.setattr("smalti.cli.train.app._as_agent", lambda *_, **__: 0)
    assert run_command(["train", "r.yaml", long]) == 0
    assert re.findall(r"(?m)^warning: (source .*)$", capsys.readouterr().err) == lines
    config = load(RunConfig, "r.yaml", [long]).config
    _evaluation(heldout_hook, config, read_inputs(config.data), None)
    assert [record.message for record in caplog.records if "is repeated for" in record.message] == lines
    capsys.readouterr()  # the log's own lines, where an earlier test has sent the log to stderr
    assert run_command(["train", "r.yaml"]) == 0
    assert "is repeated for" not in capsys.readouterr().err


def test_the_dry_run_refuses_a_run_folder_in_a_store(dry_run):
    code, _, err = dry_run("folder=s3://bucket/run")
    assert code == 2
    assert "'s3://bucket/run' is not a local path" in err


def test_the_dry_run_refuses_stages_that_do_not_fit(dry_run):
    code, _, err = dry_run("train.duration=1step")
    assert code == 2
    assert "data.stages[1] ends at" in err


@pytest.mark.usefixtures("no_rehearsal")
@pytest.mark.slow
def test_a_run_with_a_checkpoint_of_its_own_does_not_need_init_from_any_more(work, dry_run):
    checkpoint = work / "runs/t/checkpoints/step-00000010"
    checkpoint.mkdir(parents=True)
    assert dry_run("init_from=moved")[0] == 2
    (checkpoint / "COMPLETE").write_text("")
    (work / "runs/t/config.yaml").write_text(dump(load(RunConfig, "r.yaml", ["init_from=moved"]).config))
    code, _, err = dry_run("init_from=moved")
    assert code == 0, err


@pytest.mark.parametrize(
    "text",
    [
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36441",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:4: Connection reset by peer",
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:150] write: Broken pipe",
        "Connection refused",
        "Timed out waiting 1800000ms for recv operation to complete",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        "The client socket has timed out after 600000ms while trying to connect to (127.0.0.1, 29500).",
        "[gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure",
        "NCCL error: remote process exited or there was a network error, NCCL version 2.27 ncclRemoteError: ...",
    ],
)
def test_a_rank_that_is_gone_or_silent_is_a_lost_peer(text):
    assert lost_peer(RuntimeError(text))


@pytest.mark.parametrize(
    "text",
    [
        "[enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:454] op.preamble.length <= op.nbytes. 8 vs 4",
        "Default process group has not been initialized, please make sure to call init_process_group.",
        "NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage (run with NCCL_DEBUG=WARN for details)",
        "ProcessGroupGloo::allgather: invalid tensor size at index 1 (expected (4), got (8))",
        "No backend type associated with device type cpu",
    ],
)
def test_a_collective_of_ours_that_does_not_match_is_a_bug(text):
    assert not lost_peer(RuntimeError(text))


def test_a_missing_recipe(work):
    done = run_cli(work, "train", "nowhere.yaml")
    assert done.returncode == 2
    assert "error: there is no file 'nowhere.yaml'" in done.stderr


@pytest.mark.exhaustive
def test_killed_resumed_and_never_killed_give_the_same_losses(work, dry_run):
    recipe = ("r.yaml", "train.duration=100step")  # many steps behind the first checkpoint, which the kill must meet
    assert (done := train(work, *recipe, "name=whole")).returncode == 0, done.stderr
    assert "\nwarning: this run has no tokenizer" in f"\n{done.stderr}"
    assert re.fullmatch(r"runs/whole: done, 100 steps in [0-9.ms]+", done.stderr.splitlines()[-1])
    command = [sys.executable, "-m", "smalti", "train", *recipe, "name=killed"]
    process = subprocess.Popen(command, cwd=work, stderr=subprocess.PIPE, text=True)
    folder, end = RunFolder(work / "runs/killed"), time.monotonic() + 120
    while not (folder.checkpoints / "latest").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, text = process.communicate(timeout=180)
    assert process.returncode == 0
    assert f"rank 1 (pid {children[1]}) was killed by SIGKILL" in text
    assert losses(work / "runs/killed") == losses(work / "runs/whole")
    assert [event["attempt"] for event in folder.events() if event["event"] == "attempt_started"] == [0, 1]
    code, _, err = dry_run(recipe[1], "name=killed", "train.optimizer.lr=0.5")
    assert code == 2
    assert "train.optimizer.lr: 0.001 -> 0.5" in err


@pytest.mark.exhaustive
def test_a_world_that_torchrun_made_is_joined(work):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = train(work, "r.yaml", "name=launched", under=torchrun)
    assert done.returncode == 0, done.stderr
    assert train(work, "r.yaml", "name=started").returncode == 0
    folder = RunFolder.read(work / "runs/launched")
    assert folder.status()["state"] == "done"
    assert losses(folder.path) == losses(work / "runs/started")
    ranks = next(event["ranks"] for event in folder.events() if event["event"] == "auto_resolved")
    assert ranks == 2


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_while_training_is_75_and_no_bug(work):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.RLIM_INFINITY))

    options = ("train.checkpoint.every=1run", "train.log_every=1step", "train.restart.attempts=0")
    done = train(work, "r.yaml", *options, preexec_fn=small_files)
    assert done.returncode == 75, done.stderr
    assert "metrics.jsonl could not be written: File too large" in done.stderr
    assert "run the same command again" in done.stderr
    assert "bug" not in done.stderr
    steps = [line["step"] for line in RunFolder.read(work / "runs/t").metrics()]
    assert steps == list(range(1, len(steps) + 1))
    assert RunFolder.read(work / "runs/t").status()["state"] == "failed"


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_the_first_step_is_143_and_says_that_nothing_was_saved(work, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "smalti", "train", "r.yaml"], cwd=work, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while len(read_slots(slot_file(RunFolder(work / "runs/t", 0).log_folder(), 0))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    # the ranks import torch
    process.send_signal(number)
    _, text = process.communicate(timeout=180)
    assert process.returncode == 143, text
    assert f"error: stopped by {number.name} before the first step; nothing was saved" in text
    assert "Traceback" not in text
