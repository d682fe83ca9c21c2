"""Searches the layouts that fit a device for the fastest ones.

Results fit by ``cost/memory/per_rank.py`` and are ordered by ``cost/layout/predict.py``; every other kind has a reason.
Each kind is estimated from a few exact values (memory as fixed + weights / shards + activations x rows, work in
proportion), so a layout that is a few percent better may be missed; the returned figures are exact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from smalti.base.errors import UserError
from smalti.base.units import format_bytes, format_count
from smalti.config.hardware import Hardware
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.collectives import Cut, cut
from smalti.cost.layout.predict import Prediction, predict
from smalti.cost.layout.rules import Kind, Rules, check_gpus
from smalti.cost.memory.per_rank import Memory, memory_per_rank
from smalti.cost.params import count
from smalti.cost.step_time.step import StepTime, step_time

ROUGH_TOKENS = 16_384
"""Microbatch by which kinds of layout are compared before their memory is known."""

SLOWEST_TRIED = 1.3
"""Kinds with a rough prediction above this factor of the best so far are not computed exactly."""

_UPDATE = ("clip", "optimizer")
_FIRST_KINDS, _FAR_OFF = 12, 1.2


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    prediction: Prediction
    """The prediction with the fastest of the largest microbatch that fits and its halves."""
    memory: Memory
    """The memory with that microbatch."""
    largest_microbatch_tokens: int
    """The largest that fits; the loss splits very large ones into thin products, so it need not be the fastest."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[Candidate, ...]
    """The fastest first; where replicate and shard alone fit, their fastest is among them."""
    others: dict[str, str]
    """Kinds of layout that are not among the best -> why."""
    tried: int
    """Number of possible layouts."""


def find_layouts(
    config: RunConfig,
    hardware: Hardware,
    gpus: int,
    *,
    keep: int = 5,
    data_alone: bool = False,
    fixed: Mapping[str, int] | None = None,
) -> SearchResult:
    """Return the ``keep`` fastest layouts that fit; UserError with the nearest possible request.

    data_alone: no axes but replicate and shard. fixed: axis -> its fixed size from the recipe.
    """
    check_gpus(gpus, hardware)
    search = _Search(config, hardware, gpus, data_alone, fixed)
    best = search.best(keep)
    if not best:
        _raise_no_layout(search)
    return SearchResult(best, search.others(best), search.tried)


def fastest_layout(config: RunConfig, hardware: Hardware, gpus: int, *, data_alone: bool = False) -> tuple[Layout, int]:
    """Return the fastest layout that fits, and its microbatch."""
    fastest = find_layouts(config, hardware, gpus, keep=1, data_alone=data_alone).best[0].prediction
    return fastest.layout, fastest.microbatch_tokens


def smallest_gpus(
    config: RunConfig, hardware: Hardware, most: int, fixed: Mapping[str, int] | None = None
) -> int | None:
    """Return the fewest devices, up to ``most``, that hold the run with one row on a rank; None if more are needed."""
    node, least = hardware.devices_per_node, _state_bytes(config) / hardware.available_memory_bytes
    numbers = [number for number in range(1, node + 1) if node % number == 0]
    if hardware.network_bytes_per_s is not None:
        numbers += range(2 * node, most + 1, node)
    wanted = [number for number in numbers if least <= number <= most]
    return next((number for number in wanted if _Search(config, hardware, number, fixed=fixed).holds_one_row()), None)


def _state_bytes(config: RunConfig) -> int:
    """Return the least memory of the parameters: master weight, gradient and moments in fp32."""
    return count(config.model).total * 4 * (2 + config.train.moments)


@dataclass(frozen=True)
class _MemoryModel:
    """Memory of a kind of layout: fixed + weights / shards + row x rows."""

    fixed: float
    weights: float
    row: float

    def rows(self, room_bytes: float, shard: int) -> int:
        """Return how many rows fit; below 1 if none does."""
        return int((room_bytes - self.fixed - self.weights / shard) / max(self.row, 1.0))


class _Search:
    def __init__(
        self,
        config: RunConfig,
        hardware: Hardware,
        gpus: int,
        data_alone: bool = False,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        self.config, self.hardware, self.gpus, self.fixed = config, hardware, gpus, fixed
        self.rules = Rules(config, hardware, gpus, fixed=fixed)
        self.seq_len, self.room_bytes = self.rules.seq_len, hardware.available_memory_bytes
        self.state_bytes = _state_bytes(config)
        self.data_alone, self.tried = data_alone, 0
        self.why: dict[Kind, str] = {}
        self._known: dict[Kind, tuple[StepTime, Cut, Layout]] = {}
        self.least_bytes: tuple[float, Layout] | None = None

    # ---- what fits --------------------------------------------------------------------------------------------------

    def kinds(self, *, split_rows: bool = False) -> Iterator[tuple[Kind, list[tuple[int, int]]]]:
        for kind in self.rules.kinds(split_rows=split_rows):
            shards = list(self.rules.shards(kind)) if kind.data_alone or not self.data_alone else []
            self.tried += len(shards)
            room = [shard for shard in shards if self._may_fit(kind, shard[1])]
            if room:
                yield kind, room
            elif shards:
                bytes_ = self.state_bytes / (kind.ways * shards[-1][1])
                self._too_large(kind, kind.layout(*shards[-1]), bytes_, "of weights, gradients and moments alone")

    def holds_one_row(self) -> bool:
        """Return True if one row fits. Tensor ranks save most memory: if the first kinds are far off, so are the
        others."""
        kinds = sorted(
            self.kinds(split_rows=True), key=lambda each: (each[0].pipeline * each[0].sequence, -each[0].tensor)
        )
        least = float("inf")
        for index, (kind, shards) in enumerate(kinds):
            least = min(least, self._memory(kind.layout(*shards[-1]), 1).total_bytes)
            if least <= self.room_bytes or (index >= _FIRST_KINDS and least > _FAR_OFF * self.room_bytes):
                break
        return least <= self.room_bytes

    def _may_fit(self, kind: Kind, shard: int) -> bool:
        return self.state_bytes / (kind.ways * shard) <= self.room_bytes

    def _memory(self, layout: Layout, rows: int) -> Memory:
        device = "cpu" if self.hardware.kind == "cpu" else "cuda"
        memory = memory_per_rank(self.config, layout=layout, microbatch_tokens=rows * self.seq_len, device=device)
        if self.least_bytes is None or memory.total_bytes < self.least_bytes[0]:
            self.least_bytes = (memory.total_bytes, layout)
        return memory

    def _too_large(self, kind: Kind, layout: Layout, nbytes: float, what: str) -> None:
        if self.least_bytes is None or nbytes < self.least_bytes[0]:
            self.least_bytes = (nbytes, layout)
        self.why.setdefault(kind, f"does not fit: {format_bytes(nbytes)} {what}")

    def _room(self, kind: Kind, shards: list[tuple[int, int]]) -> _MemoryModel | None:
        """Fit the memory model of a kind to three exact values; None if one row does not fit on the most shards."""
        few, many = shards[0], shards[-1]
        one_row = self._memory(kind.layout(*many), 1).total_bytes
        if one_row > self.room_bytes:
            self._too_large(kind, kind.layout(*many), one_row, f"with one row of {self.seq_len:,} tokens")
            return None
        row = self._memory(kind.layout(*many), 2).total_bytes - one_row
        weights = 0.0
        if few != many:
            weights = (self._memory(kind.layout(*few), 1).total_bytes - one_row) / (1 / few[1] - 1 / many[1])
        return _MemoryModel(one_row - row - weights / many[1], weights, row)

    # ---- what is fast -----------------------------------------------------------------------------------------------

    def best(self, keep: int) -> tuple[Candidate, ...]:
        best = self._evaluate(keep, list(self.kinds()))
        return best or self._evaluate(keep, list(self.kinds(split_rows=True)))

    def _evaluate(self, keep: int, kinds: list[tuple[Kind, list[tuple[int, int]]]]) -> tuple[Candidate, ...]:
        """Estimate the two best layouts of each kind, from the roughly fastest on; then compute the best exactly."""
        rough = sorted(
            ((self._rough_s(kind, shards), kind, shards) for kind, shards in kinds), key=lambda entry: entry[0]
        )
        estimates: list[tuple[float, Kind, Layout, int]] = []
        for rough_s, kind, shards in rough:
            best_s = min((entry[0] for entry in estimates), default=None)
            if best_s is not None and rough_s > best_s * SLOWEST_TRIED and not kind.data_alone:
                self.why.setdefault(kind, f"roughly {rough_s / best_s - 1:.0%} slower")
                continue
            room = self._room(kind, shards)
            if room is None:
                continue
            of_kind = []
            for replicate, shard in shards:
                rows = min(room.rows(self.room_bytes, shard), -(-self.rules.rows * kind.ways // self.gpus))
                if rows >= 1:
                    layout = kind.layout(replicate, shard)
                    of_kind.append((self._predict(layout, rows, kind).step_s, kind, layout, rows))
            estimates += sorted(of_kind, key=lambda entry: entry[0])[:2]
        estimates.sort(key=lambda entry: entry[0])
        selected = estimates[:keep]
        if not any(entry[1].data_alone for entry in selected):
            selected += [entry for entry in estimates if entry[1].data_alone][:1]
        exact = [entry for entry in (self._exactly(*entry[1:]) for entry in selected) if entry is not None]
        fastest = estimates[0][0] if estimates else 0.0
        for seconds, kind, layout, rows in estimates:
            self.why.setdefault(kind, self._slower(seconds / fastest, self._predict(layout, rows, kind)))
        return tuple(sorted(exact, key=lambda entry: entry.prediction.step_s))

    def _exactly(self, kind: Kind, layout: Layout, rows: int) -> Candidate | None:
        """Compute a candidate exactly, starting from the estimated rows of the largest microbatch."""
        memory, max_rows = self._memory(layout, rows), -(-self.rules.rows // layout.data_ranks)
        while memory.total_bytes > self.room_bytes:
            if rows == 1:
                return None
            rows = max(1, min(rows - 1, int(rows * self.room_bytes / memory.total_bytes)))
            memory = self._memory(layout, rows)
        while rows < max_rows and (more := self._memory(layout, rows + 1)).total_bytes <= self.room_bytes:
            rows, memory = rows + 1, more
        fastest = min((self._timed(layout, tried) for tried in _halves(rows)), key=lambda prediction: prediction.step_s)
        if fastest.microbatch_tokens != rows * self.seq_len:
            memory = self._memory(layout, fastest.microbatch_tokens // self.seq_len)
        return Candidate(fastest, memory, rows * self.seq_len)

    def _timed(self, layout: Layout, rows: int) -> Prediction:
        return predict(self.config, self.hardware, layout, rows * self.seq_len)

    def _rough_s(self, kind: Kind, shards: list[tuple[int, int]]) -> float:
        roomy = [shard_pair for shard_pair in shards if self._may_fit(kind, shard_pair[1] * 2 // 3 or 1)] or shards[-1:]
        rows = max(1, min(ROUGH_TOKENS // self.seq_len, -(-self.rules.rows * kind.ways // self.gpus)))
        return self._predict(kind.layout(*roomy[0]), rows).step_s

    def _predict(self, layout: Layout, rows: int, kind: Kind | None = None) -> Prediction:
        tokens = rows * self.seq_len
        return predict(
            self.config, self.hardware, layout, tokens, step_of_rank=self._works(layout, tokens, kind or Kind())
        )

    def _works(self, layout: Layout, tokens: int, kind: Kind) -> StepTime:
        """Return the work of a rank, scaled from that of a layout of ``kind`` with one row at a time."""
        if kind not in self._known:
            first = kind.layout(1, self.gpus // kind.ways)
            alone = step_time(self.config, self.hardware, first, self.seq_len)
            self._known[kind] = alone, cut(self.config, first, self.seq_len), first
        alone, before, first = self._known[kind]
        after = cut(self.config, layout, tokens)
        fewer = first.tensor * first.pipeline / (layout.tensor * layout.pipeline)
        passes = after.tokens * after.microbatches / (before.tokens * before.microbatches) * fewer
        by_name = dict.fromkeys(_UPDATE, first.weight_shards / layout.weight_shards * fewer)
        by_name["weights"] = after.microbatches / before.microbatches * fewer
        parts = tuple(replace(part, s=part.s * by_name.get(part.name, passes)) for part in alone.parts)
        return replace(alone, parts=parts)

    # ---- why not ----------------------------------------------------------------------------------------------------

    def _slower(self, times: float, prediction: Prediction) -> str:
        shares = prediction.shares
        worst = max(("network", "bubble"), key=lambda name: shares[name])
        return f"{times - 1:.0%} slower: {shares[worst]:.0%} of its step is {worst}"

    def others(self, best: tuple[Candidate, ...]) -> dict[str, str]:
        """Return the kinds that are not among the best, and the sizes that are left out, with the reasons."""
        best_kinds = {_kind(candidate.prediction.layout) for candidate in best}
        return {
            **{str(kind): why for kind, why in self.why.items() if kind not in best_kinds},
            **{what: f"left out: {why}" for what, why in self.rules.reasons.items()},
        }


def _halves(rows: int) -> list[int]:
    """Return rows, a half, a quarter ... and 1."""
    return [rows >> power for power in range(rows.bit_length())]


def _kind(layout: Layout) -> Kind:
    return Kind(layout.tensor, layout.pipeline, layout.sequence, layout.expert)


def _raise_no_layout(search: _Search) -> None:
    config, hardware, gpus, fixed = search.config, search.hardware, search.gpus, search.fixed
    option = "--gpus " if fixed is None else "train.parallel.ranks="
    model = f"{config.name} ({format_count(count(config.model).total)} parameters)"
    if search.least_bytes is None:
        reasons = "; ".join(f"{what}: {why}" for what, why in search.rules.reasons.items())
        reasons = reasons or "the given replicate and shard do not fill nodes"
        raise UserError(
            f"no layout of {gpus:,} x {hardware.title} is possible for {model}: {reasons}",
            allowed=f"at most {search.rules.rows:,} ranks with rows of their own, times the ranks that share them",
            hint=f"train.global_batch_tokens={gpus * search.seq_len}, or fewer {option.rstrip(' =')}",
        )
    nbytes, layout = search.least_bytes
    hints = []
    if config.train.parallel.activation_checkpointing == "none":
        hints.append("train.parallel.activation_checkpointing=full")
    enough = smallest_gpus(config, hardware, 64 * gpus + 64 * hardware.devices_per_node, fixed)
    if enough is not None:
        hints.append(f"{option}{enough}")
    if fixed and _Search(config, hardware, gpus).holds_one_row():
        hints.append(" ".join(f"train.parallel.{axis}=auto" for axis in fixed))
    raise UserError(
        f"{model} fits no layout of {gpus:,} x {hardware.title}: the least is {format_bytes(nbytes)} a rank ({layout})",
        allowed=f"{format_bytes(search.room_bytes)} on a rank",
        hint=" or ".join(hints) or "a device with more memory",
    )
