"""The daemon's numbers as the text that Prometheus reads, for whoever asks: over HTTP, or over the control socket."""

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class _Counter(Collector):
    def __init__(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        self._name, self._meaning, self._value = name, meaning, value

    def collect(self) -> Iterable[Metric]:
        """The number as it is now."""
        yield CounterMetricFamily(self._name, self._meaning, value=self._value())


class Exposition:
    """The process's own numbers, and what is added; any thread may ask."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def add(self, collector: Collector) -> None:
        """Show these numbers too."""
        self.registry.register(collector)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Show this number too, as it is when somebody asks."""
        Gauge(name, meaning, registry=self.registry).set_function(value)

    def counter(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Show this number too, which only rises; Prometheus calls it ``name`` with ``_total``."""
        self.registry.register(_Counter(name, meaning, value))

    def text(self) -> str:
        """All of them, as they are now."""
        return generate_latest(self.registry).decode()
