"""Records the router choices of one forward pass and forces them on another.

Rounding sends tokens near a tie to other experts, which changes much more than rounding does; with the choices of one
run forced on the other, the two are comparable. Scores and weights are not replaced.

Not for modules under ``torch.compile``, which ignore the change, nor for blocks that are recomputed in the backward
pass, which choose twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.model.blocks.moe.router import Choose, Router


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager: a list to which every call of an MoE layer appends its choices, int64 [B, T, k]."""
    choices: list[Tensor] = []

    def recording(choose: Choose) -> Choose:
        def wrapped(score_BTE: Tensor) -> Tensor:
            choices.append(choose(score_BTE))
            return choices[-1]

        return wrapped

    with replaced_choices(model, lambda router: recording(router.choose)):
        yield choices


@contextmanager
def forced_choices(model: nn.Module, choices: Sequence[Tensor]) -> Iterator[None]:
    """Context manager: the n-th call of an MoE layer of ``model`` uses ``choices[n]`` [B, T, k].

    UserError for another shape, or if the number of choices is not that of the calls.
    """
    remaining = iter(choices)

    def forced(choose: Choose) -> Choose:
        def wrapped(score_BTE: Tensor) -> Tensor:
            expert_BTk = next(remaining, None)
            if expert_BTk is None:
                raise UserError(f"MoE layers were called more often than the {len(choices)} forced choices")
            wanted = choose(score_BTE).shape
            if expert_BTk.shape != wanted:
                raise UserError(f"forced choices have shape {tuple(expert_BTk.shape)}", allowed=f"{tuple(wanted)}")
            return expert_BTk.to(score_BTE.device)

        return wrapped

    with replaced_choices(model, lambda router: forced(router.choose)):
        yield
    if (left := sum(1 for _ in remaining)) > 0:
        raise UserError(f"{left} of {len(choices)} forced choices were not used: MoE layers were called less often")


@contextmanager
def replaced_choices(model: nn.Module, chooser_of: Callable[[Router], Choose]) -> Iterator[None]:
    """Context manager: each router of ``model`` chooses by ``chooser_of(router)``."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.chooser = chooser_of(router)
    try:
        yield
    finally:
        for router in routers:
            router.chooser = None
