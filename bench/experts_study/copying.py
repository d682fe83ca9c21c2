"""How well the longest runs copy from their context, over their checkpoints.

Rows of random tokens are written twice; a model that copies predicts the second half from the first (the test of
induction heads in Olsson et al. 2022, arXiv:2209.11895). Nothing else makes random tokens predictable.
"""

import math
from pathlib import Path
from typing import Any

from experts_study.runs import Study
from experts_study.settings import Run
from smalti.config.run import RunConfig

ROWS = 64


def copying(study: Study, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Return, for each run with checkpoints in its folder, nats per token of both halves at each of them.

    The first half cannot be predicted: its floor is the logarithm of the vocabulary.
    """
    rows = {}
    for run in runs:
        config = study.config(run)
        steps = sorted(int(path.name.split("-")[1]) for path in Path(config.run_folder).glob("checkpoints/step-*"))
        if steps:
            halves = [_halves(config, step) for step in steps]
            rows[run.name] = {
                "tokens": [step * study.size.batch_tokens for step in steps],
                "first": [first for first, _ in halves],
                "second": [second for _, second in halves],
                "floor_of_first": math.log(study.size.vocab),
            }
    return rows


def _halves(config: RunConfig, step: int) -> tuple[float, float]:
    import torch
    import torch.nn.functional as F

    from smalti.distributed.checkpoint.checkpoint import read_model
    from smalti.model.decoder import Decoder

    model = Decoder(config.model).eval()
    model.load_state_dict(read_model(f"{config.run_folder}/checkpoints/step-{step:08d}"))
    draw = torch.Generator().manual_seed(0)
    half = config.data.seq_len // 2
    half_BT = torch.randint(256, config.model.vocab_size, (ROWS, half), generator=draw)
    ids_BT = torch.cat([half_BT, half_BT], dim=1)
    with torch.no_grad():
        logits_BTV = model(ids_BT[:, :-1]).value
    nats_BT = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none").view(ROWS, -1)
    # The first token of the second half follows nothing that it followed before.
    return nats_BT[:, : half - 1].mean().item(), nats_BT[:, half:].mean().item()
