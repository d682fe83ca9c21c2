"""Router choices taken down from one forward pass and forced on another.

Two runs that differ in rounding send tokens near a tie to different experts, and then differ in much more than
rounding. With the choices of one forced on the other they are comparable again. The scores, and the weights made of
them, stay those of the run at hand.

Not for modules under ``torch.compile``, which would not see the change, nor for blocks that are recomputed in the
backward pass, which choose twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from smalti.base.errors import UserError
from smalti.model.blocks.moe.router import Choose, Router


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[list[Tensor]]:
    """Yields a list to which every call of a MoE layer of ``model`` adds its choices, int64 [B, T, k], in order."""
    choices: list[Tensor] = []

    def taken_down(choose: Choose) -> Choose:
        def wrapped(score_BTE: Tensor) -> Tensor:
            choices.append(choose(score_BTE))
            return choices[-1]

        return wrapped

    with replaced_choices(model, lambda router: taken_down(router.choose)):
        yield choices


@contextmanager
def forced_choices(model: nn.Module, choices: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the n-th call of a MoE layer of ``model`` takes ``choices[n]`` [B, T, k] instead of its own.

    UserError where their shape is another, or where their number is not that of the calls.
    """
    waiting = iter(choices)

    def forced(choose: Choose) -> Choose:
        def wrapped(score_BTE: Tensor) -> Tensor:
            expert_BTk = next(waiting, None)
            if expert_BTk is None:
                raise UserError(f"a MoE layer was called more often than the {len(choices)} choices given")
            wanted = choose(score_BTE).shape
            if expert_BTk.shape != wanted:
                raise UserError(f"forced choices have shape {tuple(expert_BTk.shape)}", allowed=f"{tuple(wanted)}")
            return expert_BTk.to(score_BTE.device)

        return wrapped

    with replaced_choices(model, lambda router: forced(router.choose)):
        yield
    if (left := sum(1 for _ in waiting)) > 0:
        raise UserError(f"{left} of {len(choices)} forced choices were not used: MoE layers were called less often")


@contextmanager
def replaced_choices(model: nn.Module, chooser_of: Callable[[Router], Choose]) -> Iterator[None]:
    """Inside, each router of ``model`` chooses by ``chooser_of(router)``."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.chooser = chooser_of(router)
    try:
        yield
    finally:
        for router in routers:
            router.chooser = None
