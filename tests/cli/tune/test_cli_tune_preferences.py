"""``smalti tune preference``: the wrong verb is refused."""

import json
from pathlib import Path

from cli_in_process import run_cli
from tiny_runs import tiny_run

RECIPE = """
base: dpo
init_from: runs/tiny
tune:
  examples: {files: [pairs.jsonl]}
  preference: {reference: live}
train: {global_batch_tokens: 768}
"""


def test_the_wrong_verb_is_refused(tmp_path: Path) -> None:
    tiny_run(tmp_path, context=384)
    rows = [{"prompt": f"add {n} and 1", "chosen": str(n + 1), "rejected": str(n)} for n in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(RECIPE)
    result = run_cli(tmp_path, "tune", "sft", "r.yaml")
    assert result.returncode == 2
    assert "r.yaml is a recipe with a section tune.preference, not for 'smalti tune sft'" in result.stderr
    assert "smalti tune preference r.yaml" in result.stderr
