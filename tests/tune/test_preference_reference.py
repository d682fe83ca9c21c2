"""The reference of preference losses: computed before the run, or live beside the model, is the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_rows import Answer, Pair, pack, some_pairs
from tiny_models import family_config, llama_config
from torch import nn

from smalti.base.errors import DataError
from smalti.config.model import MoEConfig
from smalti.config.preference import PreferenceConfig
from smalti.config.train import LossConfig
from smalti.data.examples import Example
from smalti.model.decoder import Decoder
from smalti.model.dtypes import freeze
from smalti.model.huggingface import save_folder
from smalti.model.init import init_weights
from smalti.tune.pairs import checked_pairs, with_last_inputs, with_mismatched
from smalti.tune.preference.loss import cached_reference, preference_loss
from smalti.tune.preference.reference import LiveReference, identity, sequence_log_probs, with_reference

PAIRS = some_pairs(6)


def _example(pair: Pair, number: int) -> Example:
    sequences = tuple((answer.ids, (0, *map(int, answer.mask))) for answer in (pair.first, pair.second))
    return Example(sequences, {"margin": pair.values["margin"]}, str(number))


def _saved(folder: Path, seed: int, kind: str = "llama") -> Decoder:
    config = llama_config() if kind == "llama" else family_config(kind, 257, 64)
    model = Decoder(config)
    init_weights(model, config, seed=seed)
    save_folder(folder, config, model.state_dict(), eod_id=256, dtype=torch.float32)
    return model


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_cached_and_live_references_are_equal(tmp_path: Path, kind: str) -> None:
    reference, policy = _saved(tmp_path / "reference", 1, kind), Decoder(family_config(kind, 257, 64))
    init_weights(policy, policy.config, seed=2)
    examples = with_reference([_example(pair, i) for i, pair in enumerate(PAIRS)], str(tmp_path / "reference"), "fp32")
    pairs = [replace(pair, values=dict(e.values)) for pair, e in zip(PAIRS, examples, strict=True)]
    assert sorted(pairs[0].values) == ["margin", "reference_first", "reference_second"]
    microbatch = pack([pairs[:2], pairs[2:]], dtype=torch.float32)
    config, loss = PreferenceConfig(), LossConfig()
    live = LiveReference(reference, loss, None)
    results = [
        preference_loss(policy.config, config, loss, each)(policy, microbatch) for each in (cached_reference, live)
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([PAIRS[3].first.ids])
    log_p = reference(ids[:, :-1]).value.log_softmax(-1).gather(2, ids[:, 1:, None])[0, :, 0].detach()
    expected = float((log_p * torch.tensor(PAIRS[3].first.mask)).sum())
    assert pairs[3].values["reference_first"] == pytest.approx(expected, rel=1e-5)


def test_routers_of_a_reference_in_bf16_are_in_fp32(tmp_path: Path) -> None:
    model = _saved(tmp_path, 1, "mixtral")
    examples = [_example(pair, number) for number, pair in enumerate(PAIRS)]
    routers = {name: weight.clone() for name, weight in model.named_parameters() if "router" in name}
    model.to(torch.bfloat16)
    for name, weight in routers.items():
        model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(weight)
    expected = sequence_log_probs(model, [sequence for example in examples for sequence in example.sequences])
    results = with_reference(examples, str(tmp_path), "bf16")
    values = [e.values[name] for e in results for name in ("reference_first", "reference_second")]
    assert values == pytest.approx(expected.tolist(), abs=1e-6)


def test_frozen_weights_in_bf16_leave_routers_and_their_biases_alone() -> None:
    moe = MoEConfig(num_experts=4, num_experts_per_tok=2, bias_update_rate=0.001)
    model = Decoder(family_config("mixtral").model_copy(update={"moe": moe}))
    freeze(model, torch.bfloat16)
    full = [name for name, value in model.state_dict().items() if value.dtype == torch.float32]
    assert len(full) == 2 * len(model.blocks)
    assert all(".router." in name for name in full)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_batches_do_not_change_a_reference(tmp_path: Path) -> None:
    model = _saved(tmp_path, 1)
    sequences = [sequence for number, pair in enumerate(PAIRS) for sequence in _example(pair, number).sequences]
    whole = sequence_log_probs(model, sequences)
    assert sequence_log_probs(model, sequences, batch_tokens=1) == pytest.approx(whole, rel=1e-5)
    assert identity(str(tmp_path)) == identity(str(tmp_path))
    _saved(tmp_path / "other", 2)
    assert identity(str(tmp_path / "other")) != identity(str(tmp_path))


def test_a_mismatched_answer_is_the_next_one_to_another_prompt() -> None:
    def of(prompt: list[int], answer: list[int], label: float) -> Example:
        return Example(((prompt + answer, [0] * len(prompt) + [1] * len(answer)),), {"label": label}, str(prompt))

    examples = with_mismatched([of([1, 2], [3], 1), of([4], [5, 6, 7], 0), of([8, 9], [10], 1)], longest=6)
    assert [list(map(list, e.sequences[1])) for e in examples] == [
        [[1, 2, 5, 6, 7], [0, 0, 1, 1, 1]],
        [[4, 10], [0, 1]],
        [[8, 9, 3], [0, 0, 1]],
    ]
    assert [e.values for e in examples] == [{"label": 1.0}, {"label": 0.0}, {"label": 1.0}]
    short = with_mismatched([of([1, 2], [3], 1), of([4], [5, 6, 7], 0)], longest=4)[0]
    assert list(short.sequences[1][0]) == [1, 2, 5], "cut to the room of the row"
    with pytest.raises(DataError, match="leaves no room"):
        with_mismatched([of([1, 2, 3], [4], 1), of([4], [5], 0)], longest=4)[0]
    # As files of KTO list them: the answers of a prompt next to each other, here also at both ends.
    grouped = [of([1], [2], 1), of([3], [4], 1), of([3], [5], 0), of([6], [7], 1), of([1], [8], 0)]
    mismatched = [list(example.sequences[1][0]) for example in with_mismatched(grouped, longest=9)]
    assert mismatched == [[1, 4], [3, 7], [3, 7], [6, 8], [1, 4]]
    with pytest.raises(DataError, match="the prompts of all 2 examples are equal"):
        with_mismatched([of([1], [2], 1), of([1], [3], 0)], longest=9)
    with pytest.raises(DataError, match="not an answer with a label"):
        with_mismatched([_example(PAIRS[0], 0)], longest=9)


def test_examples_of_kto_with_one_label_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def of(prompt: int, label: float) -> Example:
        return Example((([prompt, 9], [0, 1]),), {"label": label}, str(prompt))

    with_mismatched([of(1, 1.0), of(2, 0.0)], longest=9)
    assert not caplog.records
    with_mismatched([of(1, 1.0), of(2, 1.0)], longest=9)
    assert "the label of all 2 examples is true: no answer is undesirable" in caplog.text


def test_examples_of_reward_models_end_with_one_more_input() -> None:
    first = Answer((1, 2, 3), (False, True))
    (example,) = with_last_inputs([_example(Pair(first, first, {"margin": 1.0}), 0)], token=9)
    assert [(list(ids), list(mask)) for ids, mask in example.sequences] == [([1, 2, 3, 9], [0, 0, 1, 0])] * 2
    with pytest.raises(DataError, match="has one answer"):
        checked_pairs([replace(example, sequences=example.sequences[:1])])[0]
