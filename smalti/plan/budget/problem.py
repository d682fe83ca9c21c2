"""Quantities of a budget and their equations, and the solution for one fit and one assumed MFU.

Given values are kept; every other value is derived, an ``Assumption`` or a ``Choice``. Contradictions and derived
values out of range raise UserError with the equation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware, hardware
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.cost.params import count
from smalti.plan.budget.choice import Choice, Law, close
from smalti.plan.budget.equations import Equation, System
from smalti.plan.laws.fits import DEFAULT, Fit, Interval, fit_named
from smalti.plan.quantities import (
    Quantity,
    format_number,
    join_texts,
    parse_quantity,
    require_in_range,
    require_known,
    require_whole,
)

EQUATIONS = (
    Equation("tokens_per_param", 1, ("tokens",), ("params",)),
    Equation("tokens_per_active_param", 1, ("tokens",), ("active_params",)),
    Equation("flops", 6, ("active_params", "tokens")),
    Equation("gpu_hours", 24, ("gpus", "days")),
    Equation("flops", 3600, ("gpu_hours", "peak_flops_per_s", "mfu")),
    Equation("cost_usd", 1, ("gpu_hours", "price_usd_per_gpu_hour")),
)
DENSE = Equation("active_params", 1, ("params",))

LIMITS: dict[str, tuple[float, float]] = {
    "params": (1e3, 1e16),
    "active_params": (1e3, 1e16),
    "tokens": (1e3, 1e18),
    "gpus": (1e-6, 1e8),
    "days": (1e-6, 36_500),
    "mfu": (1e-4, 1),
    "price_usd_per_gpu_hour": (1e-3, 10_000),
    "tokens_per_param": (1e-9, 1e12),
    "tokens_per_active_param": (1e-9, 1e12),
    "gpu_hours": (1e-9, 1e13),
    "flops": (1e6, 1e34),
    "cost_usd": (1e-6, 1e15),
    "loss": (0.1, 20),
    "inference_tokens": (1, 1e21),
    "inference_mfu": (1e-4, 1),
    "unique_tokens": (1e3, 1e18),
    "experts": (1, 512),
}
"""Number -> the smallest and largest accepted value. Values are added to the system in this order."""

OF_THE_LAW = ("loss", "inference_tokens", "inference_mfu", "unique_tokens", "experts")
"""Quantities that are in no equation."""

KEYS = (*LIMITS, "gpu", "model", "fit", "precision")
"""All keys."""

PRECISIONS = ("bf16", "fp8")

ASSUMED_GPU = "h100-sxm"
ASSUMED_MFU: dict[str, tuple[float, Interval, str]] = {
    "bf16": (
        0.40,
        (0.30, 0.50),
        "large bf16 runs: 0.38 to 0.43 for Llama 3 405B on up to 16,384 H100 (arXiv 2407.21783, table 4); 0.34 to 0.48 "
        "for MPT on A100, 0.36 on H100 (MosaicML, 2023)",
    ),
    "fp8": (
        0.20,
        (0.15, 0.35),
        "of the fp8 peak: 0.20 for Llama 4 Behemoth on 32,000 H100 (Meta, April 2025: 390 TFLOP/s), 0.17 for "
        "DeepSeek-V3 (arXiv 2412.19437: 14.8T tokens in 2.66M hours of an H800)",
    ),
}
"""Precision -> assumed MFU by 6 N D, its interval, and their source."""


@dataclass(frozen=True)
class Assumption:
    """A value that was not given."""

    name: str
    value: float | str
    interval: Interval | None
    why: str


@dataclass(frozen=True)
class Solution:
    """All derived numbers."""

    values: dict[str, float]
    choice: Choice | None
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...] = ()


class Problem:
    """One set of given values. Raises UserError for unknown keys and impossible values."""

    def __init__(self, values: Mapping[str, str | float], model: ModelConfig | None = None) -> None:
        for key in values:
            require_known(key, KEYS)
        words = {name: str(values[name]).strip() for name in ("gpu", "model", "fit", "precision") if name in values}
        self.given = {name: parse_quantity(name, values[name], LIMITS[name]) for name in LIMITS if name in values}
        if isinstance(values.get("gpus"), str):  # a float may be the fractional result of another budget
            require_whole(self.given["gpus"])
        self.model_name = words.get("model")
        self.fit = fit_named(words.get("fit", DEFAULT))
        self.fit_is_given = "fit" in words
        self.precision = words.get("precision", "bf16")
        self.precision_is_given = "precision" in words
        self.gpu_is_given = "gpu" in words
        self._check_words(words)
        self.sizes = counted(self.model_name, model)
        for name, size in self.sizes.items():
            if name in self.given and abs(self.given[name].value / size - 1) > max(self.given[name].rounding, 1e-9):
                raise UserError(
                    f"{name}={self.given[name].text} but {self.model_name} has {format_number(size)}",
                    allowed="one of them",
                    hint=f"leave {name} out, or model",
                )
        self.device = _device(words.get("gpu"), self.given)

    def _check_words(self, words: Mapping[str, str]) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(f"precision={self.precision} cannot be planned with", allowed=", ".join(PRECISIONS))
        if "inference_mfu" in self.given and "inference_tokens" not in self.given:
            raise UserError("inference_mfu has no effect without inference_tokens", allowed="both", hint="leave it out")
        if "precision" in words and "gpu" not in words and not any(name in self.given for name in _OF_A_GPU):
            raise UserError("precision has no effect without a GPU", allowed="with gpu=NAME", hint="leave it out")

    def solve(self, fit: Fit | None = None, *, mfu: float | None = None, check_it: bool = False) -> Solution:
        """Solve for ``fit`` (absent: the given one), with ``mfu`` instead of the assumed one."""
        assumptions: list[Assumption] = []
        law = self.law(fit or self.fit)
        system = System(EQUATIONS)
        self._give(system, assumptions)
        target = self.given["loss"].value if "loss" in self.given else None
        choice = close(system, law, target, 0.0, may_choose=False)
        self._assume_rates(system, mfu, assumptions)
        choice = close(system, law, target, self.served(system.value("mfu")), may_choose=True) or choice
        numbers = {name: value for name in LIMITS if (value := system.value(name)) is not None}
        if check_it:  # assumed values without the rounding of their logarithms
            numbers |= {
                assumption.name: assumption.value
                for assumption in assumptions
                if assumption.name in numbers and not isinstance(assumption.value, str)
            }
        numbers |= {name: quantity.value for name, quantity in self.given.items()} | self.sizes
        if self.is_dense and "params" in numbers:
            why = "a dense model; for an MoE give both, or model=NAME"
            assumptions.append(Assumption("active_params", "= params", None, why))
        if "loss" not in numbers and "active_params" in numbers and "tokens" in numbers:
            numbers["loss"] = law.loss(numbers["active_params"], numbers["tokens"])
        if "loss" not in numbers and (idle := [name for name in _NEEDS_A_MODEL if name in self.given]):
            raise UserError(
                f"{idle[0]} has no effect: parameters and tokens do not follow from {join_texts(self.given)}",
                allowed="with params, tokens, loss or a budget (flops, gpu_hours, cost_usd)",
                hint=f"leave {idle[0]} out",
            )
        notes = self._check(system, law, numbers, assumptions) if check_it else ()
        return Solution(numbers, choice, tuple(assumptions), notes)

    def served(self, mfu: float | None) -> float:
        """Return the inference tokens, weighed by the cost of an inference FLOP in training FLOPs."""
        if "inference_tokens" not in self.given:
            return 0.0
        tokens = self.given["inference_tokens"].value
        if "inference_mfu" not in self.given:
            return tokens
        if mfu is None:
            raise UserError("inference_mfu has no effect without a GPU", allowed="with gpu=NAME", hint="leave it out")
        return tokens * mfu / self.given["inference_mfu"].value

    @property
    def is_dense(self) -> bool:
        """True unless total and active parameters, or experts, are given."""
        both = all(name in self.given or name in self.sizes for name in ("params", "active_params"))
        return not both and "experts" not in self.given

    def law(self, fit: Fit) -> Law:
        """Return the scaling law of the loss."""
        values = {name: self.given[name].value for name in ("experts", "unique_tokens") if name in self.given}
        return Law(fit, **values)

    def _give(self, system: System, assumptions: list[Assumption]) -> None:
        if self.device is not None:
            if not self.gpu_is_given:
                needs_gpu = next(name for name in _OF_A_GPU if name in self.given)
                why = f"{needs_gpu} is given without a gpu; set gpu=NAME (smalti plan hardware lists them)"
                assumptions.append(Assumption("gpu", ASSUMED_GPU, None, why))
            if not self.precision_is_given:
                why = "the format of most large runs; the alternative is precision=fp8"
                assumptions.append(Assumption("precision", self.precision, None, why))
            peak = self.device.require_peak(self.precision)
            system.give(Quantity("peak_flops_per_s", peak, format_number(peak), 1e-12))
        if self.is_dense:
            system.equate(DENSE)
        for name, size in self.sizes.items():
            system.give(Quantity(name, size, f"{format_number(size)} ({self.model_name})", 1e-12))
        for name, quantity in self.given.items():
            if name not in OF_THE_LAW and name not in self.sizes:
                system.give(quantity)

    def _assume_rates(self, system: System, mfu: float | None, assumptions: list[Assumption]) -> None:
        if self.device is None:
            return
        if system.value("mfu") is None:
            usual, interval, why = ASSUMED_MFU[self.precision]
            system.set("mfu", mfu or usual)
            assumptions.append(Assumption("mfu", usual, interval, why))
        price = self.device.price
        if system.value("price_usd_per_gpu_hour") is None and price is not None:
            system.set("price_usd_per_gpu_hour", price.usd_per_hour)
            why = f"{self.device.title}, on demand in {price.date}: {price.source}"
            assumptions.append(Assumption("price_usd_per_gpu_hour", price.usd_per_hour, None, why))

    def _check(
        self, system: System, law: Law, numbers: Mapping[str, float], assumptions: list[Assumption]
    ) -> tuple[str, ...]:
        """Return notes. Raises UserError for derived values out of range, and for a loss that contradicts the law."""
        for name, value in numbers.items():
            if name not in self.given:
                equation = system.equation_of(name)
                hint = f"it follows from {join_texts(self.given)}"
                hint += f" by {equation.text}" if equation else ""
                taken = [
                    f"{assumption.name}={assumption.value}"
                    for assumption in assumptions
                    if assumption.name in ("gpu", "mfu", "precision")
                ]
                hint += f"; assumed: {' '.join(taken)}" if taken else ""
                require_in_range(name, value, format_number(value), LIMITS[name], hint=hint)
        active, total, tokens = (numbers.get(name) for name in ("active_params", "params", "tokens"))
        if active and total and active > total * (1 + 1e-9):
            raise UserError(
                f"active_params={format_number(active)} are more than params={format_number(total)}",
                allowed="at most as many active parameters as there are",
                hint=None if "active_params" in self.given else "they follow from the rest; give active_params too",
            )
        if "loss" in self.given and active and tokens:
            note = law.check_loss(self.given["loss"], active, tokens)
            return (*system.rounded, note) if note else tuple(system.rounded)
        return tuple(system.rounded)


_NEEDS_A_MODEL = ("inference_tokens", "unique_tokens", "experts")
_OF_A_GPU = ("cost_usd", "gpu_hours", "gpus", "days", "mfu", "price_usd_per_gpu_hour")


def _device(name: str | None, quantities: Mapping[str, Quantity]) -> Hardware | None:
    if name is None and not any(key in quantities for key in _OF_A_GPU):
        return None
    return hardware(name or ASSUMED_GPU)


def counted(name: str | None, model: ModelConfig | None) -> dict[str, float]:
    """Count ``params`` and ``active_params`` of ``model``, or of the preset ``name``; empty without a name."""
    if name is None:
        return {}
    sizes = count(model or from_dict(ModelConfig, {"preset": name}, f"model={name}").config)
    return {"params": sizes.total, "active_params": sizes.active}
