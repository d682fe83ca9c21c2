"""The lock file is plain pins, the core stays small, and make's tasks are there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_constraints_are_plain_pins():
    for line in PINS:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), line
    assert "torch==2.13.0" in PINS
    assert len({canonical(line.partition("==")[0]) for line in PINS}) == len(PINS)


def test_every_direct_dependency_is_pinned():
    pinned = {canonical(line.partition("==")[0]) for line in PINS}
    wanted = [
        *PROJECT["dependencies"],
        *(entry for extra in PROJECT["optional-dependencies"].values() for entry in extra),
    ]
    for requirement in wanted:
        name = canonical(re.split(r"[\[<>=~! ]", requirement, maxsplit=1)[0])
        assert name == "smalti" or name in pinned, f"{requirement} is not in constraints.txt; hint: make lock"


def test_training_needs_the_core_only():
    core = {canonical(re.split(r"[\[<>=~! ]", entry, maxsplit=1)[0]) for entry in PROJECT["dependencies"]}
    assert core == {
        "torch",
        "numpy",
        "pydantic",
        "pyyaml",
        "typer",
        "rich",
        "fsspec",
        "safetensors",
        "xxhash",
        "psutil",
    }


@pytest.mark.parametrize("task", ["install", "demo", "test", "prove", "check", "bench", "gpu", "docs", "clean"])
def test_make_offers_the_task(task):
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(rf"^make {task} +\S", done.stdout, re.MULTILINE)


def test_make_prove_takes_a_name_as_second_word():
    done = subprocess.run(["make", "-n", "prove", "order"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "SMALTI_PROVE_NAME=order" in done.stdout
    assert "-k order" in done.stdout
