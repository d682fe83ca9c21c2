"""The model card of tuning runs: data, loss, template and parents, of every kind of tuning."""

import json
from pathlib import Path
from typing import Any

from tiny_runs import tiny_run, tiny_tokenizer

from smalti.config.load import dump, load
from smalti.config.run import RunConfig
from smalti.data.examples import Example
from smalti.data.examples.folder import write_examples
from smalti.distributed.checkpoint import card

KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sft": ({"tune": {}}, ["| loss | cross-entropy of the answers |", "| in the loss | all messages of assistant |"]),
    "preference": ({"tune": {"preference": {"loss": "kto"}}}, ["| loss | kto, beta 0.1 |"]),
    "reward": (
        {"tune": {"reward": {}}, "model": {"num_labels": 1}},
        ["| loss | Bradley-Terry, over scores of pairs |", "A reward model of", "pipeline_tag: text-classification"],
    ),
    "distill": ({"tune": {"distill": {"teacher": "models/large"}}}, ["forward divergence from models/large"]),
    "adapter": (
        {"tune": {}, "adapter": {"rank": 4, "quantize": "nf4"}},
        ["| trained | adapters (LoRA) of rank 4 on attention, mlp, beside nf4 weights |"],
    ),
}


def test_the_card_of_each_kind_of_tuning(tmp_path: Path) -> None:
    base = tiny_run(tmp_path)
    plain = load(RunConfig, str(base)).config.model_dump(mode="json")
    (base / "config.yaml").write_text(dump(RunConfig.model_validate({**plain, "init_from": "models/base"})))
    folder = tmp_path / "examples"
    write_examples(folder, [Example((([5, 6, 7, 8, 9], [0, 0, 1, 1, 1]),), {}, "a")], tiny_tokenizer())
    run = tmp_path / "runs/tuned"
    run.mkdir()
    bits = "metrics/eval/validation/bits_per_byte"
    rows = [{"step": 0, bits: 2.0}, {"step": 4, "data/mix/examples/tokens": 128, bits: 1.5}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"sources": {"examples": str(folder)}, "stages": [{"weights": {"examples": 1}}], "seq_len": 32}
    for changes, expected in KINDS.values():
        tune = {**changes["tune"], "examples": {"files": ["answers.jsonl"], "template": "chatml"}}
        model = {**plain["model"], **changes.get("model", {})}
        tree = {**plain, **changes, "tune": tune, "model": model, "data": data, "init_from": str(base)}
        config = RunConfig.model_validate(tree)
        (run / "config.yaml").write_text(dump(config))
        text = card.model_card(run, config, 4, "fp32")
        for line in (
            *expected,
            "| examples | answers.jsonl |",
            "| chat template | chatml |",
            f"| parents | {base}, from models/base |",
            "| examples | 128 | 5 (3 in the loss) |",
            "## Before and after tuning",
        ):
            assert line in text, line
        assert "Continued pretraining" not in text
