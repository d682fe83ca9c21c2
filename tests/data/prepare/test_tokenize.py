"""Documents become token files: complete, in order, the same twice; only the training split teaches the tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from smalti.base.errors import DataError, UserError
from smalti.cli.main import run
from smalti.config.curate import CurateConfig, TokenizeConfig
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.data.documents.parquet import read_documents
from smalti.data.prepare.curate.job import curate
from smalti.data.prepare.inspect import inspect_folder, length_summary
from smalti.data.prepare.tokenize import tokenize
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokens import TokenSource
from smalti.data.tokens.document_ids import ids_of


@pytest.fixture(scope="module")
def curated(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("curated")
    for source in ("code", "prose"):
        texts = [
            f"{source} number {i} <|endoftext|> of the many {'ä🙂' if i % 3 else ''} lines\n" * (i + 1)
            for i in range(40)
        ]
        records = [{"text": text} for text in texts]
        (folder / f"{source}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = {name: {"path": str(folder / f"{name}.jsonl"), "rules": ["none"]} for name in ("code", "prose")}
    curate(CurateConfig.model_validate({"sources": sources, "output": str(folder / "out"), "heldout_frac": 0.25}))
    return folder / "out"


def config(curated: Path, output: Path, **changes) -> TokenizeConfig:
    plain = {"documents": str(curated), "output": str(output), "vocab_size": 300}
    if "tokenizer" in changes:
        plain.pop("vocab_size")
    return TokenizeConfig.model_validate({**plain, **changes})


def documents_of(folder: Path) -> list[list[int]]:
    source = TokenSource(folder)
    tokens = source.read(0, source.n_tokens)
    parts = np.split(tokens, np.flatnonzero(tokens == source.manifest.eod_id) + 1)
    assert parts[-1].size == 0
    return [part[:-1].tolist() for part in parts[:-1]]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_token_files_hold_every_document_in_order(curated, tmp_path):
    report = tokenize(config(curated, tmp_path / "tokens"))
    tokenizer = load_tokenizer(tmp_path / "tokens" / "tokenizer")
    assert tokenizer.digest == report.tokenizer_digest
    for source in ("code", "prose"):
        for split in ("train", "heldout"):
            rows = list(read_documents(curated / "documents" / source / f"{split}.parquet"))
            folder = tmp_path / "tokens" / source / split
            assert [tokenizer.decode(ids) for ids in documents_of(folder)] == [row["text"] for row in rows]
            manifest = TokenSource(folder).manifest
            assert manifest.n_documents == len(rows)
            assert ids_of(folder, range(len(rows))) == [row["id"] for row in rows]
            assert manifest.n_text_bytes == sum(len(row["text"].encode()) for row in rows)
            assert (manifest.tokenizer_digest, manifest.eod_id) == (tokenizer.digest, tokenizer.eod_id)
            assert manifest.vocab_size == tokenizer.vocab_size == 300
            assert report.manifests[source][split] == manifest
    assert report.notes == []


def test_rerun_is_identical_to_the_byte(curated, tmp_path):
    tokenize(config(curated, tmp_path / "tokens"))
    first = everything(tmp_path / "tokens")
    assert len(first) == 3 + 4 * 3 + 1
    tokenize(config(curated, tmp_path / "tokens"))
    assert everything(tmp_path / "tokens") == first


def test_heldout_documents_do_not_teach_the_tokenizer(curated, tmp_path, monkeypatch):
    seen = []
    from smalti.data.prepare import tokenize as module

    real = module.train_bpe
    monkeypatch.setattr(module, "train_bpe", lambda texts, *a, **k: real((seen.append(t) or t for t in texts), *a, **k))
    report = tokenize(config(curated, tmp_path / "tokens"))
    train = [
        row["text"] for s in ("code", "prose") for row in read_documents(curated / "documents" / s / "train.parquet")
    ]
    assert seen == train
    assert report.trained_on_bytes == sum(len(text.encode()) for text in train)


def test_training_text_is_limited_and_spread_over_the_sources(curated, tmp_path, monkeypatch):
    seen = []
    from smalti.data.prepare import tokenize as module

    real = module.train_bpe
    monkeypatch.setattr(module, "train_bpe", lambda texts, *a, **k: real((seen.append(t) or t for t in texts), *a, **k))
    report = tokenize(config(curated, tmp_path / "tokens", train_bytes=20_000))
    assert sum(len(text.encode()) for text in seen) == report.trained_on_bytes <= 20_000
    assert report.trained_on_bytes > 10_000
    sizes = [sum(len(t.encode()) for t in seen if t.startswith(source)) for source in ("code", "prose")]
    assert min(sizes) > 0.6 * max(sizes)
    with pytest.raises(DataError, match="train_bytes=1"):
        tokenize(config(curated, tmp_path / "tokens", train_bytes=1))


def test_a_tokenizer_that_is_given(curated, tmp_path):
    first = tokenize(config(curated, tmp_path / "a"))
    given = str(tmp_path / "a" / "tokenizer")
    second = tokenize(config(curated, tmp_path / "b", tokenizer=given))
    assert second.manifests == first.manifests
    assert second.trained_on_bytes == 0


def test_a_note_when_the_text_ends_before_the_vocabulary_is_full(curated, tmp_path):
    report = tokenize(config(curated, tmp_path / "tokens", vocab_size=50_000))
    assert report.vocab_size < 50_000
    assert "no more pairs" in report.notes[0]


def test_the_slow_encoder_takes_over_when_a_sample_differs(curated, tmp_path, monkeypatch):
    first = tokenize(config(curated, tmp_path / "a"))
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, texts, threads=1: [[0] for _ in texts])
    second = tokenize(config(curated, tmp_path / "b"))
    assert second.manifests == first.manifests
    assert "other ids on a sample" in second.notes[0]


def test_no_heldout_split_no_folder(curated, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "some text that is here"}\n')
    sources = {"a": {"path": str(tmp_path / "a.jsonl"), "rules": ["none"]}}
    curate(CurateConfig.model_validate({"sources": sources, "output": str(tmp_path / "out"), "heldout_frac": 0}))
    report = tokenize(config(tmp_path / "out", tmp_path / "tokens"))
    assert list(report.manifests["a"]) == ["train"]
    assert not (tmp_path / "tokens" / "a" / "heldout").exists()


def test_bad_documents_folder(curated, tmp_path):
    with pytest.raises(DataError, match="write it with 'smalti data curate'"):
        tokenize(config(tmp_path, tmp_path / "tokens"))
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(curated, broken)
    path = broken / "documents" / "code" / "train.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train\.parquet"):
        tokenize(config(broken, tmp_path / "tokens"))
    assert not (tmp_path / "tokens" / "tokens.json").exists()
    path.unlink()
    with pytest.raises(DataError, match=r"train\.parquet"):
        tokenize(config(broken, tmp_path / "tokens"))


def test_a_bad_tokenizer_file(curated, tmp_path):
    (tmp_path / "ranks.tiktoken").write_text("no ranks here\n")
    with pytest.raises(DataError, match=r"ranks\.tiktoken:1"):
        tokenize(config(curated, tmp_path / "tokens", tokenizer=str(tmp_path / "ranks.tiktoken")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 259}, "260"),
        ({"eod_token": "x"}, "eod_token has no effect"),
        ({"tokenizer": "t.json", "vocab_size": 300}, "vocab_size has no effect"),
        ({"tokenizer": "t.json", "train_bytes": 300}, "train_bytes has no effect"),
    ],
)
def test_options_without_effect_are_errors(curated, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config(curated, tmp_path, **changes)


def test_inspection(curated, tmp_path):
    tokenize(config(curated, tmp_path / "tokens"))
    whole = inspect_folder(str(tmp_path / "tokens"), n_samples=2)
    assert [part["name"] for part in whole["parts"]] == ["code/train", "code/heldout", "prose/train", "prose/heldout"]
    part = inspect_folder(str(tmp_path / "tokens" / "code" / "train"), n_samples=2)["parts"][0]
    lengths = [len(ids) for ids in documents_of(tmp_path / "tokens" / "code" / "train")]
    assert (
        part["lengths"]["documents"]
        == sum(entry["documents"] for entry in part["lengths"]["histogram"])
        == len(lengths)
    )
    assert part["lengths"]["longest"] == max(lengths)
    rows = list(read_documents(curated / "documents" / "code" / "train.parquet"))
    assert len(part["samples"]) == 2
    for sample in part["samples"]:
        assert rows[sample["document"]]["text"].startswith(sample["text"][:50])
        assert sample["n_tokens"] == lengths[sample["document"]]
    documents = inspect_folder(str(curated), n_samples=1)
    assert documents["parts"][0]["samples"][0]["id"].startswith("code.jsonl:")
    json.dumps([whole, documents])


def test_inspection_of_the_wrong_thing(curated, tmp_path):
    with pytest.raises(DataError, match="holds nothing to inspect"):
        inspect_folder(str(tmp_path))
    for size in (300, 310):
        tokenize(config(curated, tmp_path / str(size), vocab_size=size))
    with pytest.raises(DataError, match="is not the tokenizer that wrote the tokens"):
        inspect_folder(str(tmp_path / "300" / "code" / "train"), tokenizer=str(tmp_path / "310" / "tokenizer"))
    with pytest.raises(UserError, match="does not exist"):
        inspect_folder(str(tmp_path / "300"), tokenizer="nowhere")


def test_length_bins_double():
    bins = length_summary(np.array([0, 1, 2, 3, 4, 7, 8, 1 << 40]), "tokens")["histogram"]
    named = {(entry["from"], entry["to"]): entry["documents"] for entry in bins if entry["documents"]}
    assert named == {(0, 0): 1, (1, 1): 1, (2, 3): 2, (4, 7): 2, (8, 15): 1, (1 << 40, (1 << 41) - 1): 1}
    assert length_summary(np.zeros(0, dtype=np.int64), "tokens")["documents"] == 0


def test_a_source_without_training_text_is_noted(curated, tmp_path):
    sources = {"code": {"path": str(curated.parent / "code.jsonl"), "rules": ["none"]}}
    (tmp_path / "b.jsonl").write_text('{"text": "short"}\n')
    sources["b"] = {"path": str(tmp_path / "b.jsonl"), "rules": ["prose-light"]}
    curate(CurateConfig.model_validate({"sources": sources, "output": str(tmp_path / "out"), "heldout_frac": 0.25}))
    report = tokenize(config(tmp_path / "out", tmp_path / "tokens"))
    (tmp_path / "b.jsonl").write_text("")
    curate(CurateConfig.model_validate({"sources": sources, "output": str(tmp_path / "out2"), "heldout_frac": 0.25}))
    empty = tokenize(config(tmp_path / "out2", tmp_path / "tokens2"))
    assert [note[:42] for note in report.notes] == ["b: no training document is left of it, so "]
    assert empty.notes == ["b: it holds no documents, so there is no b/train"], "no rule dropped any"


@pytest.mark.parametrize("guide", ["own-data", "recipes"])
def test_the_recipes_of_the_guides_lead_to_a_model_that_can_be_exported(guide):
    text = (Path(__file__).resolve().parents[3] / "docs" / "guides" / f"{guide}.md").read_text()
    blocks = [yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml\n")[1:]]
    recipe = from_dict(RunConfig, next(block for block in blocks if "model" in block)).config
    assert recipe.model.family in ("llama", "dbrx")
    assert recipe.data.tokenizer == "work/tokens/tokenizer"


def test_the_configs_of_the_guide_are_valid():
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "own-data.md").read_text()
    blocks = [yaml.safe_load(block.split("```")[0]) for block in guide.split("```yaml\n")[1:]]
    curated = CurateConfig.model_validate(next(block for block in blocks if "sources" in block))
    tokens = TokenizeConfig.model_validate(next(block for block in blocks if "documents" in block))
    assert tokens.documents == curated.output


def test_a_source_without_held_out_documents_is_noted(tmp_path):
    (tmp_path / "a.txt").write_text("Only one document, and it is for training. " * 20)
    source = {"a": {"path": str(tmp_path / "a.txt"), "rules": ["none"]}}
    curate(CurateConfig.model_validate({"sources": source, "output": str(tmp_path / "out")}))
    report = tokenize(config(tmp_path / "out", tmp_path / "tokens"))
    assert not (tmp_path / "tokens" / "a" / "heldout").exists()
    assert any("a: no document of it is held out, so there is no a/heldout" in note for note in report.notes)


def test_a_tokenizer_is_trained_on_parts_of_a_document_longer_than_its_limit(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"line {i} of the only long document\n" for i in range(2000)))
    source = {"a": {"path": str(tmp_path / "a.txt"), "rules": ["none"]}}
    curate(CurateConfig.model_validate({"sources": source, "output": str(tmp_path / "out"), "heldout_frac": 0}))
    report = tokenize(config(tmp_path / "out", tmp_path / "tokens", train_bytes=20_000))
    assert 10_000 <= report.trained_on_bytes <= 20_000


def test_inspection_of_drops(tmp_path, capsys):
    """By rule, with the ids and reasons that were recorded: in JSON, and in print."""
    texts = ["A sentence of more than ten words stays in the corpus as it is."] * 3 + ["Short."] * 30
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i, text in enumerate(texts))
    )
    source = {"a": {"path": str(tmp_path / "a.jsonl")}}
    curate(CurateConfig.model_validate({"sources": source, "output": str(tmp_path / "out"), "heldout_frac": 0}))
    (drop,) = inspect_folder(str(tmp_path / "out"), n_samples=2)["drops"]
    assert {key: drop[key] for key in ("source", "split", "rule", "documents")} == {
        "source": "a", "split": "train", "rule": "prose-light/words", "documents": 30
    }  # fmt: skip
    assert drop["samples"] == [
        {"id": f"a.jsonl:{line}", "reason": "words: 2 is below 10", "score": 2.0} for line in (11, 26)
    ]
    assert run(["data", "inspect", str(tmp_path / "out"), "--samples", "1"]) == 0
    out = capsys.readouterr().out
    assert "== drops" in out
    assert "   | a.jsonl:19: words: 2 is below 10" in out.splitlines()
    (tmp_path / "out" / "drops" / "a.parquet").unlink()
    assert inspect_folder(str(tmp_path / "out"), n_samples=2)["drops"] == []


def test_a_loaded_tokenizer_is_extended_on_the_training_split(curated, tmp_path):
    first = tokenize(config(curated, tmp_path / "first"))
    old = load_tokenizer(tmp_path / "first/tokenizer")
    more = config(
        curated, tmp_path / "more", tokenizer=str(tmp_path / "first/tokenizer"), extend=15, train_bytes=50_000
    )
    report = tokenize(more)
    new = load_tokenizer(tmp_path / "more/tokenizer")
    assert (first.vocab_size, report.vocab_size, new.eod_id) == (300, 315, old.eod_id)
    assert 0 < report.trained_on_bytes <= 50_000
    assert report.notes[0] == "15 entries were added; model.vocab_size is at least 315"
    assert [note.split(":")[0] for note in report.notes[1:]] == ["code", "prose"]
    texts = [row["text"] for row in read_documents(curated / "documents/code/heldout.parquet")]
    assert [new.decode(ids) for ids in documents_of(tmp_path / "more/code/heldout")] == texts
    sizes = [sum(each.manifests[source]["train"].n_tokens for source in ("code", "prose")) for each in (first, report)]
    assert sizes[1] < sizes[0]
    with pytest.raises(ValueError, match="extend=15 has no effect on a tokenizer that is trained here"):
        config(curated, tmp_path, extend=15)
