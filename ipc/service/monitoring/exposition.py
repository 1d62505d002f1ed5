"""The daemon's metrics in Prometheus's text format, over HTTP and the control socket."""

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
        """Yield the present number."""
        yield CounterMetricFamily(self._name, self._meaning, value=self._value())


class Exposition:
    """The metrics of the process and of added collectors; any thread may call it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def add(self, collector: Collector) -> None:
        """Show these numbers too."""
        self.registry.register(collector)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a gauge, whose value is read at each scrape."""
        Gauge(name, meaning, registry=self.registry).set_function(value)

    def counter(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Show this number too, which only rises; Prometheus calls it ``name`` with ``_total``."""
        self.registry.register(_Counter(name, meaning, value))

    def text(self) -> str:
        """All metrics, as text."""
        return generate_latest(self.registry).decode()
