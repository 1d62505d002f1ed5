"""The plan for serving on TPU chips."""

import msgspec

from engine.planner.compiled_function import CompiledFunction
from engine.planner.roofline import DecodeStep, PromptStep
from engine.step.forward_programs import ADAPTED_FORWARD, FORWARD


class ChipPlan(msgspec.Struct, frozen=True):
    """A model on the chips of a topology. Bytes are those of one chip, unless a name says more."""

    model: str
    topology: str
    chip: str
    chips: int
    """Chips of the topology."""
    tensor_parallel_size: int
    """Chips that the model is sharded over."""
    hbm: int
    budget: int
    """The part of ``hbm`` that may be used."""
    weights: int
    form: str
    """Of the weights, in words."""
    scratch: int
    """Reserved for the largest step and the sampler."""
    pages: int
    num_pages: int
    page_size: int
    """Tokens in a page."""
    context_tokens: int
    """Capacity of all pages together, in tokens of sequences of ``max_model_len``."""
    max_model_len: int
    """Tokens."""
    tokens_a_sequence: int
    """Context of each sequence in ``decode``."""
    functions: list[CompiledFunction]
    """Every function that a daemon compiles before READY: steps, samplers, logits processors."""
    compile_seconds: float
    """Wall time of all compilations, with one per core of this machine at a time."""
    decode: list[DecodeStep]
    prompts: list[PromptStep] = []
    """Steps of prompts of ``tokens_a_sequence`` tokens."""
    verified: list[DecodeStep] = []
    """Steps that verify drafts; none where a model's states are planned without any, as they then have
    no room to go back."""
    states: int = 0
    """Recurrent states, in ``num_states`` slots, one of them the sink."""
    num_states: int = 0
    draft_weights: int = 0
    """Bytes of the weights of a draft model; 0 without one."""
    earlier: int = 0
    """Bytes of the texts of earlier requests, in which n-grams are looked for; 0 without
    ``prompt_lookup_history``."""
    adapters: int = 0
    """Bytes of slots for adapters; 0 if none are served."""
    max_loras: int = 0
    """Adapters in these slots."""
    host_pages: int = 0
    """Pages in a host's memory; 0 without such a tier."""
    host_states: int = 0
    """Recurrent states beside them."""
    host_bytes: int = 0
    """Bytes of a host's memory that they take."""
    host_page_seconds: float = 0.0
    """Seconds in which a chip's part of a page comes back, at the published rate of its link."""

    @property
    def steps(self) -> list[CompiledFunction]:
        """The functions that run the model's layers, by ascending size."""
        return self._by_size(FORWARD)

    @property
    def adapted_steps(self) -> list[CompiledFunction]:
        """The same with adapters; none where none are served."""
        return self._by_size(ADAPTED_FORWARD)

    @property
    def others(self) -> list[CompiledFunction]:
        """All other functions, each for the most rows."""
        steps = (FORWARD, ADAPTED_FORWARD)
        by_size = sorted(self.functions, key=lambda one: one.size)
        return list({one.name: one for one in by_size if one.name not in steps}.values())

    def _by_size(self, name: str) -> list[CompiledFunction]:
        return sorted((one for one in self.functions if one.name == name), key=lambda one: one.size)
