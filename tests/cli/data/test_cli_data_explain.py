"""``smalti data explain`` and ``inspect`` as commands: steps as people count them, runs and recipes, errors."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from cli_in_process import json_of
from example_config import VALUES

from smalti.base.units import format_count
from smalti.cli.main import run
from smalti.cli.plan.data_counts import stage_counts
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.data.order.schedule import Schedule
from smalti.data.order.spans import Span
from smalti.data.stream.stream import Stream
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokenizer.train import train_bpe
from smalti.data.tokens import TokenWriter

TEXTS = [f"document {number} says {'word ' * (7 * number % 40)}and no more" for number in range(60)]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Two sources with ids, a recipe, and a run of it that has done 3 of its steps."""
    monkeypatch.chdir(tmp_path)
    tokenizer = Tokenizer(train_bpe(TEXTS, 280), "<|endoftext|>")
    tokenizer.save(tmp_path / "tokenizer")
    for name, texts in (("code", TEXTS[:20]), ("prose", TEXTS[20:])):
        write(tmp_path / "tokens" / name, tokenizer, texts)
    values = json.loads(json.dumps(VALUES))
    values["model"]["vocab_size"] = 512
    values["data"] |= {"seq_len": 64, "tokenizer": "tokenizer"}
    values["train"] |= {"duration": "6step", "global_batch_tokens": 512}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "attempt": 0, "step": 3}))
    return tmp_path


def write(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> None:
    options = {"vocab_size": 512, "eod_id": tokenizer.eod_id, "tokenizer_digest": tokenizer.digest}
    with TokenWriter(folder, **options) as writer:
        for text in texts:
            writer.add(np.array(tokenizer.encode(text)), len(text), text.partition(" says")[0].replace(" ", "-"))


def test_the_batch_of_a_step(place, capsys):
    assert run(["data", "explain", "runs/small", "--step", "2", "--world-size", "4", "--json"]) == 0
    found = json_of(capsys)
    assert (found["step"], found["sequences"], found["present_step"]) == (2, 8, 3)
    assert found["first_position"] == 8, "step 2 is the second update"
    assert [row["rank"] for row in found["rows"]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(part["id"] == f"document-{part['number'] + 20 * (row['source'] == 'prose')}"
               for row in found["rows"] for part in row["documents"])  # fmt: skip
    assert run(["data", "explain", "runs/small", "--step", "2", "--rank", "3", "--world-size", "4", "--json"]) == 0
    assert [row["row"] for row in json_of(capsys)["rows"]] == [6, 7]
    assert run(["data", "explain", "small", "--step", "2", "--text"]) == 0, "a run's name"
    out = capsys.readouterr().out
    assert "step 2 (done): stage 0, 8 sequences of 64 tokens, positions 8 to 15, on 1 rank" in out
    assert "(document-" in out
    assert "   | " in out


def test_a_row_in_full_by_step_and_by_position(place, capsys):
    assert run(["data", "explain", "recipe.yaml", "--step", "2", "--row", "3", "--text"]) == 0
    by_row = capsys.readouterr().out
    assert "row 3: position 11, rank 0, source " in by_row
    assert "(done)" not in by_row, "a recipe has done nothing"
    assert "tokens of the document" in by_row
    assert run(["data", "explain", "recipe.yaml", "--position", "11", "--text"]) == 0
    assert capsys.readouterr().out == by_row


def test_where_a_document_is_learned(place, capsys):
    for which in ("code:3", "code:document-3", "code:id=document-3"):
        assert run(["data", "explain", "runs/small", "--document", which, "--json"]) == 0
        found = json_of(capsys)
        assert found["document"]["number"] == 3
        assert found["document"]["id"] == "document-3"
    for sighting in found["sightings"]:
        assert sighting["done"] == (sighting["step"] <= 3)
        assert 1 <= sighting["step"] <= 6
        assert run(["data", "explain", "runs/small", "--step", str(sighting["step"]), "--json"]) == 0
        row = json_of(capsys)["rows"][sighting["row"]]
        assert row["position"] == sighting["position"]
        assert 3 in [part["number"] for part in row["documents"]]
    assert run(["data", "explain", "runs/small", "--document", "code:3", "--text"]) == 0
    out = capsys.readouterr().out
    assert "document 3 (document-3) of code" in out
    assert "   | document 3 says" in out
    assert "up to step 3, the last one done" in out


def test_what_a_run_has_learned_is_told_from_its_own_data(place, capsys):
    config = load(RunConfig, "recipe.yaml").config
    stream = Stream(config.data, seed=config.seed, length=config.length, microbatch_tokens=64)
    checkpoint = place / "runs" / "small" / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "train_state.json").write_text(json.dumps({"stream": stream.state(2)}))
    (checkpoint / "COMPLETE").touch()
    asked = ["data", "explain", "runs/small", "--step", "2"]
    assert run(asked) == 0
    assert "step 2 (done)" in capsys.readouterr().out
    assert run([*asked, "seed=7"]) == 2
    assert "is the folder of another run" in capsys.readouterr().err
    Path("tokens/code").rename("elsewhere")
    assert run([*asked, "data.sources.code=elsewhere"]) == 0, "data may move"
    write(place / "tokens" / "code", load_tokenizer("tokenizer"), TEXTS[1:21])
    capsys.readouterr()
    assert run(asked) == 2
    shown = capsys.readouterr()
    assert "content of source 'code'" in shown.err
    assert shown.out == ""


def test_a_document_that_is_taken_down(place, capsys):
    Path("down.jsonl").write_text('{"source": "code", "document": "document-3"}\n')
    arguments = ["data", "explain", "recipe.yaml", "data.takedowns=down.jsonl", "--document", "code:3"]
    assert run(arguments) == 0
    assert "taken down: its tokens are blanked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to explain is given"),
        (["--step", "1", "--position", "2"], "--step and --position exclude each other"),
        (["--step", "7"], "allowed: 1 to 6"),
        (["--position", "48"], "0 to 47"),
        (["--position", "9" * 25], "0 to 47"),
        (["--position", "3", "--row", "1"], "choose rows of a step"),
        (["--step", "1", "--row", "8"], "row 8 is outside a batch of 8"),
        (["--step", "1", "--rank", "2", "--world-size", "2"], "rank 2 is outside a world of 2"),
        (["--document", "code"], "SOURCE:NUMBER"),
        (["--document", "code:20"], "0 to 19"),
        (["--document", "code:nothing"], "has the id 'nothing'"),
        (["--document", "cod:1"], "code, prose"),
    ],
)
def test_what_cannot_be_answered_ends_with_2(place, capsys, arguments, message):
    assert run(["data", "explain", "recipe.yaml", *arguments]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_inspect_draws_and_reads_other_forms(place, capsys):
    assert run(["data", "inspect", "tokens/prose", "--plot", "lengths.svg", "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "by context length" in out
    assert "   | document" in out
    assert Path("lengths.svg").read_text().startswith("<svg")
    # in a folder of its own: the one of the tests of tokenizers would be taken for the tokenizer of the data
    fixtures = Path("others/data/fixtures")
    shutil.copytree(Path(__file__).parents[2] / "data" / "fixtures", fixtures)
    assert run(["data", "inspect", str(fixtures / "mds-varied-any-gz"), "--json"]) == 0
    (part,) = json_of(capsys)["parts"]
    assert part["lengths"]["documents"] == part["manifest"]["n_documents"] == 26
    assert run(["data", "inspect", str(fixtures / "mds-alike-int32"), "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "document ends are not known" in out
    assert "-- beginning" in out
    assert run(["data", "inspect", str(fixtures / "mds-alike-int32"), "eod_id=3"]) == 0
    assert "document length in tokens" in capsys.readouterr().out
    assert run(["data", "inspect", "tokens/prose", "--plot", "lengths.png"]) == 2
    assert ".svg" in capsys.readouterr().err
    assert run(["data", "inspect", "tokens"]) == 2
    assert "holds nothing to inspect" in capsys.readouterr().err


@pytest.mark.usefixtures("no_rehearsal")
def test_plan_data_and_the_dry_run_tell_the_same(place, capsys):
    assert run(["plan", "data", "recipe.yaml", "--json"]) == 0
    plan = json_of(capsys)
    assert run(["train", "recipe.yaml", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for source in plan["sources"]:
        assert source["read_bytes"] / source["requests"] == pytest.approx(8192, rel=0.03), "a block, rarely two"
        assert f"{source['name']}: {format_count(source['n_tokens'])} tokens, {source['epochs']:.2f} epochs" in out
    assert "weight 0.25, then 1" in out, "of code: 1 of 4, then alone"
    assert run(["plan", "data", "recipe.yaml", "data.skip=[[0, 24]]", "--json"]) == 0
    for skipping, source in zip(json_of(capsys)["sources"], plan["sources"], strict=True):
        assert skipping["sequences"] == source["sequences"]
        assert skipping["epochs"] > source["epochs"], "skipped sequences count too"
    assert run(["train", "recipe.yaml", "train.duration=100step", "--dry-run"]) == 0
    assert "warning    source 'code' is repeated for" in capsys.readouterr().out
    assert run(["plan", "data", "recipe.yaml", "train.duration=600step"]) == 3
    shown = capsys.readouterr()
    assert "too many epochs: code" in shown.err
    assert "warning: source 'code'" in shown.out


def test_plan_data_of_packed_rows_and_of_a_source_that_one_stage_leaves_out(place, capsys):
    long = "[{until: 0.5run, weights: {code: 1, prose: 1}}, {weights: {prose: 1}, seq_len: 256}]"
    changes = [f"data.stages={long}", "model.max_position_embeddings=2048"]
    assert run(["plan", "data", "recipe.yaml", *changes, "--json"]) == 0
    plan = json_of(capsys)
    assert [stage["seq_len"] for stage in plan["stages"]] == [64, 256]
    assert plan["stages"][1]["shares"][0]["sequences"] == 0
    assert run(["plan", "data", "recipe.yaml", "data.packing=best-fit"]) == 2
    assert "smalti data pack" in capsys.readouterr().err
    for name in ("code", "prose"):
        assert run(["data", "pack", f"tokens/{name}", "--seq-len", "64"]) == 0
    capsys.readouterr()
    assert run(["plan", "data", "recipe.yaml", "data.packing=best-fit", "--json"]) == 0
    packed = json_of(capsys)
    assert 0 < packed["padding_frac"] < 0.5
    assert all(source["requests"] > source["sequences"] for source in packed["sources"])
    assert run(["plan", "data", "recipe.yaml", "data.packing=best-fit"]) == 0
    assert "or less in the mean" in capsys.readouterr().out


def test_plan_data_of_a_form_that_others_wrote(place, capsys):
    np.arange(5000, dtype="<u4").tofile("code.bin")
    changes = ["data.sources.code={path: code.bin, dtype: uint32}", "model.vocab_size=8192", "--allow-repeats"]
    assert run(["plan", "data", "recipe.yaml", *changes]) == 0
    assert "start-up: not known, because code is not in" in capsys.readouterr().out


def test_stages_of_two_forks_stay_apart():
    first = Schedule(["a", "b"], [Span(0, 4, 64, (1, 1), 0)], 9)
    second = Schedule(["a", "b"], [Span(3, 4, 64, (3, 1), 0)], 9, parent=first, fork_step=3)
    third = Schedule(["a", "b"], [Span(5, 4, 64, (1, 3), 0)], 9, parent=second, fork_step=5)
    stages = stage_counts(third, forks=[3, 5])
    assert [(one.name, one.start_step, one.end_step) for one in stages] == [
        ("0 (past 1)", 0, 3), ("0 (past 2)", 3, 5), ("0", 5, 9)]  # fmt: skip
    assert [one.sequences for one in stages] == [(6, 6), (6, 2), (4, 12)]
    assert stage_counts(second, forks=[3])[0].name == "0 (past)"
