"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from g4ir.engine.async_engine import AsyncEngine
from g4ir.engine.requests import Counts
from g4ir.ui.files import read_table

TABLE = read_table(Path(__file__).with_suffix(".yaml"))
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: histogram buckets: seconds between two tokens
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """The metrics of one server. `service` is None while the engine is loading."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.service: AsyncEngine | None = None
        options: Any = {"registry": self.registry}
        #: time field of Counts -> histogram
        self.times = {
            attribute: Histogram(f"g4ir_{name}", words, **options, buckets=SECONDS)
            for name, words, attribute in TABLE["times"]
        }
        name, words = "g4ir_inter_token_latency_seconds", "Between two tokens of an answer."
        self.tokens = Histogram(name, words, **options, buckets=BETWEEN)
        words = "Requests that were cancelled before their end."
        self.cancelled = Counter("g4ir_cancelled_requests", words, **options)
        self.rejected = Counter("g4ir_rejected", "Refused requests.", ["reason"], **options)
        self.prompts = Counter("g4ir_prompt_tokens", "Tokens of prompts.", **options)
        self.registry.register(self)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def took(self, counts: Counts) -> None:
        """Count a request that ended."""
        self.prompts.inc(counts.prompt)
        for attribute, histogram in self.times.items():
            if (seconds := getattr(counts, attribute)) is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the scheduler's metrics."""
        if (service := self.service) is None:
            return
        for metric, part in ((GaugeMetricFamily, "gauges"), (CounterMetricFamily, "counters")):
            for name, words, attribute in TABLE[part]:
                yield metric(f"g4ir_{name}", words, attrgetter(attribute)(service))
        for name, words, attribute, label in TABLE["labelled"]:
            family = CounterMetricFamily(f"g4ir_{name}", words, labels=[label])
            for key, number in {**attrgetter(attribute)(service)}.items():
                family.add_metric([str(key)], number)
            yield family
