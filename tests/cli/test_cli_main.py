"""The command as a process: help is fast and imports little, errors are three lines with the right code."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smalti.base.errors import CheckFailed, DataError, Interrupted, RetryableError, UserError
from smalti.cli import main as command

HEAVY = ("torch", "pydantic", "rich", "numpy", "typer", "yaml", "fsspec")


def smalti(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "smalti", *arguments],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **environment}, timeout=60, check=False,
    )  # fmt: skip


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, contextlib, io\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return {name.split(".")[0] for name in done.stderr.split()}


def test_help_imports_nothing_heavy_and_is_fast():
    loaded = modules_after("from smalti.cli.main import run\nrun(['--help'])")
    assert not loaded & set(HEAVY)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = smalti("--help")
        times.append(time.perf_counter() - started)
    assert done.returncode == 0
    assert min(times) < 0.3
    for word in (*command.VERBS, "75", "143", "--version", "start here: smalti demo"):
        assert word in done.stdout


@pytest.mark.parametrize("verb", sorted(command.VERBS))
def test_every_verb_has_help_with_an_example_and_no_torch(verb, capsys):
    code = f"from smalti.cli.main import run\nassert run(['{verb}', '--help']) == 0"
    loaded = modules_after(code)
    assert not loaded & {"torch", "pydantic", "rich"}
    assert command.run([verb, "--help"]) == 0
    text = capsys.readouterr().out
    if "Commands:" in text:
        verbs = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.startswith("  ")
                 and line[2] != " "]  # fmt: skip
        assert verbs
        assert command.run([verb, verbs[0], "--help"]) == 0
        text = capsys.readouterr().out
    assert f"smalti {verb}" in text.split("Example")[1]


def test_version():
    from smalti import __version__

    assert smalti("--version").stdout == f"smalti {__version__}\n"


def test_an_unknown_verb_is_answered_with_the_nearest():
    done = smalti("trian")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: 'trian' is not a verb of smalti",
        f"allowed: {', '.join(command.VERBS)}",
        "hint: did you mean 'smalti train'?",
    ]
    assert "'--verbose' is not an option" in smalti("--verbose").stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("x", allowed="y", hint="z"), 2),
        (DataError("x", allowed="y", hint="z"), 2),
        (CheckFailed("x", allowed="y", hint="z"), 3),
        (RetryableError("x", allowed="y", hint="z"), 75),
        (Interrupted("x", allowed="y", hint="z"), 130),
    ],
)
def test_our_errors_are_three_lines_and_their_code(capsys, error, code):
    def fail() -> None:
        raise error

    assert command.guarded(fail, "smalti t") == code
    assert capsys.readouterr().err == "error: x\nallowed: y\nhint: z\n"


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EACCES, 2, ["a/b cannot be written or read: Permission denied", "allowed: ", "hint: name another"]),
        (errno.EROFS, 2, ["a/b cannot be written: Read-only file system", "or make this one writable"]),
        (errno.ENOTDIR, 2, ["Not a directory"]),
        (errno.EEXIST, 2, ["File exists"]),
        (errno.ENAMETOOLONG, 2, ["File name too long"]),
        (errno.ENOSPC, 75, ["the disk is full: a/b could not be", "hint: free space"]),
        (errno.EIO, 75, ["the disk fails"]),
        (errno.EDEADLK, 1, ["this is a bug in Smalti"]),
    ],
)
def test_what_the_system_refuses_is_no_bug(capsys, tmp_path, monkeypatch, number, code, words):
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path))

    def fail() -> None:
        raise OSError(number, os.strerror(number), "a/b")

    assert command.guarded(fail, "smalti t") == code
    text = capsys.readouterr().err
    for word in words:
        assert word in text
    assert ("bug" in text) == (code == 1)


def test_a_refusal_that_is_about_no_file_is_a_bug(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path))

    def fail() -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    assert command.guarded(fail, "smalti t") == 1


def test_ctrl_c_is_130(capsys):
    def fail() -> None:
        raise KeyboardInterrupt

    assert command.guarded(fail, "smalti t") == 130


def test_a_bug_is_1_short_and_its_traceback_is_kept(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path))
    monkeypatch.delenv("SMALTI_DEBUG", raising=False)

    def fail() -> None:
        raise ZeroDivisionError("canary")

    assert command.guarded(fail, "smalti t") == 1
    text = capsys.readouterr().err
    assert "this is a bug in Smalti: ZeroDivisionError: canary" in text
    assert "Traceback" not in text
    assert "Traceback" in (tmp_path / "last-error.log").read_text()
    monkeypatch.setenv("SMALTI_DEBUG", "1")
    assert command.guarded(fail, "smalti t") == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_traceback_of_any_error_is_in_the_log_of_the_process(capsys, tmp_path):
    from smalti.base import log

    def fail() -> None:
        raise UserError("canary")

    log.setup("INFO", file=str(tmp_path / "rank-000.log"))
    try:
        command.guarded(fail, "smalti t")
    finally:
        log.setup()
    assert "Traceback" in (tmp_path / "rank-000.log").read_text()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_debug_works_with_any_verb_at_any_place(tmp_path):
    done = smalti("config", "show", "nowhere", "--debug", SMALTI_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "error: there is no recipe file or recipe named 'nowhere'" in done.stderr


def test_usage_errors_are_2_with_the_help_to_type():
    done = smalti("train")
    assert done.returncode == 2
    assert done.stderr == "error: Missing argument 'RECIPE'.\nhint: smalti train --help\n"
    assert smalti("config", "shwo").returncode == 2
    assert "Usage: smalti config" in smalti("config").stderr


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m smalti config schema | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("{\n", "")


COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a verb": ["plan", "--help"],
    "help of a command": ["plan", "memory", "--help"],
    "JSON": ["config", "schema"],
    "YAML": ["config", "show", "demo"],
    "a table": ["plan", "hardware"],
    "a table as JSON": ["plan", "hardware", "--json"],
    "plain lines": ["train", "demo", "--print-config"],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_reader_of_its_results_a_command_ends_quietly_with_0(name):
    done = _without_readers(["stdout"], COMMANDS[name])
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("arguments", "code"), [(["config", "show", "nowhere"], 2), (["nonsense"], 2), (["train"], 2)])
def test_without_a_reader_of_its_errors_the_code_is_the_same(arguments, code):
    assert _without_readers(["stdout", "stderr"], arguments).returncode == code


def _without_readers(streams: list[str], arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    """The command with a pipe that nobody reads in place of ``streams``: every write fails, not only some."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(
            [sys.executable, "-m", "smalti", *arguments], timeout=60, check=False,
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **dict.fromkeys(streams, writing)},
        )  # fmt: skip
    finally:
        os.close(writing)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_pipe_that_breaks_elsewhere_is_not_taken_for_our_output(capsys, tmp_path, monkeypatch, wrapped):
    """As of a socket; typer makes a SystemExit of each."""
    monkeypatch.setenv("SMALTI_HOME", str(tmp_path))

    def fail() -> None:
        try:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        except BrokenPipeError:
            if wrapped:
                sys.exit(1)
            raise

    assert command.guarded(fail, "smalti t") == 1
    assert "this is a bug in Smalti: BrokenPipeError" in capsys.readouterr().err


def test_a_verb_that_is_to_come_says_so_and_what_does_it_now(capsys):
    assert command.run(["runs", "sweep", "x.yaml"]) == 2
    assert capsys.readouterr().err == (
        "error: 'smalti runs sweep' is not implemented yet\n"
        "hint: smalti fleet launch RECIPE --sweep a.b=VALUE,VALUE queues a run for each; smalti runs diff compares\n"
    )
    assert command.run(["plan", "ladder"]) == 2
    assert "'smalti plan ladder' is not implemented yet\nhint: smalti plan budget" in capsys.readouterr().err
    assert command.run(["eval", "arena"]) == 2
    assert "'smalti eval arena' is not implemented yet\nhint: smalti eval --help" in capsys.readouterr().err
    assert command.run(["tuen"]) == 2
    assert "'tuen' is not a verb of smalti\nallowed: demo, plan" in capsys.readouterr().err


def test_what_is_to_come_is_not_there():

    from smalti.cli.not_yet import NOT_YET

    for name in NOT_YET:
        verb, _, inner = name.partition(" ")
        if not inner:
            assert verb not in command.VERBS
            continue
        app = command.app_of(verb)
        assert inner not in {one.name or one.callback.__name__ for one in app.registered_commands}
        assert inner not in {group.name for group in app.registered_groups}


@pytest.mark.exhaustive
def test_config_schema_and_show_and_diff(tmp_path):
    schema = json.loads(smalti("config", "schema").stdout)
    assert "train" in schema["properties"]
    assert "sources" in json.loads(smalti("config", "schema", "curate").stdout)["properties"]
    assert "did you mean curate?" in smalti("config", "schema", "curat").stderr
    assert "dbrx" in smalti("config", "show").stdout
    recipe = tmp_path / "c.yaml"
    recipe.write_text("sources: {a: {path: x}}\noutput: o\n")
    shown = smalti("config", "show", "c.yaml", "seed=3", "--kind", "curate", cwd=tmp_path)
    assert "output: o" in shown.stdout
    assert "# c.yaml:2" in shown.stdout
    done = smalti("config", "diff", "c.yaml", "c.yaml", "seed=3", "--kind", "curate", cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == "identity:\n  seed: 17 -> 3\n"
    assert smalti("config", "diff", "c.yaml", "c.yaml", "--kind", "curate", cwd=tmp_path).returncode == 0


@pytest.mark.slow
def test_after_an_error_threads_of_the_engine_do_not_change_the_exit_code():
    code = (
        "import atexit, sys, threading, time, types; sys.modules['daft'] = types.ModuleType('daft')\n"
        "atexit.register(print, 'tidied up')\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "from smalti.cli.main import main; main(['data', 'curate', 'nowhere.yaml'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (2, "tidied up\n")
    assert "nowhere.yaml" in done.stderr
