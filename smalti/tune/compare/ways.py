"""The ways to make a model answer, and what each costs once: FLOPs, trained parameters, bytes to keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from smalti.base.errors import UserError, nearest
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.cost.flops import train_flops_per_token
from smalti.cost.params import count
from smalti.model.adapters.apply import apply, is_adapter
from smalti.model.decoder import Decoder

Way = Literal["prompt", "retrieve", "lora", "full", "continue"]
WAYS: tuple[Way, ...] = get_args(Way)
PROMPTED: tuple[Way, ...] = ("prompt", "retrieve")
"""Those without training."""
_LORA_RATE = 5.0
"""The learning rate of adapters over that of all weights, as the recipes lora and instruct have it."""


@dataclass(frozen=True)
class Training:
    """What the training of a way takes, from its config."""

    steps: int
    tokens: int
    flops: float
    params: int
    """Trained parameters."""


def parse_ways(text: str) -> list[Way]:
    """Return the ways of a list with commas, in the order of ``WAYS``. Raises UserError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in WAYS:
            close = nearest(name, WAYS)
            raise UserError(
                f"--ways: there is no way '{name}'",
                allowed=", ".join(WAYS),
                hint=f"did you mean {close}?" if close else None,
            )
    if not names:
        raise UserError("--ways names nothing", allowed=", ".join(WAYS), hint="--ways prompt,lora")
    return [way for way in WAYS if way in names]


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], dict[Way, list[str]]]:
    """Return the overrides of all trained ways, and those of one of them (``lora.train.optimizer.lr=1e-3``)."""
    common: list[str] = []
    of_way: dict[Way, list[str]] = {way: [] for way in WAYS}
    for override in overrides:
        name, _, rest = override.partition(".")
        way = next((way for way in WAYS if way == name), None)
        if way is None:
            common.append(override)
        elif way in PROMPTED or not rest:
            raise UserError(f"{override} has no effect: {way} trains nothing", allowed="lora., full. and continue.")
        else:
            of_way[way].append(rest)
    return common, of_way


def changes(way: Way, config: RunConfig) -> list[str]:
    """Return what a trained way changes in the recipe.

    ``lora``: adapters, unless the recipe has some; ``full``: none. The learning rate of adapters is five times that
    of all weights. ``continue``: as ``full``, with all tokens of the conversations in the loss.
    """
    has_adapter, rate = config.adapter is not None, config.train.optimizer.lr
    if way == "lora":
        return [] if has_adapter else ["adapter.rank=16", f"train.optimizer.lr={rate * _LORA_RATE:g}"]
    whole = ["adapter=null", f"train.optimizer.lr={rate / _LORA_RATE:g}"] if has_adapter else []
    roles = "tune.examples.roles=[system,developer,user,assistant,tool]"
    return [*whole, roles] if way == "continue" else whole


def training_of(config: RunConfig) -> Training:
    """Return steps, tokens, FLOPs and trained parameters of a run.

    FLOPs are those of ``train_flops_per_token``, of adapters with 6 for each of their own parameters.
    """
    steps, adapter = config.length.total_steps, config.adapter
    tokens, trained = config.length.tokens(steps), count(config.model).total
    flops = float(
        sum(
            train_flops_per_token(config.model, seq_len, frozen=adapter is not None) * n
            for seq_len, n in config.tokens_by_seq_len().items()
        )
    )
    if adapter is not None:
        with torch.device("meta"):
            model = Decoder(config.model)
            apply(model, adapter)
        moe = config.model.moe
        active = moe.num_experts_per_tok / moe.num_experts if moe is not None else 1.0
        adapters = [parameter for name, parameter in model.named_parameters() if is_adapter(name)]
        trained = sum(parameter.numel() for parameter in adapters)
        # Those of routed experts have a dimension of experts, of which a token meets some.
        flops += 6.0 * tokens * sum(each.numel() * (active if each.ndim == 3 else 1.0) for each in adapters)
    return Training(steps, tokens, flops, trained)


def answer_flops(model: ModelConfig, prompt_tokens: float, answer_tokens: float) -> float:
    """Return the FLOPs of the forward pass over a prompt and its answer, a third of those of training."""
    n = prompt_tokens + answer_tokens
    return n * train_flops_per_token(model, max(1, round(n))) / 3
