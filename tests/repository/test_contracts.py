"""The import contracts hold, and a planted breach of each is caught and named."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

LAYERS = "packages are layered"
DATA_LAYERS = "the packages of data are layered"
COST_LAYERS = "the modules of cost are layered"
DISTRIBUTED_LAYERS = "the packages of distributed are layered"
NO_TORCH = "no torch below data and model, directly or not"
DATA_NUMPY = "data hands out numpy: no torch, directly or not"
NO_DIRECT_TORCH = "no direct torch in cli and fleet (probes run as child processes)"
STARTS_COMMANDS = "fleet reaches training only by starting the smalti command"
NO_TRANSFORMERS = "only the check of an export imports transformers"

BREACHES = [
    ("smalti/model/planted.py", "import smalti.train", LAYERS),
    ("smalti/train/planted.py", "import smalti.evals", LAYERS),
    ("smalti/train/planted.py", "import smalti.serve", LAYERS),
    ("smalti/serve/planted.py", "import smalti.train", LAYERS),
    ("smalti/model/planted.py", "import smalti.distributed", LAYERS),
    ("smalti/data/order/planted.py", "import smalti.model", LAYERS),
    ("smalti/cost/memory/planted.py", "import smalti.track", LAYERS),
    ("smalti/train/planted.py", "import smalti.plan", LAYERS),
    ("smalti/base/planted.py", "import smalti.config", LAYERS),
    ("smalti/fleet/planted.py", "import smalti.cli", LAYERS),
    ("smalti/attic/__init__.py", "", LAYERS),
    ("smalti/data/order/planted.py", "import smalti.data.stream", DATA_LAYERS),
    ("smalti/data/attic/__init__.py", "", DATA_LAYERS),
    ("smalti/cost/memory/planted.py", "import smalti.cost.layout", COST_LAYERS),
    ("smalti/cost/attic/__init__.py", "", COST_LAYERS),
    ("smalti/distributed/group/planted.py", "import smalti.distributed.parallel", DISTRIBUTED_LAYERS),
    ("smalti/data/order/planted.py", "import torch", DATA_NUMPY),
    ("smalti/plan/planted.py", "import torch", NO_TORCH),
    ("smalti/track/planted.py", "def late():\n    import torch", NO_TORCH),
    ("smalti/fleet/planted.py", "import torch", NO_DIRECT_TORCH),
    ("smalti/cli/planted.py", "from torch import nn", NO_DIRECT_TORCH),
    ("smalti/fleet/planted.py", "import smalti.train", STARTS_COMMANDS),
    ("smalti/fleet/planted.py", "import smalti.model", STARTS_COMMANDS),
    ("smalti/model/planted.py", "import transformers", NO_TRANSFORMERS),
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "smalti", folder / "smalti", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def broken(output: str) -> set[str]:
    return {line.partition(" BROKEN")[0] for line in output.splitlines() if " BROKEN" in line}


@pytest.mark.slow
def test_contracts_hold(pristine):
    done = lint(pristine)
    assert done.returncode == 0, done.stdout


def _first(breach: tuple[str, str, str]) -> bool:
    """Of its contract: the others are slow tests, because every one reads the package anew."""
    return breach == next(one for one in BREACHES if one[2] == breach[2])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("file", "text", "contract"),
    [pytest.param(*one, marks=() if _first(one) else pytest.mark.slow) for one in BREACHES],
)
def test_planted_breach_is_named(pristine, file, text, contract):
    path = pristine / file
    new_folder = not path.parent.exists()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + "\n")
    try:
        done = lint(pristine)
    finally:
        path.unlink()
        if new_folder:
            shutil.rmtree(path.parent)
    assert done.returncode == 1, done.stdout
    assert contract in broken(done.stdout), done.stdout
    assert "planted" in done.stdout or "attic" in done.stdout


@pytest.mark.slow
def test_a_probe_may_import_torch(pristine):
    folder = pristine / "smalti" / "fleet" / "probes"
    path = folder / "planted.py"
    added = [] if folder.exists() else [folder / "__init__.py"]
    folder.mkdir(exist_ok=True)
    for new in added:
        new.write_text("")
    path.write_text("import torch\n")
    try:
        done = lint(pristine)
    finally:
        path.unlink()
        if added:
            shutil.rmtree(folder)
    assert done.returncode == 0, done.stdout


def test_every_torch_free_package_stands_in_a_contract():
    held = {package for contract in CONTRACTS for package in contract.get("source_modules", [])}
    for package in ("base", "config", "cost", "plan", "track", "data", "cli", "console", "fleet"):
        if (ROOT / "smalti" / package).is_dir():
            assert f"smalti.{package}" in held
    starters = next(contract for contract in CONTRACTS if contract["name"] == STARTS_COMMANDS)
    for package in ("tune",):
        if (ROOT / "smalti" / package).is_dir():
            assert f"smalti.{package}" in starters["forbidden_modules"]
