"""Models at random: layers of every kind that may stand beside each other, of random sizes, with random weights."""

from dataclasses import replace
from random import Random

import numpy as np

from caching.attention.spec import AttentionSpec
from engine.models.layers.activation import Activation
from engine.models.layers.delta_net import DeltaNetSpec
from engine.models.layers.expert_router import RouterSpec, Scoring
from engine.models.layers.experts import ExpertsSpec
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.latent_attention import LatentAttentionSpec
from engine.models.layers.mamba2 import GatedNorm, Mamba2Spec
from engine.models.layers.mixer import MixerSpec, State
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.layers.short_convolution import ShortConvolutionSpec
from engine.models.rope_spec import NO_ROPE, RopeSpec
from engine.models.spec import BlockSpec, FeedForwardSpec, ModelSpec, Multipliers, NormPlan

VOCABULARY = 144


class RandomModel:
    """Draws the layers of one model: what all of them share is drawn first."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kv_heads, self._head_dim = random.choice((1, 2, 4)), random.choice((4, 8, 12, 16))
        self._latents = random.random() < 0.2
        self._rank, self._rope_dim = random.choice((8, 12, 24)), random.choice((4, 8))
        self._windows = [random.randint(1, 20) for _ in range(random.randint(1, 2))]
        self._chunk = random.randint(2, 16)
        self._recurrent = random.choice((self._delta_net(), self._mamba2(), self._convolution(), None))

    def spec(self) -> ModelSpec:
        """The model."""
        random = self._random
        kinds = ["full", "window", *(["state"] * 2 if self._recurrent is not None else [])]
        layers = [random.choice(kinds) for _ in range(random.randint(1, 5))]
        layers[random.randrange(len(layers))] = "full"  # the prefix cache, and the host's tier, are of pages
        if random.random() < 0.2:
            layers = layers * 2
        blocks: list[BlockSpec] = []
        for kind in layers:
            blocks.append(self._block(kind, blocks))
        centered = random.random() < 0.3
        return ModelSpec(
            vocab_size=VOCABULARY,
            hidden_size=random.choice((16, 24, 40)),
            blocks=tuple(blocks),
            max_position=512,
            centered_norms=centered,
            norm_scales=random.random() < 0.9,
            norm_bias=centered and random.random() < 0.5,
            tied_embeddings=random.random() < 0.5,
            head_bias=random.random() < 0.2,
            position_offset=random.choice((None, None, 0, 2)),
        )

    def _block(self, kind: str, before: list[BlockSpec]) -> BlockSpec:
        random = self._random
        feed_forward = self._feed_forward()
        if random.random() < 0.1 and feed_forward is not None and any(_is_attention(block.mixer) for block in before):
            return BlockSpec(None, feed_forward)
        norms = random.choice((NormPlan.BEFORE, NormPlan.BEFORE, NormPlan.AFTER, NormPlan.BOTH))
        parallel = norms is NormPlan.BEFORE and feed_forward is not None and random.random() < 0.25
        mixer, beside = self._mixer(kind, before), None
        if kind != "state" and self._recurrent is not None and random.random() < 0.3:
            mixer, beside = random.choice(((mixer, self._recurrent), (self._recurrent, mixer)))
        by = (
            Multipliers(*(random.choice((1.0, 0.7, 1.3)) for _ in range(5))) if random.random() < 0.3 else Multipliers()
        )
        own_norm = parallel and random.random() < 0.5
        return BlockSpec(
            mixer, feed_forward, norms, is_parallel=parallel, parallel_norm=own_norm, beside=beside, multipliers=by
        )

    def _mixer(self, kind: str, before: list[BlockSpec]) -> MixerSpec:
        if kind == "state":
            assert self._recurrent is not None
            return self._recurrent
        if self._latents:
            return self._latent_attention()
        sources = [
            number
            for number, block in enumerate(before)
            if isinstance(block.mixer, SelfAttentionSpec)
            and block.mixer.kv_source is None
            and block.mixer.value_dim is None
        ]
        attention = self._attention(None if kind == "full" else self._random.choice(self._windows))
        if sources and self._random.random() < 0.1:
            source = self._random.choice(sources)
            theirs = before[source].mixer
            assert isinstance(theirs, SelfAttentionSpec)
            return replace(theirs, kv_source=source, scores=theirs.scores, gated=False)
        return attention

    def _attention(self, window: int | None) -> SelfAttentionSpec:
        random = self._random
        kv_heads = random.choice([count for count in (1, 2, 4) if self._kv_heads % count == 0])
        head_dim = random.choice([dim for dim in (4, 8, 12, 16) if dim <= self._head_dim])
        chunk = self._chunk if window is not None and random.random() < 0.2 else None
        soft_cap = 5.0 if random.random() < 0.2 else None
        scores = AttentionSpec(head_dim**-0.5, None if chunk else window, soft_cap, chunk)
        ropes = (RopeSpec(), RopeSpec(theta=100.0, rotary_dim=head_dim // 4 * 2), NO_ROPE)
        has_norms, gates = (
            random.random() < 0.3,
            random.choice((None, None, None, "beside queries", "alone", "by head")),
        )
        return SelfAttentionSpec(
            num_heads=self._kv_heads * random.choice((1, 2, 3)),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scores=scores,
            qkv_bias=random.random() < 0.3,
            output_bias=random.random() < 0.3,
            qk_norm=has_norms,
            rope=random.choice(ropes),
            sinks=random.random() < 0.2,
            gated=gates == "beside queries",
            gate_proj=gates in ("alone", "by head"),
            gates_by_head=gates == "by head",
            norms_behind_rope=has_norms and random.random() < 0.3,
            clip=1.0 if random.random() < 0.2 else None,
            norms_by_head=has_norms and random.random() < 0.5,
            value_dim=random.choice((3, head_dim // 2, head_dim)) if random.random() < 0.2 else None,
        )

    def _latent_attention(self) -> LatentAttentionSpec:
        random = self._random
        nope = random.choice((4, 8))
        return LatentAttentionSpec(
            num_heads=random.choice((1, 2, 3)),
            kv_lora_rank=self._rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=self._rope_dim,
            v_head_dim=random.choice((4, 8)),
            scale=(nope + self._rope_dim) ** -0.5,
            rope=RopeSpec(interleaved=random.random() < 0.5),
            q_lora_rank=random.choice((None, 8)),
            bias=False,
        )

    def _delta_net(self) -> DeltaNetSpec:
        random = self._random
        heads = random.choice((1, 2, 3))
        return DeltaNetSpec(
            heads, heads * random.choice((1, 2)), random.choice((4, 8)), random.choice((4, 6)), random.choice((2, 3, 4))
        )

    def _mamba2(self) -> Mamba2Spec:
        random = self._random
        groups = random.choice((1, 2))
        return Mamba2Spec(
            groups * random.choice((1, 2, 3)),
            random.choice((4, 6)),
            groups,
            random.choice((4, 8)),
            random.choice((2, 3, 4)),
            convolution_bias=random.random() < 0.5,
            bias=random.random() < 0.3,
            output_bias=random.random() < 0.3,
            norm=random.choice(list(GatedNorm)),
            scales=random.choice(((), (0.5, 2.0, 0.7, 1.5, 0.8))),
        )

    def _convolution(self) -> ShortConvolutionSpec:
        random = self._random
        return ShortConvolutionSpec(random.choice((6, 16)), random.choice((2, 3, 4, 7)), random.random() < 0.5)

    def _feed_forward(self) -> FeedForwardSpec | None:
        random = self._random
        activation = random.choice((Activation.SILU, Activation.GELU_TANH, Activation.RELU_SQUARED))
        gated = GatedSpec(random.choice((16, 24, 40)), random.random() < 0.2, activation, random.random() < 0.8)
        match random.randrange(5):
            case 0 | 1:
                return gated
            case 2:
                return None
        experts = random.randint(2, 6)
        shared = replace(gated, bias=False) if random.random() < 0.4 else None
        return ExpertsSpec(
            random.choice((8, 16)),
            experts,
            random.randint(1, min(3, experts)),
            RouterSpec(
                random.choice(list(Scoring)),
                normalised=random.random() < 0.8,
                correction=random.random() < 0.2,
                weighs_input=random.random() < 0.2,
                jitter=random.choice((0.0, 0.1)),
            ),
            gated.activation,
            gated=gated.gated,
            shared=shared,
            shared_gate=shared is not None and random.random() < 0.5,
        )


def _is_attention(mixer: MixerSpec | None) -> bool:
    return isinstance(mixer, SelfAttentionSpec | LatentAttentionSpec)


def states_of(model: ModelSpec) -> list[State]:
    """What its recurrent layers keep."""
    return [cached for mixer in model.mixers if isinstance(cached := mixer.cached, State)]


def words(model: ModelSpec) -> str:
    """Its layers, in a few words each."""
    kinds = []
    for block in model.blocks:
        mixer = " beside ".join(type(mixer).__name__.removesuffix("Spec") for mixer in block.mixers)
        reach = getattr(getattr(block.mixer, "scores", None), "reach", None)
        feed_forward = type(block.feed_forward).__name__.removesuffix("Spec")
        kinds.append(f"{mixer}{'' if reach is None else f'({reach})'}+{feed_forward}")
    return ", ".join(kinds)


FLOAT32 = np.dtype(np.float32)
