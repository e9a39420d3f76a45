"""Metrics of a server, in the text format of Prometheus."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from g4ir import __version__
from g4ir.engine.async_engine import AsyncEngine
from g4ir.engine.requests import Counts
from g4ir.ops.types import TORCH_NAMES
from g4ir.ui.files import read_table

TABLE = read_table(Path(__file__).with_suffix(".yaml"))
#: histogram buckets: seconds of requests
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
#: histogram buckets: seconds between two tokens
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)

disable_created_metrics()  # otherwise every counter and histogram gets an extra `_created` series


class Metrics:
    """The metrics of one server. `service` is None while the engine is loading, and in a server of
    several models or of an encoder; `name`: of the model."""

    def __init__(self, name: str = "") -> None:
        self.registry, self.name = CollectorRegistry(), name
        self.service: AsyncEngine | None = None
        #: time field of Counts -> histogram
        self.times = {
            attribute: Histogram(f"g4ir_{name}", words, registry=self.registry, buckets=SECONDS)
            for name, words, attribute in TABLE["times"]
        }
        self.tokens = self._metric(Histogram, "inter_token_latency_seconds", buckets=BETWEEN)
        self.cancelled = self._metric(Counter, "cancelled_requests")
        self.rejected = self._metric(Counter, "rejected")
        self.prompts = self._metric(Counter, "prompt_tokens")
        self.responses = self._metric(Counter, "http_responses")
        (words, *labels) = TABLE["server"]["build"]
        values = (__version__, version("torch"), platform.python_version())
        Info("g4ir_build", words, registry=self.registry).info(dict(zip(labels, values)))
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def _metric(self, kind: Any, name: str, **options: Any) -> Any:
        words, *labels = TABLE["server"][name]
        return kind(f"g4ir_{name}", words, labels, registry=self.registry, **options)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def took(self, counts: Counts) -> None:
        """Add the prompt tokens and times of a request that ended."""
        self.prompts.inc(counts.prompt)
        for attribute, histogram in self.times.items():
            if (seconds := getattr(counts, attribute)) is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the scheduler and the model (called by the registry); none if
        `service` is None."""
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
        engine, (words, *labels) = service.engine, TABLE["server"]["model"]
        values: list[Any] = [self.name, engine.spec.name, engine.config.backend, engine.device]
        values += [TORCH_NAMES[engine.dtype], engine.limits.max_batch, engine.limits.max_seq]
        yield InfoMetricFamily("g4ir_model", words, dict(zip(labels, map(str, values))))
