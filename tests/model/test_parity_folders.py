"""Folders of every family in both directions: equal bits, stock transformers without remote code, the same text."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import distance, ids
from parity import FAMILIES, drawn, options, our_logits, pair, stock, their_logits, their_model
from torch import Tensor, nn

from smalti.model.decoder import Decoder
from smalti.model.huggingface import load_folder, save_folder

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.proof]


@pytest.mark.parametrize("family", FAMILIES)
@drawn
@given(data=st.data(), max_shard_bytes=st.sampled_from([5_000, 10**9]))
def test_round_trips_keep_every_bit(family, data, max_shard_bytes):
    with pair(family, data.draw(options(family))) as models, tempfile.TemporaryDirectory() as exported:
        _save(models.ours, exported, max_shard_bytes)
        back = stock(Path(exported))
        _same_bits(back.state_dict(), models.theirs.state_dict())
        again = load_folder(exported)
        _same_bits(again.state_dict(), models.ours.state_dict())
        assert again.config == models.ours.config
        ids_BT = ids(models.ours.config, 1, 5)
        assert torch.equal(*(their_logits(model, ids_BT)[0] for model in (_eager(back), models.theirs)))


@pytest.mark.parametrize("family", FAMILIES)
@drawn
@given(data=st.data(), seed=st.integers(0, 99))
def test_greedy_text_is_the_same(family, data, seed):
    """Without a cache: with one, scalings that look at the length leave earlier keys as they were."""
    with pair(family, data.draw(options(family))) as models, tempfile.TemporaryDirectory() as exported:
        _save(models.ours, exported)
        prompt_1T = ids(models.ours.config, 1, 4, seed)
        texts = [
            model.generate(prompt_1T, do_sample=False, max_new_tokens=8, use_cache=False, eos_token_id=None).tolist()
            for model in (models.theirs, _eager(stock(Path(exported))))
        ]
        assert texts[0] == texts[1]
        assert _greedy(models.ours, prompt_1T, 8).tolist() == texts[0]


@torch.no_grad()
def test_mpt_reads_further_than_it_was_trained():
    """transformers' MPT cannot pass ``max_seq_len``, so the reference is built again with a larger one."""
    chosen = {"vocab_size": 40, "d_model": 40, "n_heads": 5, "n_layers": 2, "max_seq_len": 8}
    longer = their_model("mpt", chosen | {"max_seq_len": 64})
    with pair("mpt", chosen) as models:
        longer.load_state_dict(models.theirs.state_dict())
        ids_BT = ids(models.ours.config, 2, 50)
        with pytest.raises(RuntimeError):
            models.theirs(ids_BT)
        assert distance(our_logits(models.ours, ids_BT, []), longer(ids_BT).logits) < 1e-5
        short_BT = ids_BT[:, :8]
        assert distance(our_logits(models.ours, short_BT, []), models.theirs(short_BT).logits) < 1e-5


def _save(ours: Decoder, folder: str, max_shard_bytes: int = 10**9) -> None:
    save_folder(folder, ours.config, ours.state_dict(), eod_id=0, dtype=torch.float32, max_shard_bytes=max_shard_bytes)


def _eager(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("eager")
    return model


def _same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []


@torch.no_grad()
def _greedy(ours: Decoder, ids_1T: Tensor, tokens: int) -> Tensor:
    for _ in range(tokens):
        ids_1T = torch.cat((ids_1T, ours(ids_1T).value[:, -1:].argmax(-1)), dim=1)
    return ids_1T
