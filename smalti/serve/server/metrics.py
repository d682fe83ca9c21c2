"""Prometheus metrics of the server, with vLLM's names and meanings under the prefix ``smalti_``.

``smalti_num_requests_*`` count sequences in the engine (a request with n=2 is two of them).
"""

from collections.abc import Callable, Iterator
from typing import Any

from smalti.base.clock import now_s
from smalti.base.errors import missing_extra
from smalti.serve.engine.request import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)


class Metrics:
    """Counters and histograms of one server; ``counts`` returns the engine's numbers at each scrape."""

    def __init__(self, counts: Callable[[], Any]) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Histogram
        except ImportError as error:
            raise missing_extra("prometheus_client", "serve", "/metrics", error) from error
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(counts))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"smalti_{name}", text, registry=self._registry, buckets=buckets)

        self.first_token_s = histogram("time_to_first_token_seconds", "From request to first token", _TTFT_S)
        self.per_token_s = histogram("time_per_output_token_seconds", "Between tokens, after the first", _TPOT_S)
        self.latency_s = histogram("e2e_request_latency_seconds", "From request to last token", _E2E_S)
        self.finished = Counter(
            "smalti_request_success", "Answers that ended", ["finished_reason"], registry=self._registry
        )
        self.http = Counter("smalti_http_requests", "Answers by status", ["status"], registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))


class Clock:
    """Times one sequence from the arrival of its request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start_s = now_s()
        self._first_s: float | None = None
        self._tokens = 0

    def observe(self, output: RequestOutput) -> None:
        """Record the arrival of an output."""
        time_s = now_s()
        self._tokens += len(output.tokens)
        if self._first_s is None and output.tokens:
            self._first_s = time_s
            self._metrics.first_token_s.observe(time_s - self._start_s)
        if output.finish_reason is None:
            return
        self._metrics.finished.labels(output.finish_reason).inc()
        self._metrics.latency_s.observe(time_s - self._start_s)
        if self._first_s is not None and self._tokens > 1:
            self._metrics.per_token_s.observe((time_s - self._first_s) / (self._tokens - 1))


class _EngineCounts:
    """Collects the engine's numbers at each scrape."""

    def __init__(self, counts: Callable[[], Any]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._counts()
        yield GaugeMetricFamily("smalti_num_requests_running", "Sequences in the running batch", now.running)
        yield GaugeMetricFamily("smalti_num_requests_waiting", "Sequences that wait for a place", now.waiting)
        yield GaugeMetricFamily("smalti_kv_cache_usage_perc", "Share of the cache in use, 0 to 1", now.kv_used_frac)
        yield CounterMetricFamily("smalti_prompt_tokens", "Tokens of prompts read", now.prompt_tokens_total)
        yield CounterMetricFamily("smalti_generation_tokens", "Tokens generated", now.generated_tokens_total)
