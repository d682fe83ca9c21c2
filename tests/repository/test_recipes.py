"""The recipes of CONTRIBUTING.md for one more optimizer, format, family, metric and tracker: a dummy of each is added
to a copy of the package in the two places that its recipe names, and works."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLMO2 = (ROOT / "smalti/model/zoo/olmo2.py").read_text()
FAMILY = OLMO2.replace("olmo2", "dummy").replace("Olmo2", "Dummy").replace('            "qk_norm": "full",\n', "")
Edit = Callable[[str], str]


def add_name(alias: str) -> Edit:
    """Add ``dummy`` to ``alias = Literal[...]``."""
    return lambda text: substitute(rf"^({alias} = Literal\[)", r'\1"dummy", ', text)


def add_row(table: str, row: str) -> Edit:
    """Add a row at the head of ``table: ... = {`` or ``(``."""
    return lambda text: substitute(rf"^({table}: .* = [{{(]\n)", rf"\1    {row},\n", text)


def substitute(pattern: str, new: str, text: str) -> str:
    text, n_found = re.subn(pattern, new, text, count=1, flags=re.MULTILINE)
    assert n_found == 1, f"no {pattern}"
    return text


READER = '''"""The format ``dummy``: files of numbers in two bytes."""
import numpy as np
from smalti.data.sources.readers.index import Index, SourceFolder
from smalti.data.sources.readers.sharded_source import Facts, FlatLayout, ShardedSource
from smalti.data.sources.readers.shards import Shard, StoredFile, StoredShards

def read_index(folder: SourceFolder) -> Index:
    return Index("dummy", {"bytes": folder.files.size("tokens.dummy")})

def open_source(folder: SourceFolder, index: Index) -> ShardedSource:
    size = index.facts["bytes"]
    stored = StoredShards(folder.files, [Shard(StoredFile("tokens.dummy", size))])
    facts = Facts("digest", "nothing", None, None)
    return ShardedSource(stored, FlatLayout(np.dtype("<u2"), [0]), np.array([size // 2]), facts, None)
'''

TRACKER = '''"""The tracker ``dummy``: it prints."""
class TRACKER:
    name = "dummy"
    place = {"folder": "nowhere"}
    def __init__(self, config, run): pass
    def check(self): pass
    def open(self): return {}
    def send(self, rows): print("sent", [dict(row.values) for row in rows])
    def close(self, state, end_s): print("closed", state)
'''

RECIPES: dict[str, dict[str, list[Edit]]] = {
    "An optimizer": {
        "smalti/config/optimizer.py": [
            add_name("OptimizerName"),
            add_row("OPTIMIZERS", '"dummy": Optimizer(0, update_values=3, has_eps=False, defaults={"eps": None})'),
        ],
        "smalti/train/optim.py": [
            add_row("BUILDERS", '"dummy": lambda groups, config: torch.optim.SGD(groups, lr=config.lr, fused=True)')
        ],
    },
    "A token format": {
        "smalti/config/token_formats.py": [
            add_name("FormatName"),
            add_row("FORMATS", '"dummy": TokenFormat(suffixes=(".dummy",))'),
        ],
        "smalti/data/sources/readers/dummy.py": [lambda _: READER],
    },
    "A model family": {
        "smalti/config/families.py": [
            add_name("FamilyName"),
            add_row("FAMILIES", '"dummy": FamilyOptions(_EVERY | _ROTARY, {"norm_placement": "post"})'),
        ],
        "smalti/model/zoo/dummy.py": [
            lambda _: FAMILY
        ],
    },
    "A metric": {
        "smalti/track/names.py": [add_row("TABLE", 'Metric("loss/train/dummy", "tokens", "sum", "Targets.")')],
        "smalti/train/loss.py": [
            lambda text: substitute(
                r"^( +)(return total, counted)", r'\1metrics["loss/train/dummy"] = counted.sum()\n\1\2', text
            )
        ],
    },
    "A tracker": {
        "smalti/config/track.py": [add_name("SinkName")],
        "smalti/track/sinks/dummy.py": [lambda _: TRACKER],
    },
}  # fmt: skip

CHECKS = {
    "An optimizer": """
from smalti.config.optimizer import OptimizerConfig
from smalti.train.optim import build_optimizer
model = torch.nn.Linear(2, 1, bias=False)
before = model.weight.detach().clone()
optimizer = build_optimizer(model, OptimizerConfig(name="dummy", lr=0.5, weight_decay=0))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert torch.equal(model.weight, before - 0.5)
""",
    "A token format": """
from smalti.config.data import FetchConfig, SourceConfig
from smalti.data.sources.open import open_source, read_index
Path("tokens").mkdir()
np.arange(100, dtype="<u2").tofile("tokens/tokens.dummy")
config = SourceConfig(path="tokens")
source = open_source(config, read_index(config, FetchConfig()), FetchConfig())
rows = np.empty((2, 3), "<u2")
source.read_rows(np.array([0, 50]), rows)
assert rows.tolist() == [[0, 1, 2], [50, 51, 52]]
""",
    "A model family": """
from smalti.model import huggingface
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
shape = ModelConfig(family="dummy", norm_placement="post", **SHAPE)
model = Decoder(shape)
init_weights(model, shape, 1)
huggingface.save(model, "saved")
ids = torch.tensor([[1, 2, 3]])
loaded = huggingface.load("saved")
assert loaded.config == shape, (loaded.config, shape)
assert json.loads(Path("saved/config.json").read_text())["model_type"] == "dummy"
weights = loaded.decoder.state_dict()
assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
""",
    "A metric": """
from smalti.config.train import LossConfig
from smalti.model.decoder import Decoder
from smalti.model.init import init_weights
from smalti.track import names
from smalti.train.batches import Microbatch
from smalti.train.loss import LanguageLoss
shape = ModelConfig(**SHAPE)
model = Decoder(shape)
init_weights(model, shape, 1)
ids = torch.tensor([[1, 2, 3]])
_, _, metrics = LanguageLoss(shape, LossConfig())(model, microbatch(ids))
names.check(metrics)
assert metrics["loss/train/dummy"] == 3
""",
    "A tracker": """
import contextlib, io
from smalti.config.track import TrackConfig
from smalti.track import trackers
Path("run").mkdir()
Path("run/config.yaml").write_text("name: run")
line = {"step": 1, "time": "2026-01-01T00:00:00+00:00", "loss/train/total": 2.5}
Path("run/metrics.jsonl").write_text(json.dumps(line) + chr(10))
class Events:
    def write(self, kind, **fields): pass
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    trackers.close(trackers.follow(TrackConfig(sinks=("dummy",)), "run", Events()), "done")
assert printed.getvalue().split(chr(10))[:2] == ["sent [{'loss/train/total': 2.5}]", "closed done"], printed.getvalue()
""",
}

HEAD = """
import json, sys, traceback
from pathlib import Path
import numpy as np, torch
from smalti.config.model import ModelConfig
SHAPE = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "max_position_embeddings": 16}
def microbatch(ids):
    from smalti.train.batches import Microbatch
    given = {"inputs": ids, "targets": ids, "positions": torch.arange(3)[None]}
    return Microbatch(**{name: given.get(name) for name in Microbatch._fields})
results = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, dict(globals()))
        results[name] = ""
    except BaseException:
        results[name] = traceback.format_exc()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Recipe -> its traceback, empty where the dummy works; all in one process, because it starts slowly."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "smalti", folder / "smalti", ignore=shutil.ignore_patterns("__pycache__"))
    for recipe in RECIPES.values():
        for file, edits in recipe.items():
            path = folder / file
            text = path.read_text() if path.exists() else ""
            for edit in edits:
                text = edit(text)
            path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", HEAD],
        input=json.dumps(CHECKS),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_dummy_added_by_the_recipe_works(results: dict[str, str], name: str) -> None:
    assert results[name] == ""


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_names_the_two_files(name: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = text[text.index(f"- **{name}**") :].partition("\n- **")[0]
    assert len(RECIPES[name]) == 2
    for file in RECIPES[name]:
        assert f"`{file.replace('dummy', 'NAME')}`" in recipe or (
            name == "A metric" and "where it is computed" in recipe
        )
