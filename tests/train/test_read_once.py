"""Four ranks: one reads the files that all need, and each reads its own part of the weights."""

import os
import sys
from collections import Counter
from pathlib import Path

import pytest
import toy_run
from gloo_ranks import run_ranks
from tiny_runs import tiny_tokenizer

from smalti.evals.in_loop import heldout_hook
from smalti.train import job

READ_BY_ONE = ("manifest.json", "train_state.json", "index.json", "COMPLETE", "latest", "tokenizer.json", "config.yaml")


def _opened(rank: int, root: str) -> Counter[str]:
    """Files below ``root`` that this rank opened to read while it built its job, by path."""
    opened: Counter[str] = Counter()

    def look(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and not _writes(args):
            opened[os.path.realpath(os.fspath(args[0]))] += 1

    config = toy_run.config(Path(root), duration="12step").model_copy(update={"name": "dense"})
    data = config.data.model_copy(update={"heldout": {"code": f"{root}/tokens/code"}, "tokenizer": f"{root}/tokenizer"})
    config = config.model_copy(update={"data": data})
    sys.addaudithook(look)
    built = job.build(config, origins={})
    heldout_hook(config, built.indexes, built.mesh)
    assert built.state.step == (0 if not Path(f"{root}/saved").exists() else 12)
    if built.state.step == 0:
        job.fit(built)
    result = dict(opened)
    return Counter({path.removeprefix(root): n for path, n in result.items() if path.startswith(root)})


def _writes(args: tuple[object, ...]) -> bool:
    mode, flags = args[1], args[2]
    by_mode = isinstance(mode, str) and bool(set(mode) & set("wax+"))
    return by_mode or (isinstance(flags, int) and bool(flags & os.O_WRONLY))


@pytest.mark.slow
def test_manifests_states_and_tokenizers_are_read_by_one_rank_of_four(tmp_path):
    root = os.path.realpath(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    for name in ("code", "prose"):
        toy_run.write_tokens(tmp_path / "tokens" / name, digest=tokenizer.digest)
    for resumes in (False, True):
        ranks = run_ranks(4, _opened, root)
        for path in sorted(set().union(*ranks)):
            readers = [rank for rank, opened in enumerate(ranks) if opened[path]]
            if Path(path).name in READ_BY_ONE:
                assert readers in ([], [0]), f"{path} was opened by ranks {readers}"
        names = {Path(path).name for opened in ranks for path in opened}
        assert "manifest.json" in names
        assert not resumes or {"index.json", "train_state.json", "COMPLETE"} <= names
        (tmp_path / "saved").touch()
