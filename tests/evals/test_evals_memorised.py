"""Memorisation: equal to a greedy loop in float64; windows are drawn evenly, inside documents; counts are exact."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from test_evals_heldout import _with_loop_kernel
from tiny_models import ByteTokenizer, dbrx_config, llama_config, tiny_model

from smalti.base.errors import DataError, UserError
from smalti.data.tokens import TokenSource
from smalti.data.tokens.writer import TokenWriter
from smalti.evals.memorised import measure, windows
from smalti.evals.memorised.measure import Settings
from smalti.evals.memorised.windows import count, draw
from smalti.evals.statistics.intervals import wilson_interval
from smalti.model.decoder import Decoder
from smalti.serve.engine.engine import Engine

K, M = 6, 5


def source(folder: Path, documents: list[list[int]]) -> TokenSource:
    with TokenWriter(folder, vocab_size=257, eod_id=256, tokenizer_digest=ByteTokenizer.digest) as writer:
        for ids in documents:
            writer.add(np.array(ids, dtype=np.int64), len(ids))
    return TokenSource(folder)


def random_documents(seed: int, lengths: list[int], vocab: int = 256) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    return [draws.integers(0, vocab, n).tolist() for n in lengths]


def doubled(model: Decoder) -> Decoder:
    double = Decoder(_with_loop_kernel(model.config)).double().eval()
    double.load_state_dict(model.state_dict())
    return double


def greedy(double: Decoder, prompt: list[int], n: int) -> list[int]:
    """Recompute the whole sequence for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(n):
            ids.append(int(double(torch.tensor([ids])).value[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [llama_config, dbrx_config], ids=["llama", "dbrx"])
def test_equals_a_greedy_loop_in_float64(config, tmp_path: Path) -> None:
    model = tiny_model(config())
    double = doubled(model)
    prompts = random_documents(1, [K] * 8)
    written = [ids + [token % 256 for token in greedy(double, ids, M)] for ids in prompts]
    train = source(tmp_path / "t", [*written, *random_documents(2, [20, K + M])])
    heldout = source(tmp_path / "h", random_documents(3, [20]))
    report = measure.run(
        Engine(model, ByteTokenizer()),
        {"web": train},
        {"new": heldout},
        Settings(windows=500, prompt_tokens=K, new_tokens=M),
    )
    for name, of in (("train", train), ("heldout", heldout)):
        tokens = of.read(0, of.n_tokens).tolist()
        expected = [
            [a == b for a, b in zip(greedy(double, tokens[at : at + K], M), tokens[at + K : at + K + M], strict=True)]
            for at in range(of.n_tokens - K - M + 1)
            if 256 not in tokens[at : at + K + M]
        ]
        score, n_exact = report["tasks"][name], sum(map(all, expected))
        assert score["n"] == len(expected)
        assert score["value"] == n_exact / len(expected)
        assert score["interval"] == list(wilson_interval(n_exact, len(expected)))
        assert score["matched_frac"]["value"] == pytest.approx(np.mean(expected))
    assert report["tasks"]["train"]["value"] >= 7 / report["tasks"]["train"]["n"]
    assert report["tasks"]["heldout"]["value"] == 0


def test_groups_by_occurrences(tmp_path: Path) -> None:
    model = tiny_model(llama_config())
    double = doubled(model)
    (prompt,) = random_documents(1, [K])
    known = prompt + greedy(double, prompt, M)
    assert 256 not in known
    train = source(tmp_path / "t", [known] * 12 + random_documents(2, [K + M] * 3))
    heldout = source(tmp_path / "h", [known, *random_documents(5, [K + M])])
    engine, settings = Engine(model, ByteTokenizer()), Settings(windows=50, prompt_tokens=K, new_tokens=M)
    report = measure.run(engine, {"t": train}, {"h": heldout}, settings, str(tmp_path))
    groups = report["tasks"]["train"]["by_occurrences"]
    assert {name: (part["n"], part["value"]) for name, part in groups.items()} == {"1": (3, 0.0), "10-99": (12, 1.0)}
    held = report["tasks"]["heldout"]["by_occurrences"]
    assert {name: part["value"] for name, part in held.items()} == {"0": 0.0, "10-99": 1.0}
    without = measure.run(engine, {"t": train}, {}, Settings(50, K, M, count=False))
    assert list(without["tasks"]) == ["train"]
    assert "by_occurrences" not in without["tasks"]["train"]


def test_all_windows_are_drawn_where_there_are_few(tmp_path: Path) -> None:
    lengths = [3, 5, 12, 0, 7]
    documents = random_documents(4, lengths, vocab=9)
    sources = {"a": source(tmp_path / "a", documents[:2]), "b": source(tmp_path / "b", documents[2:])}
    drawn = draw(sources, 100, 5, seed=1)
    expected = Counter(tuple(ids[at : at + 5]) for ids in documents for at in range(len(ids) - 4))
    assert Counter(map(tuple, drawn.tokens.tolist())) == expected
    assert all(
        sources[name].read(at, 5).tolist() == row.tolist()
        for (name, at), row in zip(drawn.places, drawn.tokens, strict=True)
    )


def test_places_are_equally_likely_and_chosen_by_the_seed(tmp_path: Path) -> None:
    sources = {
        "a": source(tmp_path / "a", random_documents(5, [40])),
        "b": source(tmp_path / "b", random_documents(6, [19])),
    }
    times = Counter(place for seed in range(600) for place in draw(sources, 5, 10, seed=seed).places)
    assert len(times) == 31 + 10
    expected = 600 * 5 / 41
    assert sum((n - expected) ** 2 / expected for n in times.values()) < 74.7  # chi-squared, 40 degrees, 0.1 %
    first, again, other = (draw(sources, 5, 10, seed=seed).places for seed in (1, 1, 2))
    assert first == again != other
    assert draw(sources, 3, 10, seed=1).places == first[:3]


def test_documents_that_are_taken_down_are_left_out(tmp_path: Path) -> None:
    tokens = source(tmp_path / "a", random_documents(7, [20, 20, 20]))
    spans = {"a": np.array([tokens.document_span(1)])}
    drawn = draw({"a": tokens}, 100, 10, seed=0, takedowns=spans)
    assert set(tokens.documents_at(np.array([at for _, at in drawn.places])).tolist()) == {0, 2}
    assert len(drawn.places) == 22


class _WithoutEnds:
    """A source without an end-of-document token, whose format may record the documents."""

    eod_id = None

    def __init__(self, inner: TokenSource, n_documents: int | None) -> None:
        self._inner, self.n_documents = inner, n_documents

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_sources_without_an_end_token(tmp_path: Path) -> None:
    tokens = source(tmp_path / "a", random_documents(8, [9, 9]))
    places = {at for _, at in draw({"a": _WithoutEnds(tokens, 2)}, 100, 5, seed=0).places}
    assert places == {0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15}  # here the end token counts as a part of its document
    with pytest.raises(UserError, match="does not record where its documents end"):
        draw({"a": _WithoutEnds(tokens, None)}, 100, 5, seed=0)


def test_short_documents_have_no_windows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 5 tokens"):
        draw({"a": source(tmp_path / "a", random_documents(9, [4, 4, 4]))}, 10, 5, seed=0)
    with pytest.raises(DataError, match="has 5 tokens"):
        draw({"a": source(tmp_path / "b", [[1]])}, 10, 5, seed=0)


@pytest.mark.parametrize("chunk", [1, 11, 64, 1 << 17])
def test_counts_equal_enumeration(tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_CHUNK_TOKENS", chunk)
    sources = {
        "a": source(tmp_path / "a", [*random_documents(10, [60, 2], vocab=2), [1] * 20]),
        "b": source(tmp_path / "b", random_documents(11, [40], vocab=2)),
    }
    rows = np.concatenate([draw(sources, 60, 4, seed=0).tokens, [[1, 1, 1, 7]]])
    seen: list[tuple[int, int]] = []
    found = count(rows, sources, lambda _, done, total, *__: seen.append((done, total)))
    everywhere = Counter(
        tuple(tokens[at : at + 4].tolist())
        for tokens in (each.read(0, each.n_tokens) for each in sources.values())
        for at in range(len(tokens) - 3)
    )
    assert found.tolist() == [everywhere[tuple(row)] for row in rows.tolist()]
    assert max(found) > 10
    assert found[-1] == 0
    assert seen == sorted(seen)


def test_windows_longer_than_the_context_and_other_tokenizers_are_refused(tmp_path: Path) -> None:
    engine = Engine(tiny_model(llama_config()), ByteTokenizer())
    tokens = source(tmp_path / "a", random_documents(12, [200]))
    with pytest.raises(UserError, match="has 65 tokens, and the model takes 64"):
        measure.run(engine, {"a": tokens}, {}, Settings(prompt_tokens=60, new_tokens=5))
    tokens.tokenizer_digest = "0" * 64
    with pytest.raises(UserError, match="of another tokenizer"):
        measure.run(engine, {"a": tokens}, {"a": TokenSource(tokens.where)}, Settings(prompt_tokens=6, new_tokens=5))
