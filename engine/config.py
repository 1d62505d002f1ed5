"""The settings of an engine."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from engine.adapters.lora_modules import paths_by_name
from engine.errors import ConfigurationError
from engine.hosts.hosts import Hosts, check_hosts
from engine.hub.names import directory_of
from engine.scheduling.waiting.client_weights import weights_by_client
from engine.setting_fields import check_choices, require_setting, setting
from engine.speculation.speculative_config import EXAMPLE, SpeculativeConfig, parse_speculative_config

QUANTIZATIONS = ("int8", "w8a8", "int4", "none")
DTYPES = ("auto", "bfloat16", "float32")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2")
ATTENTION_BACKENDS = ("auto", "pallas", "jax", "xla")
MAX_NUM_SEQS = 64
MAX_QUEUED_REQUESTS = 1024
CPU_LORAS = 8
"""Adapters in host memory for each slot, unless the operator says how many."""
MOST_HOST_CACHE_GIB = 2**16
"""More than any host has; slots are numbered in 32 bits."""
MAX_LORA_RANK = 512
"""As in vLLM."""
MAX_QUEUED_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The operator's settings. Lengths are in tokens. An invalid one raises ConfigurationError.

    None is a default. ``model`` is the demo model. ``max_num_seqs`` is 64, or
    ``max_num_batched_tokens`` if that is less. ``max_model_len`` is the model's. ``page_size`` is
    16, and 128 on a TPU. ``hbm_utilization`` is 0.9 on an accelerator and 0.4 on a host;
    ``num_pages`` is what fits in it.
    ``max_cpu_loras`` is 8 times ``max_loras``.
    """

    model: str | None = setting(
        None,
        "MODEL",
        "a Hugging Face directory, a name on its hub, or gs://BUCKET/DIRECTORY (default: a small model of ours)",
    )
    revision: str | None = setting(None, "REV", "branch, tag or commit of a model on the hub (default: main)")
    served_model_name: tuple[str, ...] = setting(
        (), "NAME", "what requests may call the model; the first is its name in metrics (default: as it is named here)"
    )
    tokenizer: str | None = setting(None, "MODEL", "whose tokenizer, named as the model is (default: the model's)")
    chat_template: Path | None = setting(None, "FILE", "a chat template in Jinja (default: the tokenizer's)")
    generation_config: str = setting(
        "auto", "auto|none|DIR", "whose generation_config.json has the defaults of requests; auto is the model's"
    )
    max_num_seqs: int = setting(
        None, "N", f"sequences that run at once (default: {MAX_NUM_SEQS}, or max_num_batched_tokens if that is less)"
    )
    max_model_len: int | None = setting(None, "N", "tokens of a prompt and its output (default: the model's limit)")
    max_num_batched_tokens: int = setting(512, "N", "tokens computed in one step")
    page_size: int | None = setting(None, "N", "tokens in one page of the cache (default: 16; 128 on a TPU)")
    num_pages: int | None = setting(None, "N", "pages in the cache (default: what the memory holds)")
    hbm_utilization: float | None = setting(
        None, "F", "share of the memory that may be used, above 0 to 1 (default: 0.9; 0.4 on a CPU)"
    )
    dtype: str = setting(
        "auto",
        "",
        "dtype of weights and activations; auto is float32 on a CPU, else bfloat16",
        choices=DTYPES,
    )
    quantization: str | None = setting(
        None,
        "",
        "store weights in 8 or 4 bits, with scales; w8a8 multiplies in 8 bits too (default: none, or for quantised "
        "checkpoints what they were made for, int8 or w8a8)",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "",
        "dtype of keys and values in the cache; auto is that of activations, fp8 is fp8_e4m3",
        choices=KV_CACHE_DTYPES,
    )
    attention_backend: str = setting(
        "auto",
        "",
        "kernel of attention: pallas (ours) or jax (jax's own) on a TPU, xla anywhere; auto is the fastest",
        choices=ATTENTION_BACKENDS,
    )
    tensor_parallel_size: int | None = setting(
        None, "N", "devices to split the model over (default: all that it divides over; 1 on a CPU)"
    )
    coordinator_address: str | None = setting(
        None, "HOST:PORT", "where the processes of several hosts find each other: process 0's (default: one host)"
    )
    num_processes: int = setting(1, "N", "hosts, with a process on each, that the model is split over")
    process_id: int = setting(0, "I", "which of them this is; process 0 is the one that clients talk to")
    run_ahead: int = setting(1, "N", "steps given to the device beyond the one awaited; 0 is none")
    enable_prefix_caching: bool = setting(True, "", "keep computed pages for prompts that begin alike")
    host_cache_gib: float = setting(
        0.0, "GIB", "host memory for computed pages that the device has no room for; 0 is none"
    )
    long_prefill_token_threshold: int | None = setting(
        None, "N", "tokens of a step that long prompts may take beside others (default: half of what prompts may take)"
    )
    max_inter_token_ms: float | None = setting(
        None,
        "MS",
        "what a step may take that computes prompts beside decoding sequences (default: 3 times one without prompts)",
    )
    priority_preemption_threshold: int = setting(
        10, "N", "how much lower a priority must be to preempt a running request"
    )
    client_weights: str = setting("", "NAME=W,...", "shares of the service, by client (default: 1 for each)")
    max_queued_requests: int = setting(
        MAX_QUEUED_REQUESTS,
        "N",
        "requests that may wait for their first token; one more is refused, of the client that has most, with when to retry",
    )
    max_queued_tokens: int = setting(MAX_QUEUED_TOKENS, "N", "prompt tokens that waiting requests may have in all")
    enable_lora: bool = setting(False, "", "serve LoRA adapters beside the model")
    max_loras: int = setting(8, "N", "adapters in slots on the device: those of the requests in one step")
    max_lora_rank: int = setting(16, "N", "the largest rank of an adapter; every slot has room for it")
    lora_dtype: str = setting(
        "auto",
        "",
        "dtype of adapters' factors, as in vLLM; auto is that of activations, and bfloat16 halves what float32 takes",
        choices=DTYPES,
    )
    lora_target_modules: tuple[str, ...] = setting(
        (),
        "MODULE",
        "modules that slots have room for, by the ends of their names: q_proj, experts ... (default: all but experts)",
    )
    max_cpu_loras: int = setting(
        None, "N", f"adapters in host memory, those in slots included (default: {CPU_LORAS} times max_loras)"
    )
    adapter_root: str | None = setting(
        None,
        "DIR",
        "load adapters while serving from below this directory, or gs://BUCKET/DIRECTORY, and from nowhere else "
        "(default: none)",
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        "NAME=PATH",
        "adapters to load at the start, by the names that requests have for them; as JSON, too (default: none)",
    )
    speculative_config: str | None = setting(
        None,
        "JSON",
        f"draft tokens and verify several in one step, with vLLM's keys: {EXAMPLE} (default: no drafts)",
    )
    seed: int = setting(0, "N", "seed of all draws, with which each request's own seed is combined")
    staged_readiness: bool = setting(False, "", "be ready early, and compile most buckets while serving")
    """Become ready once a few buckets cover every step. The others are compiled while serving."""
    weights_url: str | None = None
    """No setting: the directory in a bucket that has the weights, if ``model`` has but the rest."""
    draft_weights_url: str | None = None
    """No setting: the same of the draft model."""

    @property
    def directory(self) -> Path:
        """The model's directory."""
        return directory_of(self.model)

    @property
    def hosts(self) -> Hosts | None:
        """The processes of several hosts; None on one host."""
        if self.coordinator_address is None:
            return None
        return Hosts(self.coordinator_address, self.num_processes, self.process_id)

    @property
    def lora_paths(self) -> dict[str, str]:
        """``lora_modules`` by name. Raises ConfigurationError."""
        return paths_by_name(self.lora_modules)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config``, parsed; None without it. Raises ConfigurationError."""
        return None if self.speculative_config is None else parse_speculative_config(self.speculative_config)

    @property
    def inter_token_seconds(self) -> float | None:
        """``max_inter_token_ms`` in seconds."""
        return None if self.max_inter_token_ms is None else self.max_inter_token_ms / 1000

    @property
    def of_draft_model(self) -> "EngineConfig | None":
        """The settings of the draft model as a model of its own, if there is one.

        Its weights have the form of their checkpoint: ``quantization`` is of the model. A head
        that is in the model's checkpoint has the model's directory.
        """
        if self.speculation is None or not self.speculation.has_model:
            return None
        has_own = self.speculation.model is not None
        return dataclasses.replace(
            self,
            model=self.speculation.model or self.model,
            weights_url=self.draft_weights_url if has_own else self.weights_url,
            draft_weights_url=None,
            speculative_config=None,
            quantization=None,
            generation_config="none",
            enable_lora=False,
            lora_modules=(),
            lora_target_modules=(),
            adapter_root=None,
        )

    @property
    def weights(self) -> dict[str, float] | None:
        """``client_weights`` by client; None if they are invalid."""
        return weights_by_client(self.client_weights)

    def __post_init__(self) -> None:
        if self.max_num_seqs is None:
            object.__setattr__(self, "max_num_seqs", max(1, min(MAX_NUM_SEQS, self.max_num_batched_tokens)))
        check_choices(self)
        for name in (
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "page_size",
            "tensor_parallel_size",
            "max_queued_requests",
            "max_queued_tokens",
            "long_prefill_token_threshold",
            "priority_preemption_threshold",
            "max_loras",
        ):
            value = getattr(self, name)
            require_setting(value is None or value >= 1, name, "at least 1", value)
        require_setting(
            self.num_pages is None or self.num_pages >= 2, "num_pages", "at least 2: one is the sink", self.num_pages
        )
        gib, most = self.host_cache_gib, MOST_HOST_CACHE_GIB
        require_setting(0 <= gib <= most, "host_cache_gib", f"0 (none) to {most}", gib)
        if self.host_cache_gib and not self.enable_prefix_caching:
            raise ConfigurationError(
                "host_cache_gib is a part of the prefix cache: set enable_prefix_caching, or leave it out"
            )
        share = self.hbm_utilization
        require_setting(share is None or 0 < share <= 1, "hbm_utilization", "above 0 and at most 1", share)
        target = self.max_inter_token_ms
        require_setting(target is None or 0 < target < math.inf, "max_inter_token_ms", "above 0", target)
        require_setting(
            self.weights is not None,
            "client_weights",
            "names and numbers above 0: NAME=2,OTHER=0.5",
            self.client_weights,
        )
        self._check_adapters()
        check_hosts(self.coordinator_address, self.num_processes, self.process_id)
        if self.num_processes > 1 and self.staged_readiness:
            raise ConfigurationError("staged_readiness is for one host: leave it out, or num_processes")
        self._check_speculation()
        require_setting(self.run_ahead >= 0, "run_ahead", "0 (synchronous) or more", self.run_ahead)
        require_setting(
            self.max_num_seqs <= self.max_num_batched_tokens,
            "max_num_batched_tokens",
            f"at least max_num_seqs ({self.max_num_seqs}), a token for each decoding sequence",
            self.max_num_batched_tokens,
        )

    def _check_speculation(self) -> None:
        if self.speculation is not None and self.speculation.prompt_lookup_history and not self.enable_prefix_caching:
            raise ConfigurationError(
                "speculative_config: prompt_lookup_history keeps texts of requests that share prefixes: set "
                "enable_prefix_caching, or leave it out"
            )
        if self.speculation is not None and self.speculation.num_speculative_tokens >= self.max_num_batched_tokens:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, and a row with all of its drafts has "
                f"{1 + self.speculation.num_speculative_tokens} tokens: raise it, or lower num_speculative_tokens"
            )

    def _check_adapters(self) -> None:
        rank = self.max_lora_rank
        require_setting(1 <= rank <= MAX_LORA_RANK, "max_lora_rank", f"1 to {MAX_LORA_RANK}", rank)
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", CPU_LORAS * self.max_loras)
        fits, least = self.max_cpu_loras >= self.max_loras, f"at least max_loras ({self.max_loras})"
        require_setting(fits, "max_cpu_loras", least, self.max_cpu_loras)
        for name, given in (
            ("adapter_root", self.adapter_root is not None),
            ("lora_modules", bool(self.lora_paths)),
            ("lora_target_modules", bool(self.lora_target_modules)),
            ("lora_dtype", self.lora_dtype != "auto"),
        ):
            if given and not self.enable_lora:
                raise ConfigurationError(f"{name} is for adapters, which are not served: set enable_lora as well")
        if len(self.lora_paths) > self.max_cpu_loras:
            raise ConfigurationError(f"lora_modules are {len(self.lora_paths)}, and max_cpu_loras {self.max_cpu_loras}")
