"""The driver's snapshot of itself."""

from typing import Any

import msgspec

from engine.metrics.engine_stats import EngineStats

STATES = ("serving", "pausing", "paused", "falling asleep", "asleep", "draining")


class DriverStatus(EngineStats, frozen=True):
    """The engine's snapshot and the driver's own numbers."""

    queued_requests: int = 0
    """Requests that wait to be prepared."""
    deferred: int = 0
    """Sequences that wait for their grammars, or until a paused engine is resumed."""
    deferred_tokens: int = 0
    """Their known tokens."""
    open_requests: int = 0
    """Requests without their last sample."""
    adapters: dict[str, int] = msgspec.field(default_factory=dict)
    """By adapter that requests may name: the open requests that have it."""
    requests_by_client: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)
    """By client: its open requests, and how many of them have no token yet."""
    seconds_since_progress: float = 0.0
    """For how long the engine has had work and no step has ended; 0 when it is idle."""
    stages: dict[str, float] = msgspec.field(default_factory=dict)
    """By stage: for how many seconds its oldest item has been in work; 0 while it waits. For the
    execution stage, ``seconds_since_progress``."""
    commands: dict[str, float] = msgspec.field(default_factory=dict)
    """By the thread that does it: for how many seconds an operator's command has been in work; 0 without any."""
    uptime_seconds: float = 0.0
    state: str = "serving"
    """One of STATES."""
    default_sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """See ServingLimits."""
    ttft_seconds_p50: float = 0.0
    """From here on, of recent samples: times to first token, per output token, and to the end."""
    ttft_seconds_p99: float = 0.0
    tpot_seconds_p50: float = 0.0
    tpot_seconds_p99: float = 0.0
    e2e_seconds_p50: float = 0.0
    e2e_seconds_p99: float = 0.0
