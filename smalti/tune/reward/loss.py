"""The loss of a reward model over a microbatch of pairs. Shapes: S rows, T tokens, P pairs of a row."""

import torch
from torch import Tensor, nn

from smalti.config.preference import RewardConfig
from smalti.train.batches import IGNORE, Microbatch
from smalti.train.step import Metrics
from smalti.tune.losses.accuracy import correct
from smalti.tune.losses.reward import bradley_terry
from smalti.tune.sequences import column, sequences_of

MARGIN = "margin"
"""Column with the margin of each pair; absent: 0."""


class RewardLoss:
    """Bradley-Terry over the scores at the last token of both answers; weight = number of pairs.

    The last token must be an input, not only a target: examples of reward models end with one more token, outside the
    loss. The model's value is a score of each token (``model.num_labels=1``).
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    def __call__(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor, Tensor, Metrics]:
        """Run the forward pass of a microbatch; return the summed loss, the number of pairs, and sums for the log."""
        sequences = sequences_of(microbatch)
        scores_ST1: Tensor = model(
            microbatch.inputs,
            microbatch.positions,
            microbatch.documents,
            n_documents=microbatch.n_documents,
            mask_BT=microbatch.targets != IGNORE,
        ).value
        scores_SK = sequences.last(scores_ST1[..., 0].to(torch.promote_types(scores_ST1.dtype, torch.float32)))
        chosen_SP, rejected_SP, exists_SP = scores_SK[:, 0::2], scores_SK[:, 1::2], sequences.pairs_exist()
        margin_SP = column(microbatch, MARGIN)[:, 0::2] if MARGIN in microbatch.values else None
        loss_SP = bradley_terry(chosen_SP, rejected_SP, margin_SP, center_coef=self.config.center_coef)
        with torch.no_grad():
            is_correct_SP = correct(chosen_SP - rejected_SP, chosen_SP.abs() + rejected_SP.abs())
            metrics = {
                "reward/accuracy": (is_correct_SP * exists_SP).sum(),
                "reward/chosen": (chosen_SP * exists_SP).sum(),
                "reward/rejected": (rejected_SP * exists_SP).sum(),
                "reward/margin": ((chosen_SP - rejected_SP) * exists_SP).sum(),
                "loss/train/targets": sequences.lengths_SK.sum(),
            }
        return (loss_SP * exists_SP).sum(), exists_SP.sum(), metrics
