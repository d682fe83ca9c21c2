"""ALiBi beyond the length of the config: logits and gradients are those of transformers' MPT of the longer length."""

from pathlib import Path

import pytest
import torch
from model_cases import distance, ids
from parity import their_logits, their_model

from smalti.model.huggingface import load_folder

SHORT, LONG = 16, 80
MPT = {"vocab_size": 40, "d_model": 24, "n_heads": 3, "n_layers": 2, "bos_token_id": 0, "eos_token_id": 1}


@pytest.mark.slow
def test_a_short_mpt_reads_and_learns_from_longer_texts_as_a_long_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    their_model("mpt", {**MPT, "max_seq_len": SHORT}).save_pretrained(tmp_path)
    ours = load_folder(str(tmp_path), torch.float32)
    theirs = their_model("mpt", {**MPT, "max_seq_len": LONG})  # the same weights
    assert ours.config.max_position_embeddings == SHORT
    ids_BT = ids(ours.config, 2, LONG)
    ours_BTV, theirs_BTV = ours(ids_BT).value, their_logits(theirs, ids_BT)[0]
    assert distance(ours_BTV, theirs_BTV) < 1e-5
    assert distance(ours_BTV[:, :SHORT], ours(ids_BT[:, :SHORT]).value) < 1e-5
    for logits_BTV in (ours_BTV, theirs_BTV):
        torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()).backward()
    embedding = next(parameter for name, parameter in ours.named_parameters() if "embed" in name)
    assert distance(embedding.grad, theirs.get_input_embeddings().weight.grad) < 1e-5
