"""Cost of the phases of a model (pretraining, curriculum, fine-tuning, preference), and what a budget pays for.

Each phase has a compute and a labelling cost, with an interval where a price, an MFU or a count is assumed; the rungs
(prompt, tune, continue, pretrain) add them up. Missing counts are assumed only if no count is given, or if a budget is.
Not included: bought or curated data, staff, evaluation, and experiments before a run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware, hardware
from smalti.config.model import ModelConfig
from smalti.plan.budget.problem import ASSUMED_GPU, ASSUMED_MFU, PRECISIONS, Assumption, counted
from smalti.plan.budget.problem import LIMITS as BUDGET_LIMITS
from smalti.plan.laws import law as laws
from smalti.plan.laws.fits import DEFAULT, FITS, Interval, spread
from smalti.plan.quantities import Quantity, parse_quantity, require_known, require_whole

_SHARED = ("params", "active_params", "gpus", "mfu", "price_usd_per_gpu_hour", "cost_usd")
LIMITS: dict[str, tuple[float, float]] = {
    **{name: BUDGET_LIMITS[name] for name in _SHARED},
    "pretraining_tokens": BUDGET_LIMITS["tokens"],
    "curriculum_tokens": BUDGET_LIMITS["tokens"],
    "pairs": (1, 1e12),
    "chats": (1, 1e12),
    "comparisons": (1, 1e12),
    "tokens_per_pair": (1, 1e7),
    "tokens_per_chat": (1, 1e7),
    "tokens_per_comparison": (1, 1e7),
    "usd_per_pair": (1e-6, 1e6),
    "usd_per_chat": (1e-6, 1e6),
    "usd_per_comparison": (1e-6, 1e6),
    "fine_tuning_epochs": (1e-3, 1000),
    "preference_epochs": (1e-3, 1000),
}
"""Number -> the smallest and largest accepted value."""

WORDS = ("gpu", "model", "precision")
KEYS = (*LIMITS, *WORDS)
"""All keys."""

COUNTS = ("pretraining_tokens", "curriculum_tokens", "pairs", "chats", "comparisons")

_TALK = "MosaicML's and Databricks' talks, 2023 and 2024"
ASSUMED: Mapping[str, tuple[float, Interval | None, str]] = {
    "usd_per_pair": (30.0, (10.0, 100.0), f"an instruction with its answer, written by people: {_TALK}"),
    "usd_per_chat": (130.0, None, f"a chat of several turns, written by people: {_TALK}; no range is printed"),
    "usd_per_comparison": (8.0, (5.0, 20.0), f"two answers compared by people: {_TALK}"),
    "pairs": (27_540, (10_000, 100_000), "annotations of Llama 2 (arXiv 2307.09288); a talk of 2024 says 10K to 100K"),
    "comparisons": (30_000, (10_000, 100_000), "10K to 100K (a talk of 2024); Llama 2 had over 1M"),
    "tokens_per_pair": (800, (200, 3000), "as the examples of Llama 2's comparisons"),
    "tokens_per_chat": (2000, (500, 8000), "some turns of the length of Llama 2's"),
    "tokens_per_comparison": (1600, (400, 6000), "two answers of 800 tokens with their prompt; Llama 2, table 26"),
    "fine_tuning_epochs": (2, None, "as Llama 2"),
    "preference_epochs": (1, None, "as Llama 2's reward model"),
}
"""Key -> assumed value, its interval, and its source."""

CURRICULUM_FRAC = 0.1
"""~1T tokens of higher quality after ~10T (the talk of 2024)."""

TRAIN_FLOPS, DPO_FLOPS = 6, 8
"""FLOPs for each active parameter and token: forward and backward; in DPO also the forward pass of the reference model
(Rafailov et al. 2023, arXiv 2305.18290)."""

RUNGS: Mapping[str, tuple[str, ...]] = {
    "prompt": (),
    "tune": ("fine-tuning", "preference"),
    "continue": ("curriculum", "fine-tuning", "preference"),
    "pretrain": ("pretraining", "curriculum", "fine-tuning", "preference"),
}
"""Rung -> the phases to pay for; an open model includes the earlier ones."""


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; the interval is None where nothing is assumed."""

    value: float
    interval: Interval | None = None

    def times(self, other: "Estimate | float") -> "Estimate":
        """Return the product; distances in logarithms are combined as independent."""
        if not isinstance(other, Estimate):
            other = Estimate(other)
        value = self.value * other.value
        if self.interval is None and other.interval is None:
            return Estimate(value)
        down = math.hypot(*(math.log(factor.value / factor.interval[0]) for factor in (self, other) if factor.interval))
        up = math.hypot(*(math.log(factor.interval[1] / factor.value) for factor in (self, other) if factor.interval))
        return Estimate(value, (value * math.exp(-down), value * math.exp(up)))

    @property
    def inverse(self) -> "Estimate":
        """The reciprocal."""
        ends = None if self.interval is None else (1 / self.interval[1], 1 / self.interval[0])
        return Estimate(1 / self.value, ends)


def total(parts: Sequence[Estimate]) -> Estimate:
    """Return the sum; the ends are added too, as fully correlated errors (such as that of an MFU)."""
    value = sum(part.value for part in parts)
    if all(part.interval is None for part in parts):
        return Estimate(value)
    ends = [part.interval or (part.value, part.value) for part in parts]
    return Estimate(value, (sum(low for low, _ in ends), sum(high for _, high in ends)))


@dataclass(frozen=True)
class Phase:
    """One phase; None: does not follow from the given values."""

    name: str
    tokens: Estimate | None
    """Tokens trained on, repeats included."""
    examples: Mapping[str, float]
    """Kind -> number of examples; empty where there are only tokens."""
    flops: Estimate | None
    gpu_hours: Estimate | None
    days: Estimate | None
    compute_usd: Estimate | None
    labelling_usd: Estimate | None
    cost_usd: Estimate | None
    """Compute and labelling; None if one of them is unknown."""


@dataclass(frozen=True)
class Rung:
    """A way to get a model, and what it costs."""

    name: str
    phases: tuple[str, ...]
    cost_usd: Estimate | None
    """Cost of its phases; None if one is unknown."""
    affordable: str | None
    """``yes``, ``no``, or ``perhaps`` where the budget is inside the interval; None without a budget."""
    pairs_in_reach: float | None
    """Instruction pairs that the budget pays for after the compute of this rung; None without a budget."""


@dataclass(frozen=True)
class Phases:
    """The result of ``solve``."""

    phases: tuple[Phase, ...]
    rungs: tuple[Rung, ...]
    rung: str | None
    """Highest rung that the budget pays for; None without a budget."""
    cost_usd: float | None
    """The budget."""
    assumptions: tuple[Assumption, ...]

    def phase(self, name: str) -> Phase:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def solve(values: Mapping[str, str | float], *, model: ModelConfig | None = None) -> Phases:
    """Return the phases that ``values`` (names of ``KEYS``) describe; ``model`` as in ``budget.solve``."""
    for key in values:
        require_known(key, KEYS)
    return _Problem(values, model).answer()


class _Problem:
    """The given values, and the assumptions for the others."""

    def __init__(self, values: Mapping[str, str | float], model: ModelConfig | None) -> None:
        self.given: dict[str, Quantity] = {
            name: parse_quantity(name, values[name], LIMITS[name]) for name in LIMITS if name in values
        }
        if isinstance(values.get("gpus"), str):
            require_whole(self.given["gpus"])
        words = self.words = {name: str(values[name]).strip() for name in WORDS if name in values}
        self.assumptions: list[Assumption] = []
        self.precision = words.get("precision", "bf16")
        if self.precision not in PRECISIONS:
            raise UserError(f"precision={self.precision} cannot be planned with", allowed=", ".join(PRECISIONS))
        self.active = self._active(words.get("model"), model)
        self.assumes = "cost_usd" in self.given or not any(name in self.given for name in COUNTS)
        if self.assumes and self.active is None:
            raise UserError(
                "the model is not given",
                allowed="params or model, or counts: " + ", ".join(COUNTS),
                hint="smalti plan phases params=7b cost_usd=1e6",
            )
        self.device = self._device(words.get("gpu"))

    def answer(self) -> Phases:
        """Return all phases and rungs."""
        phases = (
            self._phase("pretraining", self._count("pretraining_tokens"), TRAIN_FLOPS, {}),
            self._phase("curriculum", self._count("curriculum_tokens"), TRAIN_FLOPS, {}),
            self._labelled("fine-tuning", ("pair", "chat"), TRAIN_FLOPS),
            self._labelled("preference", ("comparison",), DPO_FLOPS),
        )
        budget = self.given["cost_usd"].value if "cost_usd" in self.given else None
        rungs = tuple(
            self._rung(rung, [phase for phase in phases if phase.name in names]) for rung, names in RUNGS.items()
        )
        paid = [rung.name for rung in rungs if budget is not None and rung.cost_usd and rung.cost_usd.value <= budget]
        self._check_used()
        return Phases(phases, rungs, paid[-1] if paid else None, budget, tuple(self.assumptions))

    def _active(self, name: str | None, model: ModelConfig | None) -> float | None:
        sizes = counted(name, model)
        for key in ("active_params", "params"):
            if key in self.given and key in sizes:
                raise UserError(
                    f"{key}={self.given[key].text} and model={name} exclude each other", allowed="one of them"
                )
        if sizes:
            return sizes["active_params"]
        if "active_params" in self.given:
            active = self.given["active_params"]
            if "params" in self.given and active.value > self.given["params"].value:
                raise UserError(
                    f"active_params={active.text} are more than params={self.given['params'].text}",
                    allowed="at most as many active parameters as there are",
                )
            return active.value
        return self.given["params"].value if "params" in self.given else None

    def _device(self, name: str | None) -> Hardware | None:
        if self.active is None:
            return None
        if name is None:
            why = "no gpu is given; set gpu=NAME (smalti plan hardware lists them)"
            self.assumptions.append(Assumption("gpu", ASSUMED_GPU, None, why))
        if "precision" not in self.words:
            why = "the format of most large runs; the alternative is precision=fp8"
            self.assumptions.append(Assumption("precision", self.precision, None, why))
        return hardware(name or ASSUMED_GPU)

    def _take(self, name: str) -> Estimate:
        """A given value, or the assumed one, which is recorded."""
        if name in self.given:
            return Estimate(self.given[name].value)
        value, interval, why = ASSUMED[name]
        self._assume(name, value, interval, why)
        return Estimate(value, interval)

    def _assume(self, name: str, value: float, interval: Interval | None, why: str) -> None:
        if all(assumption.name != name for assumption in self.assumptions):
            self.assumptions.append(Assumption(name, value, interval, why))

    def _count(self, name: str) -> Estimate | None:
        if name in self.given:
            return Estimate(self.given[name].value)
        if not self.assumes or name == "chats":
            return None
        if name not in ("pretraining_tokens", "curriculum_tokens"):
            return self._take(name)
        assert self.active is not None, "counts are assumed only with a model"
        if name == "curriculum_tokens":
            before = self._count("pretraining_tokens")
            assert before is not None
            tokens = before.times(CURRICULUM_FRAC)
            why = "a tenth of the pretraining: ~1T after ~10T (a talk of 2024)"
            self._assume(name, tokens.value, tokens.interval, why)
            return tokens
        active = self.active
        optimal = laws.tokens_for_params(FITS[DEFAULT], active)
        interval = spread(FITS[DEFAULT], lambda fit: {"tokens": laws.tokens_for_params(fit, active)})["tokens"]
        self._assume(name, optimal, interval, f"compute-optimal by {DEFAULT}; models with much inference use far more")
        return Estimate(optimal, interval)

    def _labelled(self, name: str, kinds: tuple[str, ...], flops_each: int) -> Phase:
        counts = {kind: count for kind in kinds if (count := self._count(f"{kind}s")) is not None}
        if not counts:
            return self._phase(name, None, flops_each, {})
        epochs = self._take(f"{name.replace('-', '_')}_epochs") if self.active else Estimate(1)
        tokens = None
        if self.active:
            tokens = total([n.times(self._take(f"tokens_per_{kind}")) for kind, n in counts.items()]).times(epochs)
        labelling = total([n.times(self._take(f"usd_per_{kind}")) for kind, n in counts.items()])
        return self._phase(name, tokens, flops_each, {f"{kind}s": n.value for kind, n in counts.items()}, labelling)

    def _phase(
        self,
        name: str,
        tokens: Estimate | None,
        flops_each: int,
        examples: Mapping[str, float],
        labelling: Estimate | None = None,
    ) -> Phase:
        flops = hours = days = compute = None
        if tokens is not None and self.active is not None and self.device is not None:
            flops = tokens.times(flops_each * self.active)
            peak = self.device.require_peak(self.precision)
            hours = flops.times(self._mfu().inverse).times(1 / (3600 * peak))
            days = hours.times(1 / (24 * self.given["gpus"].value)) if "gpus" in self.given else None
            price = self._price()
            compute = None if price is None else hours.times(price)
        cost = compute
        if examples:
            cost = total([compute, labelling]) if compute and labelling else None
        return Phase(name, tokens, examples, flops, hours, days, compute, labelling, cost)

    def _mfu(self) -> Estimate:
        if "mfu" in self.given:
            return Estimate(self.given["mfu"].value)
        value, interval, why = ASSUMED_MFU[self.precision]
        self._assume("mfu", value, interval, why)
        return Estimate(value, interval)

    def _price(self) -> float | None:
        if "price_usd_per_gpu_hour" in self.given:
            return self.given["price_usd_per_gpu_hour"].value
        assert self.device is not None
        price = self.device.price
        if price is None:
            return None
        why = f"{self.device.title}, on demand in {price.date}: {price.source}"
        self._assume("price_usd_per_gpu_hour", price.usd_per_hour, None, why)
        return price.usd_per_hour

    def _check_used(self) -> None:
        """Raise UserError for keys of examples that are not counted, and for a GPU without a model."""
        for kind in ("pair", "chat", "comparison"):
            for name in (f"usd_per_{kind}", f"tokens_per_{kind}"):
                if name in self.given and f"{kind}s" not in self.given and not (self.assumes and kind != "chat"):
                    raise UserError(f"{name} has no effect without {kind}s", allowed="both", hint=f"leave {name} out")
        for name, kinds in (("fine_tuning_epochs", ("pairs", "chats")), ("preference_epochs", ("comparisons",))):
            if name in self.given and not self.assumes and not any(kind in self.given for kind in kinds):
                counts = " or ".join(kinds)
                raise UserError(f"{name} has no effect without {counts}", allowed="both", hint=f"leave {name} out")
        if self.active is None:
            for name in ("gpu", "precision", "gpus", "mfu", "price_usd_per_gpu_hour", "fine_tuning_epochs",
                         "preference_epochs"):  # fmt: skip
                if name in self.given or name in self.words:
                    raise UserError(f"{name} has no effect without a model", allowed="with params or model")

    def _rung(self, name: str, phases: Sequence[Phase]) -> Rung:
        known = [phase.cost_usd for phase in phases if phase.cost_usd is not None]
        names = tuple(phase.name for phase in phases)
        cost = total(known) if len(known) == len(phases) else None
        if "cost_usd" not in self.given:
            return Rung(name, names, cost, None, None)
        budget = self.given["cost_usd"].value
        affordable = pairs = None
        if cost is not None:
            low, high = cost.interval or (cost.value, cost.value)
            affordable = "yes" if high <= budget else "no" if low > budget else "perhaps"
        compute = [phase.compute_usd.value for phase in phases if phase.compute_usd is not None]
        if phases and len(compute) == len(phases):
            pairs = max(0.0, budget - sum(compute)) / self._take("usd_per_pair").value
        return Rung(name, names, cost, affordable, pairs)
