"""Losses of preferences and rewards beside adapters: against merged weights in float64; the reference is the base."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_rows import VOCAB, Answer, Pair, pack, some_pairs
from test_preference_reference import _example, _saved
from tiny_models import family_config, tiny_model
from torch import Tensor
from torch.func import functional_call

from smalti.config.adapter import AdapterConfig, Quantization
from smalti.config.model import ModelConfig
from smalti.config.preference import PreferenceConfig, PreferenceLossName, RewardConfig
from smalti.config.train import LossConfig
from smalti.model.adapters.adapter import Adapter, Merged
from smalti.model.adapters.apply import apply, is_adapter, is_trained, stored_as
from smalti.model.adapters.lora import draw
from smalti.model.decoder import Decoder
from smalti.train.step import Loss
from smalti.tune.losses import preference as losses
from smalti.tune.losses.reward import bradley_terry
from smalti.tune.preference.loss import cached_reference, log_probs, preference_loss
from smalti.tune.preference.reference import LiveReference, with_reference
from smalti.tune.reward.loss import RewardLoss
from smalti.tune.sequences import sequences_of

PAIRS = some_pairs(5)
ADAPTER = AdapterConfig(rank=3, alpha=6.0, targets=("attention", "mlp"))


def _adapted(config: ModelConfig, base: dict[str, Tensor], adapter: AdapterConfig = ADAPTER) -> Decoder:
    """A decoder with these frozen weights, and adapters that change what it computes."""
    with torch.device("meta"):
        model = Decoder(config)
        apply(model, adapter)
    model.to_empty(device="cpu")
    tensors = model.state_dict()
    for name, weight in base.items():
        for target, value in stored_as(tensors, name, weight).items():
            tensors[target].copy_(value)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            shown = name.replace("lora_B", "lora_A")  # another draw for B, which begins at 0
            parameter.data.copy_(draw(shown, parameter.shape, seed=len(name)))
    return model


def _expected(kind: str, chosen: tuple[Tensor, Tensor], rejected: tuple[Tensor, Tensor], pair: Pair) -> Tensor:
    """The loss of a pair, from (log p, reference) or (score, _) of each answer."""
    if kind == "reward":
        margin = torch.tensor(pair.values["margin"], dtype=torch.float64)
        return bradley_terry(chosen[0], rejected[0], margin, center_coef=0.1)
    ratios = [mine - theirs for mine, theirs in (chosen, rejected)]
    if kind == "dpo":
        return losses.dpo(*ratios, beta=0.1)
    if kind == "kto":
        label = torch.tensor(pair.values["label"] > 0)
        return losses.kto(ratios[0], label, torch.zeros(()), beta=0.1)
    lengths = [sum(answer.mask) for answer in (pair.first, pair.second)]
    return losses.simpo(chosen[0] / lengths[0], rejected[0] / lengths[1], beta=2.0, gamma=1.0)


@pytest.mark.parametrize("kind", ["dpo", "kto", "simpo", "reward"])
def test_gradients_are_those_of_merged_weights(kind: PreferenceLossName) -> None:
    config = family_config("llama", VOCAB).model_copy(update={"num_labels": 1 if kind == "reward" else None})
    plain = tiny_model(config).double()
    base = plain.state_dict()
    model = _adapted(config, base).double()
    if kind == "reward":
        loss: Loss = RewardLoss(RewardConfig(center_coef=0.1))
    else:
        reference = LiveReference(None, LossConfig(), None) if kind != "simpo" else None
        loss = preference_loss(config, PreferenceConfig(loss=kind), LossConfig(), reference)
    total = loss(model, pack([PAIRS[:2], PAIRS[2:]], like=PAIRS))[0]
    total.backward()

    tensors = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if is_trained(name)}
    merged = Merged(base, Adapter.of_tensors(tensors, base, ADAPTER.scale))

    def value(weights: dict[str, Tensor], answer: Answer) -> Tensor:
        """The score at the last token, or the summed log-probability of the answer, which is alone in its row."""
        ids = torch.tensor([answer.ids])
        output = functional_call(plain, weights, ids if kind == "reward" else ids[:, :-1]).value[0]
        if kind == "reward":
            return output[-1, 0]
        return (output.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0] * torch.tensor(answer.mask)).sum()

    expected = torch.stack([
        _expected(kind, *((value(dict(merged), a), value(base, a).detach()) for a in (pair.first, pair.second)), pair)
        for pair in PAIRS
    ]).sum()  # fmt: skip
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)
    gradients = dict(zip(tensors, torch.autograd.grad(expected, list(tensors.values())), strict=True))
    parameters = dict(model.named_parameters())
    assert {name for name, p in parameters.items() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("quantize", [None, "nf4", "int8"])
def test_the_reference_is_the_base_as_it_is_stored(quantize: Quantization | None, tmp_path: Path) -> None:
    base = _saved(tmp_path, 1)
    adapter = ADAPTER.model_copy(update={"quantize": quantize})
    model = _adapted(base.config, base.state_dict(), adapter)
    examples = [_example(pair, number) for number, pair in enumerate(PAIRS)]
    cached = with_reference(examples, str(tmp_path), "fp32", quantization=quantize)
    microbatch = pack(
        [[replace(pair, values=dict(e.values)) for pair, e in zip(PAIRS, cached, strict=True)]], dtype=torch.float32
    )
    live = LiveReference(None, LossConfig(), None)
    values = [reference(model, microbatch, sequences_of(microbatch)) for reference in (cached_reference, live)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        trained = log_probs(model, microbatch, sequences_of(microbatch), soft_cap=None, chunk_bytes=2**20)
    assert not torch.allclose(trained, values[1], atol=0.1), "the adapters are on again"
