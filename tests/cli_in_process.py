"""Run a ``smalti`` command in the test process, which has imported everything: for commands that start no rank."""

import contextlib
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smalti.cli.main import run


def run_cli(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Exit code and output of ``smalti ARGUMENTS``, run in the folder ``work``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(work), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def output_of(app: Any, *arguments: str) -> str:
    """What a typer app prints on stdout; raises its errors."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def json_of(capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON that was printed since ``capsys`` was last read."""
    return json.loads(capsys.readouterr().out)
