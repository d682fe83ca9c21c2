"""Secrets of launched runs: given by name, found in the environment of the run and nowhere else."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import train_process
from cli_in_process import run_cli
from queued import attempts, controller, state, until_ended

from smalti.base.errors import DataError, UserError
from smalti.config.launch import LaunchConfig
from smalti.fleet.controller import start
from smalti.fleet.launch import code
from smalti.fleet.queue import changes, runs, secret_values
from smalti.fleet.queue.schedule import Room

pytestmark = pytest.mark.usefixtures("home")

STORED, GIVEN = "canary-stored-71f0", "canary-given-2b9c"


def check(work: Path, name: str = "a") -> runs.Run:
    """Queue a run that ends with 0 if it has both secrets."""
    script = f'[ "$STORED_KEY" = {STORED[::-1]} ] || true; echo "$STORED_KEY $GIVEN_KEY" | rev > "$1"'
    command = ["/bin/sh", "-c", script, "sh", str(work / "reversed")]
    launch = LaunchConfig(secrets=("STORED_KEY", "GIVEN_KEY"))
    return changes.add(name, command, launch, Room(cores=1), directory=str(work))


def store(monkeypatch: pytest.MonkeyPatch, work: Path, name: str, value: str) -> None:
    """Store a value as a user does."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(value + "\n"))
    done = run_cli(work, "fleet", "secret", "set", name)
    assert (done.returncode, done.stdout) == (0, f"{name} is stored\n"), done.stderr


@pytest.mark.slow
def test_a_run_gets_its_secrets_and_no_file_has_them(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store(monkeypatch, tmp_path, "STORED_KEY", STORED)
    monkeypatch.setenv("GIVEN_KEY", GIVEN)
    run = check(tmp_path)
    monkeypatch.delenv("GIVEN_KEY")  # the controller was started by another command
    until_ended(controller(), run)
    assert state(run).state == "COMPLETED", attempts(run)
    assert (tmp_path / "reversed").read_text().strip()[::-1] == f"{STORED} {GIVEN}"
    for file in [each for each in tmp_path.rglob("*") if each.is_file() and each.parent != home / "secrets"]:
        assert b"canary" not in file.read_bytes(), file
    assert not list((home / "secrets" / "runs").iterdir()), "the run is completed"
    for name in ("ls", "show"):
        arguments = ("fleet", name, *(["a-1"] if name == "show" else []), "--json")
        assert "canary" not in run_cli(tmp_path, *arguments).stdout
    assert "canary" not in capfd.readouterr().out


def test_files_are_for_their_owner_alone(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(monkeypatch, tmp_path, "STORED_KEY", STORED)
    monkeypatch.setenv("GIVEN_KEY", GIVEN)
    run = check(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (home / "secrets").rglob("*")}
    assert modes == {"STORED_KEY": 0o600, "runs": 0o700, f"{run.number}.json": 0o600}
    assert (home / "secrets").stat().st_mode & 0o777 == 0o700
    os.chmod(home / "secrets" / "STORED_KEY", 0o644)
    with pytest.raises(DataError, match="others may read"):
        secret_values.values(run.number, run.secrets)


def test_a_name_without_a_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(monkeypatch, tmp_path, "STORED_KEY", STORED)
    with pytest.raises(UserError, match="GIVEN_KEY is neither") as caught:
        check(tmp_path)
    assert "smalti fleet secret set GIVEN_KEY" in (caught.value.hint or "") or "STORED_KEY" in (caught.value.hint or "")
    assert run_cli(tmp_path, "fleet", "ls", "--json").stdout.strip() == "[]"


def test_stored_secrets_are_listed_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none" in run_cli(tmp_path, "fleet", "secret", "ls").stdout
    store(monkeypatch, tmp_path, "STORED_KEY", STORED)
    assert json.loads(run_cli(tmp_path, "fleet", "secret", "ls", "--json").stdout) == ["STORED_KEY"]
    assert run_cli(tmp_path, "fleet", "secret", "rm", "STORED_KEY").returncode == 2
    assert "did you mean STORED_KEY?" in run_cli(tmp_path, "fleet", "secret", "rm", "STORED_KEI", "--yes").stderr
    assert run_cli(tmp_path, "fleet", "secret", "rm", "STORED_KEY", "--yes").returncode == 0
    assert secret_values.stored() == []
    for name in ("../x", "A B", "1A", "A;touch pwned"):
        assert run_cli(tmp_path, "fleet", "secret", "set", name).returncode == 2


def test_a_launched_recipe_records_the_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ensure", lambda: None)
    monkeypatch.setattr(code, "git_state", lambda folder: {"commit": "c0ffee", "dirty": False})
    monkeypatch.setenv("GIVEN_KEY", GIVEN)
    train_process.write_recipe(tmp_path, train_process.one_rank())
    done = run_cli(tmp_path, "fleet", "launch", "r.yaml", "secrets=[GIVEN_KEY]")
    assert done.returncode == 0, done.stderr
    run = runs.read("t-1")
    assert run.secrets == ("GIVEN_KEY",)
    assert "GIVEN_KEY" in (run.recipe or "")
    assert GIVEN not in (run.recipe or "") + done.stdout + done.stderr
    assert run_cli(tmp_path, "fleet", "launch", "r.yaml", "name=b", "secrets=[NO_SUCH]").returncode == 2
