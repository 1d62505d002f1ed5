"""The daemon's numbers as Prometheus reads them: vLLM's names, types, labels and buckets, and
``odriver_`` for our own.

Names as in vllm/v1/metrics/loggers.py of late 2026, with those of before that dashboards still ask
for. Nothing is computed until somebody asks: numbers come from the driver's snapshots and from
histograms that one thread each writes.
"""

import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from driver.metrics.request_metrics import RequestMetrics
from driver.odriver import oDriver
from driver.status import STATES, DriverStatus
from engine.metrics.histogram import Histogram

_LABELS = ("model_name", "engine")

_FORMER_NAMES = {"inter_token_latency_seconds": "time_per_output_token_seconds"}
"""Former names in vLLM."""


class DriverMetrics(Collector):
    """Collects a driver's metrics; ``cache_config`` is for ``vllm:cache_config_info``."""

    def __init__(self, driver: oDriver, model: str, cache_config: Mapping[str, str]) -> None:
        self._driver = driver
        self._values = (model, "0")
        self._cache_config = {**cache_config, "engine": "0"}

    def collect(self) -> Iterable[Metric]:
        """All metrics."""
        status, requests = self._driver.status(), self._driver.request_metrics
        yield from self._gauges(status)
        yield from self._gauges_by_label(status)
        yield from self._counters(status, requests)
        yield from self._counters_by_label(status, requests)
        yield self._histogram("iteration_tokens_total", self._driver.iteration_tokens)
        if status.max_loras:
            yield self._lora_requests(status)
        phases = HistogramMetricFamily(
            "odriver_step_seconds", "Of the host in each phase of a step", labels=(*_LABELS, "phase")
        )
        for phase, histogram in self._driver.step_seconds.items():
            phases.add_metric((*self._values, phase), _buckets(histogram), histogram.sum)
        yield phases
        for name, histogram in requests.histograms().items():
            yield self._histogram(name, histogram)
            if name in _FORMER_NAMES:
                yield self._histogram(_FORMER_NAMES[name], histogram)

    def _gauges(self, status: DriverStatus) -> Iterable[Metric]:
        waiting, used = sum(_waiting_for(status).values()), status.pages_owned / max(1, status.pages_total)
        for name, meaning, value in (
            ("vllm:num_requests_running", "Sequences that take part in steps", status.running),
            ("vllm:num_requests_waiting", "Sequences that wait for a step, and requests to be prepared", waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use by sequences; 1 is all", used),
            ("vllm:gpu_cache_usage_perc", "The former name of vllm:kv_cache_usage_perc", used),
            ("odriver_max_num_seqs", "Sequences that can take part in steps at once", status.max_num_seqs),
            ("odriver_waiting_tokens", "Known tokens of the sequences that wait", status.waiting_tokens + status.deferred_tokens),
            ("odriver_open_requests", "Requests that are owed an end", status.open_requests),
            ("odriver_pages", "Pages in the cache", status.pages_total),
            ("odriver_pages_free", "Pages that hold nothing", status.pages_free),
            ("odriver_pages_cached", "Pages that no sequence uses and that hold a prefix", status.pages_cached),
            ("odriver_recurrent_states", "Slots for recurrent states", status.recurrent_states_total),
            ("odriver_recurrent_states_cached", "States that no sequence uses and that end a prefix", status.recurrent_states_cached),
            ("odriver_host_pages", "Pages that the host cache holds", status.host_pages_total),
            ("odriver_host_page_bytes", "Bytes of the host cache that a page takes", status.host_page_bytes),
            ("odriver_host_pages_cached", "Pages in the host cache that hold a prefix", status.host_pages_cached),
            ("odriver_host_states", "Recurrent states that the host cache holds", status.host_states_total),
            ("odriver_host_state_bytes", "Bytes of the host cache that a recurrent state takes", status.host_state_bytes),
            ("odriver_host_states_cached", "States in the host cache that end a prefix", status.host_states_cached),
            ("odriver_earlier_tokens", "Tokens of earlier requests that are kept to draft from", status.earlier_tokens),
            ("odriver_earlier_salts", "Tenants, salts and adapters that such are kept of", status.earlier_salts),
            ("odriver_seconds_since_progress", "Since a step landed, while there is work", status.seconds_since_progress),
            ("odriver_adapter_slots", "Slots for adapters on the device", status.max_loras),
            ("odriver_adapters", "Adapters that requests may name", len(status.adapters)),
            ("odriver_uptime_seconds", "Since the driver was made", status.uptime_seconds),
            ("odriver_staged_compilations_left", "Functions that readiness did not wait for", status.staged_compilations_left),
            ("odriver_weight_version", "Of the weights that are served; 1 are those of the start", status.weight_version),
            ("odriver_replaced_kernels", "Kernels at fault, in whose place XLA serves", status.replaced_kernels),
        ):  # fmt: skip
            yield self._alone(GaugeMetricFamily, name, meaning, value)

    def _gauges_by_label(self, status: DriverStatus) -> Iterable[Metric]:
        sleeping = {
            "awake": not status.asleep,
            "weights_offloaded": 0,
            "discard_all": status.asleep and not status.has_weights,
        }
        for name, meaning, label, values in (
            ("vllm:num_requests_waiting_by_reason", "By why they wait", "reason", _waiting_for(status)),
            ("vllm:engine_sleep_state", "1 where it holds", "sleep_state", sleeping),
            ("odriver_stage_busy_seconds", "With one item, or its work without progress", "stage", status.stages),
            ("odriver_command_busy_seconds", "With one command of an operator's", "command", status.commands),
            ("odriver_state", "1 where it holds", "state", {state: status.state == state for state in STATES}),
        ):
            yield self._by_label(GaugeMetricFamily, name, meaning, label, values)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "How the cache is laid out", labels=list(self._cache_config)
        )
        config.add_metric(list(self._cache_config.values()), 1)
        yield config

    def _counters(self, status: DriverStatus, requests: RequestMetrics) -> Iterable[Metric]:
        prompts = requests.prompt_tokens
        for name, meaning, value in (
            ("vllm:num_preemptions", "Times that a sequence lost its pages to another", status.preemptions),
            ("vllm:prompt_tokens", "Tokens of the prompts that were answered", sum(prompts)),
            ("vllm:prompt_tokens_cached", "Of them, those found in the prefix cache", prompts.cached + prompts.from_host),
            ("vllm:generation_tokens", "Tokens generated", status.generated_tokens),
            ("vllm:spec_decode_num_drafts", "Rows that verified drafted tokens", status.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens that were verified", status.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Of them, those that were accepted", status.num_accepted_tokens),
            ("odriver_earlier_draft_tokens", "Drafted tokens of earlier requests that were verified", status.num_earlier_draft_tokens),
            ("odriver_earlier_accepted_tokens", "Of them, those that were accepted", status.num_earlier_accepted_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", status.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", status.prefix_cache_hits),
            ("vllm:external_prefix_cache_queries", "Tokens looked up in the host cache", status.host_cache_queries),
            ("vllm:external_prefix_cache_hits", "Tokens found in the host cache", status.host_cache_hits),
            ("vllm:corrupted_requests", "Requests whose logits held NaN or infinity", status.failed_rows),
            ("odriver_page_evictions", "Kept pages that were given away", status.page_evictions),
            ("odriver_recurrent_state_evictions", "Kept states that were given away", status.recurrent_state_evictions),
            ("odriver_page_lifetime_seconds", "Of those, since they were filled", status.page_lifetime_seconds_sum),
            ("odriver_page_idle_seconds", "Of those, since nobody used them", status.page_idle_seconds_sum),
            ("odriver_host_pages_lost", "Kept pages given away before they were copied", status.host_pages_lost),
            ("odriver_host_states_lost", "Kept states given away before they were copied", status.host_states_lost),
            ("odriver_steps", "Steps that landed", status.steps),
            ("odriver_failed_steps", "Steps that the device could not do", status.failed_steps),
            ("odriver_failed_rows", "Requests that ended as their logits held NaN or infinity", status.failed_rows),
            ("odriver_prompt_tokens_computed", "Prompt tokens computed, again after preemption too", status.prompt_tokens),
            ("odriver_step_gap_seconds", "The device idle between steps though there was work", status.step_gap_seconds_sum),
            ("odriver_step_gaps", "Steps that followed another without a rest", status.step_gap_seconds_count),
            ("odriver_adapter_loads", "Adapters that were loaded", self._driver.adapters.num_loads),
            ("odriver_adapter_evictions", "Adapters unloaded to load others", self._driver.adapters.num_evictions),
            ("odriver_adapter_slot_loads", "Adapters written to a slot of the device", status.adapter_loads),
            ("odriver_adapter_slot_evictions", "Of them, those that took another's slot", status.adapter_evictions),
            ("odriver_compilations_after_ready", "Compilations that nobody planned", status.compilations_after_ready),
            ("odriver_staged_compilations", "Functions compiled while serving", status.staged_compilations),
        ):  # fmt: skip
            yield self._alone(CounterMetricFamily, name, meaning, value)

    def _counters_by_label(self, status: DriverStatus, requests: RequestMetrics) -> Iterable[Metric]:
        prompts, log = requests.prompt_tokens, self._driver.request_log
        sources = {
            "local_compute": prompts.computed,
            "local_cache_hit": prompts.cached,
            "external_kv_transfer": prompts.from_host,
        }
        copied = {"GPU_to_CPU": status.host_bytes_stored, "CPU_to_GPU": status.host_bytes_loaded}
        took = {"GPU_to_CPU": status.host_seconds_stored, "CPU_to_GPU": status.host_seconds_loaded}
        finished = requests.finished | {"abort": requests.finished["abort"] + log.aborted_early}
        accepted = {str(at): count for at, count in enumerate(status.num_accepted_tokens_per_pos)}
        for name, meaning, label, values in (
            ("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from", "source", sources),
            ("vllm:kv_offload_total_bytes", "Copied to host memory, and back", "transfer_type", copied),
            ("vllm:kv_offload_total_time", "Seconds of these copies, until they are seen to be there", "transfer_type", took),
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position among the drafts", "position", accepted),
            ("odriver_preemptions_by_cause", "Preemptions by why", "cause", status.preemptions_by_cause),
            ("vllm:request_success", "Requests that ended", "finished_reason", finished),
            ("odriver_requests_failed", "Requests that got an error", "code", dict(log.failed)),
        ):  # fmt: skip
            yield self._by_label(CounterMetricFamily, name, meaning, label, values)

    def _lora_requests(self, status: DriverStatus) -> Metric:
        """vLLM's: which adapters run and wait, as labels; the value is the time."""
        metric = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of the requests that run and wait, and slots for adapters",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        by_state = (status.adapters_waiting, status.adapters_running)
        names = [",".join(self._driver.adapters.names(uids)) for uids in by_state]
        metric.add_metric((str(status.max_loras), *names), time.time())
        return metric

    def _alone(
        self, family: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, meaning: str, value: float
    ) -> Metric:
        metric = family(name, meaning, labels=_LABELS)
        metric.add_metric(self._values, value)
        return metric

    def _by_label(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        meaning: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        metric = family(name, meaning, labels=(*_LABELS, label))
        for value, count in values.items():
            metric.add_metric((*self._values, value), count)
        return metric

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        unit = "seconds" if name.endswith("seconds") else "tokens" if "tokens" in name else "samples"
        family = HistogramMetricFamily(f"vllm:{name}", f"As in vLLM, in {unit}", labels=_LABELS)
        family.add_metric(self._values, _buckets(histogram), histogram.sum)
        return family


def _waiting_for(status: DriverStatus) -> dict[str, int]:
    """How many requests and sequences wait, by vLLM's reasons."""
    return {"capacity": status.waiting + status.queued_requests, "deferred": status.deferred}


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    return [(_number(bound), count) for bound, count in histogram.cumulative()]


def _number(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
