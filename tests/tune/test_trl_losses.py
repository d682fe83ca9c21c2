"""The losses of TRL on the same batches, and their gradients: within 1e-5. Skipped where TRL is not installed."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_rows import VOCAB, Answer, Layerless, pack, some_pairs
from test_preference_loss import CASES, loss_of
from test_reward_loss import Scorer
from torch import Tensor

from smalti.config.preference import RewardConfig
from smalti.tune.losses.distillation import forward_kl, reverse_kl
from smalti.tune.reward.loss import RewardLoss

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAIRS = some_pairs(6)
FIRST, SECOND = [pair.first for pair in PAIRS], [pair.second for pair in PAIRS]


class Peer:
    """A ``self`` for TRL's losses: what they read of a trainer, over the model without layers."""

    def __init__(self, model: Layerless, **options: Any) -> None:
        self.model = SimpleNamespace(training=True)
        same = {"gather": lambda x: x, "gather_for_metrics": lambda x: x, "device": torch.device("cpu")}
        self.accelerator = SimpleNamespace(**same)
        self._metrics: Any = {"train": defaultdict(list)}
        self.policy, self._total_train_tokens, self._tp_size = model, 0, 1
        self.aux_loss_enabled = self.use_weighting = False
        self.ld_alpha, self.precompute_ref_logps, self.f_divergence_type = None, True, "reverse_kl"
        self.loss_weights, self.label_smoothing, self.calculate_KL, self.alpha = [1.0], 0.0, True, 0.0
        vars(self).update(options)

    def forward(self, *, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        places = torch.arange(input_ids.shape[1] - 1)
        logits = (self.policy.table[input_ids[:, :-1]] + self.policy.place[places]) @ self.policy.weight.T
        counted = labels[:, 1:] != -100
        log_probs = logits.log_softmax(-1).gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * counted
        zeros = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def _padded(answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """Ids and completion masks [B, T], as TRL's collators give them."""
    longest = max(len(answer.ids) for answer in answers)
    ids, mask = (torch.zeros(len(answers), longest, dtype=torch.int64) for _ in range(2))
    for row, answer in enumerate(answers):
        ids[row, : len(answer.ids)] = torch.tensor(answer.ids)
        mask[row, 1 : len(answer.ids)] = torch.tensor(answer.mask)
    return ids, mask


def _column(name: str) -> Tensor:
    return torch.tensor([pair.values[name] for pair in PAIRS], dtype=torch.float64)


def _peer_loss(case: dict[str, Any], model: Layerless) -> Tensor:
    name = case["loss"]
    beta = case.get("beta", 2.0 if name == "simpo" else 0.1)
    ids, mask = _padded(FIRST + SECOND)
    if name == "simpo":
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        peer = Peer(model, loss_type="simpo", beta=beta, simpo_gamma=case.get("gamma", 1.0))
        peer.label_smoothing = case.get("label_smoothing", 0.0)
        labels = ids.masked_fill(mask == 0, -100)
        logits = (model.table[ids] + model.place[torch.arange(ids.shape[1])]) @ model.weight.T
        chosen, rejected = CPOTrainer.get_batch_logps(logits, labels, average_log_prob=True).chunk(2)
        return CPOTrainer.cpo_loss(peer, chosen, rejected)[0].mean()
    if name == "kto":
        from trl.trainer.kto_trainer import KTOTrainer

        peer = Peer(model, loss_type="kto", beta=beta, label_smoothing=0.0)
        peer.desirable_weight, peer.undesirable_weight = case["desirable_weight"], case["undesirable_weight"]
        peer._compute_kl_logps = lambda *_: torch.zeros(len(PAIRS), dtype=torch.float64)
        ids, mask = _padded(FIRST)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
        batch |= {"label": _column("label") > 0, "ref_logps": _column("reference_first")}
        batch |= {"ref_KL_logps": torch.full((len(PAIRS),), -KL, dtype=torch.float64)}
        return KTOTrainer._compute_loss(_bound(peer), peer.forward, batch, return_outputs=False)
    from trl.trainer.dpo_trainer import DPOTrainer

    kinds = {"dpo": "sigmoid", "robust_dpo": "robust", "ipo": "ipo"}
    peer = Peer(model, loss_types=[kinds[name]], beta=beta, label_smoothing=case.get("label_smoothing", 0.0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
    inputs |= {"ref_chosen_logps": _column("reference_first"), "ref_rejected_logps": _column("reference_second")}
    peer.model = _callable(peer)
    return DPOTrainer._compute_loss(peer, peer.model, inputs, return_outputs=False)


KL = 0.75
"""Mean log-ratio of the mismatched answers."""


def _callable(peer: Peer) -> Any:
    class Model:
        training = True

        def __call__(self, **inputs: Any) -> Any:
            return peer.forward(**inputs)

    return Model()


def _bound(peer: Peer) -> Peer:
    peer.model = _callable(peer)
    return peer


@pytest.mark.parametrize("case", [case for case in CASES if not (case["loss"] == "dpo" and "label_smoothing" in case)])
def test_preference_losses(case: dict[str, Any]) -> None:
    """TRL's DPO has no conservative form."""
    model, loss = Layerless(), loss_of(case)
    if case["loss"] == "kto":
        loss.state.value.fill_(KL)  # type: ignore[attr-defined]
    theirs = _peer_loss(case, model)
    torch.autograd.backward(theirs)
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total, weight, _ = loss(model, pack([PAIRS[:4], PAIRS[4:]]))
    torch.autograd.backward(total / weight)
    torch.testing.assert_close(total / weight, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-5, atol=1e-5)


def test_reward_loss() -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    model, peer = Scorer(), Peer(Layerless(), args=SimpleNamespace(center_rewards_coefficient=0.3))
    hidden = torch.stack([model.table[a.ids[-1]] + model.place[len(a.ids) - 1] for a in FIRST + SECOND])
    scores = hidden.tanh() @ model.weight[:1].T
    inputs = {"margin": _column("margin"), "attention_mask": torch.ones(2, 2)}
    theirs = RewardTrainer.compute_loss(peer, lambda **_: SimpleNamespace(logits=scores), inputs)
    total, weight, metrics = RewardLoss(RewardConfig(center_coef=0.3))(model, pack([PAIRS]))
    torch.testing.assert_close(total / weight, theirs, rtol=1e-5, atol=1e-5)
    assert float(metrics["reward/accuracy"] / weight) == pytest.approx(peer._metrics["train"]["accuracy"][0])


def test_divergences() -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = torch.randn(2, 3, 5, VOCAB, dtype=torch.float64).unbind()
    for beta, exact in ((0, forward_kl), (1, reverse_kl)):
        theirs = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, temperature=2.0, reduction="sum")
        torch.testing.assert_close(exact(student, teacher, temperature=2.0).sum() / 4, theirs, rtol=1e-5, atol=1e-5)
