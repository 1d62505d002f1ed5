"""The model we ship: its files, its tokenizer, and the texts it learns from."""

import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from caching.attention.spec import AttentionSpec
from engine.models.decoder import Decoder
from engine.models.layers.feed_forward import GatedSpec
from engine.models.layers.self_attention import SelfAttentionSpec
from engine.models.partition import Partition
from engine.models.spec import BlockSpec, ModelSpec
from scripts.demo.cast import Hero, draw_hero
from scripts.demo.chat import ask_for_story, draw_conversation
from scripts.demo.corpus import LONG_ROW_LENGTH, ROW_LENGTH, Corpus
from scripts.demo.demo_model import GENERATION
from scripts.demo.export import export_model
from scripts.demo.grammar import fill, read_plot
from scripts.demo.judge import Judge
from scripts.demo.sample import continue_greedily
from scripts.demo.stories import MAX_WORDS, MIN_WORDS, PLOT_NAMES, tell_story
from scripts.demo.sums import Sum, draw_sum

DEMO = Path(__file__).parent.parent / "engine/models/demo"
DRAFT = DEMO.with_name("demo_draft")
MARKS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The one we ship, loaded as the daemon loads it."""
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def judge() -> Judge:
    """It has read enough for what it is asked here."""
    return Judge(stories=3000)


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A decoder of a few hundred weights, not trained."""
    attention = SelfAttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, scores=AttentionSpec(0.5))
    spec = ModelSpec(
        vocab_size=11,
        hidden_size=8,
        blocks=(BlockSpec(attention, GatedSpec(6)),) * 2,
        max_position=32,
        tied_embeddings=True,
        eos_token_ids=(0,),
    )
    return Decoder(Partition(spec), nnx.Rngs(0))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """What the model reads of a prompt."""
    return tokenizer(text)["input_ids"]


class TestFiles:
    def test_fits_in_eight_megabytes(self):
        """The weights we ship are at most 8 MB."""
        size = (DEMO / "model.safetensors").stat().st_size

        assert 1_000_000 < size <= 8_000_000

    def test_the_draft_model_is_fits_in_600_kilobytes(self):
        """Its weights are at most 600 kB, and its tokens are those of the model that it drafts for."""
        config, target = (json.loads((directory / "config.json").read_text()) for directory in (DRAFT, DEMO))

        assert (DRAFT / "model.safetensors").stat().st_size <= 600_000
        alike = ("vocab_size", "eos_token_id", "max_position_embeddings")
        assert [config[key] for key in alike] == [target[key] for key in alike]

    @pytest.mark.parametrize("directory", [DEMO, DRAFT], ids=lambda directory: directory.name)
    def test_weights_have_the_shapes_of_the_config(self, directory):
        """Every tensor of a tied Llama checkpoint is there, in the shape that config.json says, and none besides."""
        config = json.loads((directory / "config.json").read_text())
        heads, kv_heads, head_dim = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        layer = {
            "input_layernorm": [hidden],
            "self_attn.q_proj": [heads * head_dim, hidden],
            "self_attn.k_proj": [kv_heads * head_dim, hidden],
            "self_attn.v_proj": [kv_heads * head_dim, hidden],
            "self_attn.o_proj": [hidden, heads * head_dim],
            "post_attention_layernorm": [hidden],
            "mlp.gate_proj": [ffn, hidden],
            "mlp.up_proj": [ffn, hidden],
            "mlp.down_proj": [hidden, ffn],
        }
        expected = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
        for index in range(config["num_hidden_layers"]):
            expected |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}

        with safe_open(directory / "model.safetensors", "numpy") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118

        assert shapes == expected

    def test_weights_are_finite(self):
        """No weight we ship is infinite or not a number."""
        with safe_open(DEMO / "model.safetensors", "numpy") as weights:
            tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118

        assert all(np.isfinite(tensor).all() for tensor in tensors)

    def test_ends_where_the_tokenizer_says(self, tokenizer):
        """The configs and the tokenizer agree on the token that ends a text, on the vocabulary and on how to sample."""
        config = json.loads((DEMO / "config.json").read_text())
        generation = json.loads((DEMO / "generation_config.json").read_text())

        assert generation.items() >= GENERATION.items()
        assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
        assert config["vocab_size"] == len(tokenizer)


class TestTokenizer:
    @given(text=st.text())
    def test_any_text_survives(self, tokenizer, text):
        """Whatever is encoded is decoded to itself."""
        ids = ids_of(tokenizer, text)

        assert tokenizer.decode(ids) == text

    def test_adds_no_mark_of_its_own(self, tokenizer):
        """What the model reads is the prompt alone, as in training."""
        assert ids_of(tokenizer, "") == []
        assert not set(ids_of(tokenizer, "Once upon a time")) & set(tokenizer.all_special_ids)

    def test_digits_stand_alone(self, tokenizer):
        """A number is read digit by digit, so that it can be added digit by digit."""
        pieces = [tokenizer.decode([i]) for i in ids_of(tokenizer, "12 + 345")]

        assert pieces == ["1", "2", " +", " ", "3", "4", "5"]

    @pytest.mark.parametrize("mark", MARKS)
    def test_marks_are_one_special_token(self, tokenizer, mark):
        """The end and the marks of the roles are single tokens that plain decoding can leave out."""
        ids = ids_of(tokenizer, mark)

        assert len(ids) == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == ""

    def test_template_renders_the_roles(self, tokenizer):
        """A conversation is its turns in order, each opened by its role and ended."""
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello!"},
            {"role": "user", "content": "What is 3 + 4?"},
        ]

        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

        turns = "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>What is 3 + 4?<|end|>"
        assert text == turns + "<|assistant|>"

    def test_template_refuses_other_roles(self, tokenizer):
        """A role that the model never saw is an error that names it."""
        with pytest.raises(TemplateError, match="not tool"):
            tokenizer.apply_chat_template([{"role": "tool", "content": "7"}])


class TestStories:
    def test_same_seed_same_stories(self):
        """The generator tells the same stories for the same seed, and others for another."""
        told, again, other = ([tell_story(rng) for _ in range(20)] for rng in (Random(7), Random(7), Random(8)))

        assert told == again
        assert not set(told) & set(other)

    def test_stories_differ(self):
        """Thousands of stories are all different."""
        rng = Random(0)

        stories = {tell_story(rng) for _ in range(2000)}

        assert len(stories) == 2000

    @pytest.mark.parametrize("seed", range(50))
    def test_story_is_whole(self, seed):
        """A story has the length we promise, no slot left open, whole sentences and a proper end."""
        story = tell_story(Random(seed))

        assert MIN_WORDS <= len(story.split()) <= MAX_WORDS
        assert not re.search(r"[{}\[\]|]|  | a [aeiou](?!n?icorn)|little little", story)
        assert story[0].isupper()
        assert story.endswith((".", "!", '"'))
        assert story.count('"') % 2 == 0

    @pytest.mark.parametrize("seed", range(50))
    def test_hero_stays_the_same(self, seed):
        """The hero is named from the first sentence to the last ones, and is she or he throughout."""
        hero = draw_hero(Random(seed))

        story = tell_story(Random(seed), hero)

        third = len(story) // 3
        assert hero.name in story[:third]
        assert hero.name in story[third:]
        assert hero.kind in story[:third]
        strangers = r"\b(he|him|his|himself)\b" if hero.is_she else r"\b(she|hers|herself)\b"
        assert not re.search(strangers, story, re.IGNORECASE)

    def test_lost_thing_is_found(self):
        """What is lost in a story is what is found in it."""
        plot = read_plot("lost")
        slots = {name: name for name in ("hero", "he", "him", "his", "a_thing", "helper", "a_helper", "spot1", "spot2")}

        told = plot.tell(Random(1), slots | {"spot3": "SPOT", "thing": "THING", "use": "used it", "junk": "junk"})

        assert re.search(r"THING.*gone|find the THING.*SPOT", told)
        assert told.index("SPOT") > told.index("THING")

    @pytest.mark.parametrize("name", ["opening", *PLOT_NAMES, "ending"])
    def test_every_line_can_be_filled(self, name):
        """No line of a plot names a slot that the story does not have."""
        rng, plot = Random(0), read_plot(name)
        world = (
            "hero kind a_kind he him his himself helper a_helper spot1 spot2 spot3 friend home hobby treat nook a_thing"
        )
        slots = dict.fromkeys(world.split(), "x") | plot.draw_slots(rng)

        filled = [fill(line, slots, rng) for beat in plot.beats for line in beat.lines]

        assert len(filled) >= 8
        assert not any(re.search(r"[{}\[\]|]", line) for line in filled)


class TestChat:
    def test_turns_alternate(self):
        """A conversation is user and assistant in turn, after at most one system prompt."""
        messages = draw_conversation(Random(5), exchanges=10)

        roles = [message["role"] for message in messages if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) >= 20

    @pytest.mark.parametrize("seed", range(20))
    def test_story_asked_for_is_told(self, seed):
        """Whom the user asks a story about is whom the answer tells of."""
        asked, story = ask_for_story(Random(seed))

        last_word = asked.rstrip(".?").removesuffix(", please").split()[-1]
        assert last_word.endswith("story") or last_word in story

    @pytest.mark.parametrize(("operator", "result"), [("+", 11), ("-", 3), ("*", 28)])
    def test_answers_are_right(self, operator, result):
        """A sum's answer repeats it and says what it comes to."""
        answer = Sum(7, operator, 4).answer

        assert answer == f"7 {'times' if operator == '*' else operator} 4 is {result}."

    @pytest.mark.parametrize("seed", range(30))
    def test_questions_name_both_numbers(self, seed):
        """However a sum is asked for, both of its numbers are said, in figures or in words."""
        rng = Random(seed)
        drawn = draw_sum(rng)

        question = drawn.question(rng)

        figures = re.findall(r"\d+", question)
        assert sorted(figures) == sorted([str(drawn.a), str(drawn.b)]) or not figures


class TestCorpus:
    def test_same_seed_same_batches(self, tokenizer):
        """Training reads the same rows for the same seed."""
        first, second = (Corpus(tokenizer, 3).packed(2) for _ in range(2))

        assert np.array_equal(first.inputs, second.inputs)
        assert np.array_equal(first.weights, second.weights)

    def test_packed_documents_start_at_zero(self, tokenizer):
        """Each document of a packed row counts its positions from 0 and predicts its own next token."""
        batch = Corpus(tokenizer, 4).packed(4)

        starts = np.diff(batch.segments, axis=1, prepend=0) > 0
        assert batch.inputs.shape == (4, ROW_LENGTH)
        assert (batch.positions[starts] == 0).all()
        inside = (batch.segments[:, 1:] == batch.segments[:, :-1]) & (batch.segments[:, 1:] > 0)
        assert (batch.targets[:, :-1] == batch.inputs[:, 1:])[inside].all()

    def test_packed_documents_end(self, tokenizer):
        """The last thing to predict in each packed document is its end, and padding is nothing to predict."""
        batch = Corpus(tokenizer, 5).packed(4)

        ends = (np.diff(batch.segments, axis=1, append=0) != 0) & (batch.segments > 0)
        assert (batch.targets[ends] == tokenizer.eos_token_id).all()
        assert not batch.weights[batch.segments == 0].any()

    def test_long_rows_are_full(self, tokenizer):
        """A long row reaches the last position of the model."""
        batch = Corpus(tokenizer, 6).long(2)

        assert (batch.positions == np.arange(LONG_ROW_LENGTH)).all()
        assert (batch.segments == 1).all()

    def test_chat_is_read_as_it_is_served(self, tokenizer):
        """A conversation is trained on as the very tokens that the chat template gives at service."""
        messages = draw_conversation(Random(9), exchanges=3)

        document = Corpus(tokenizer, 0).encode_chat(messages)

        served = tokenizer.apply_chat_template(messages)["input_ids"]
        assert document.ids == served

    def test_users_weigh_less(self, tokenizer):
        """What the assistant says counts in full, its end included; what the user says hardly."""
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

        document = Corpus(tokenizer, 0).encode_chat(chat)

        answer = document.ids.index(ids_of(tokenizer, "<|assistant|>")[0])
        assert set(document.weights[answer:]) == {1.0}
        assert max(document.weights[:answer]) < 0.5


class TestJudge:
    def test_stories_of_the_training_are_clean(self, judge):
        """All words are known, and whoever has a name is the hero or a friend."""
        rng = Random(0)  # as the judge's, so that these are among those that it has read

        verdicts = [judge.judge(tell_story(rng)) for _ in range(300)]

        assert verdicts == [([], [])] * 300

    @pytest.mark.parametrize(
        ("story", "verdict"),
        [
            ("Once there was a fox named Mia. Miaa was sad.", (["Miaa"], [])),
            ("Once there was a squirrel namedss called Luna.", (["namedss"], [])),
            ("There lived a bear called Tom. One day, Ben was lost.", ([], ["Ben"])),
            ("Tom had a good friend called Ben. Ben and Tom saw a big red apple.", ([], [])),
            ("A bear called Dalina lived in a quiet wood. Galina was lost.", ([], ["Galina"])),
        ],
    )
    def test_broken_words_and_stray_names_are_found(self, judge, story, verdict):
        """A name that is not quite the hero's is one of either."""
        assert judge.judge(story) == verdict


class TestExport:
    def test_names_and_orientation(self, model, tmp_path):
        """Exported linear layers are [out, in] and the fused kernels come apart by head."""
        export_model(model, tmp_path, {})

        with safe_open(tmp_path / "model.safetensors", "numpy") as weights:
            q, k, up = (
                weights.get_tensor(f"model.layers.1.{name}.weight")
                for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
            )
        qkv = np.asarray(model.layers[1].mixer.qkv_kernel.get_value().values)
        assert np.array_equal(q[3 * 4 + 1], qkv[:, 1, 1, 1])
        assert np.array_equal(k[1 * 4 + 2], qkv[:, 1, 2, 2])
        assert np.array_equal(up[5], np.asarray(model.layers[1].mlp.gate_up_kernel.get_value().values)[:, 1, 5])

    def test_samples_are_as_if_alone(self, model):
        """Greedy continuation answers each prompt as if it were alone, and stops at the length."""
        prompts = [[1, 2, 3], [4]]

        together = continue_greedily(model, prompts, length=8)

        alone = [continue_greedily(model, [prompt], length=8)[0] for prompt in prompts]
        assert together == alone
        assert all(len(prompt) + len(answer) <= 8 for prompt, answer in zip(prompts, together, strict=True))


def test_hero_has_pronouns():
    """A hero is a she or a he."""
    assert Hero("Ida", "fox", "little", is_she=True).pronouns == ("she", "her", "her")
    assert Hero("Ben", "fox", "little", is_she=False).pronouns == ("he", "him", "his")
