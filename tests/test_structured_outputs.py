"""Structured outputs from request to text: real threads, processes and engine, and models with random weights."""

import json
import os
import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jsonschema
import psutil
import pytest
from checkpoints import build_checkpoint
from fake_driver import PATIENCE
from grammar_constraints import children
from random_grammars import random_regex, random_schema
from test_forced_drafts import PERSON
from test_speculative_engine import SPECULATION
from test_speculative_engine import build_engine as build_drafting
from tokenizer_files import build_byte_fallback, build_byte_level, write_tokenizer

from caching.cache_groups import CacheGroups
from caching.page_manager import HBMPageManager
from driver.grammars.compiler import GrammarCompiler
from driver.grammars.constraint import CompiledGrammar
from driver.odriver import oDriver
from driver.request import ActiveRequest, ReturnSample
from driver.text.tokenizer import HuggingFaceTokenizer
from engine.build import build, build_engine
from engine.config import EngineConfig
from engine.oengine import oEngine
from engine.request_limits import ServingLimits
from engine.scheduling.scheduler import InferenceScheduler
from engine.scheduling.sequence_memory import SequenceMemory
from engine.step.runner import eSurgeRunner

MAX_MODEL_LEN = 256
VOCAB_SIZE = 410
"""More than any of the tokenizers has."""
TOKENIZERS = {"byte level": (build_byte_level, "<|end|>"), "byte fallback": (build_byte_fallback, "<|end|>")}


def write_model(directory: Path, tokenizer_name: str = "byte level") -> Path:
    """A model of random weights that speaks a tokenizer's vocabulary, and some ids that nobody can read."""
    build, end = TOKENIZERS[tokenizer_name]
    tokenizer = build()
    eos = tokenizer.token_to_id(end)
    assert tokenizer.get_vocab_size() < VOCAB_SIZE
    build_checkpoint(
        directory, vocab_size=VOCAB_SIZE, eos_token_id=eos, max_position_embeddings=MAX_MODEL_LEN, head_dim=16
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return write_tokenizer(directory, tokenizer)


def build_config(directory: Path) -> EngineConfig:
    """The same sizes for all, so that what one has compiled another finds."""
    return EngineConfig(model=directory, max_num_seqs=4, max_num_batched_tokens=4, num_pages=200)


class Served:
    """A driver, and one's own requests to it."""

    def __init__(self, directory: Path, engine: oEngine | None = None) -> None:
        self.engine = engine or build_engine(build_config(directory), lambda progress: None)
        self.tokenizer = HuggingFaceTokenizer(directory)
        self.driver = oDriver(self.engine, self.tokenizer)
        self._count = 0
        self.driver.start()

    def submit(self, structured_outputs: Any = None, **params: Any) -> "SimpleQueue[ReturnSample]":
        """Asks for a text of that form; where its samples go. Greedy and short, unless it says otherwise."""
        self._count += 1
        channel: SimpleQueue[ReturnSample] = SimpleQueue()
        params = {"temperature": 0, "max_tokens": 100, "seed": self._count, **params}
        if structured_outputs is not None:
            params["structured_outputs"] = structured_outputs
        request = ActiveRequest(request_id=str(self._count), channel=channel, prompt="the fox", params=params)
        self.driver.submit_request(request)
        return channel

    def ask(self, structured_outputs: Any = None, **params: Any) -> tuple[str, str]:
        """The whole text, and why it ended."""
        return whole(self.submit(structured_outputs, **params))

    def refusal(self, structured_outputs: Any, **params: Any) -> str:
        """What a client is told of a mistake."""
        error = self.submit(structured_outputs, **params).get(timeout=PATIENCE).error
        assert error is not None and error.code == "invalid_request"
        return error.message


def whole(channel: "SimpleQueue[ReturnSample]") -> tuple[str, str]:
    """Text and finish reason of a request that went well."""
    samples = [channel.get(timeout=PATIENCE)]
    while not samples[-1].is_last:
        samples.append(channel.get(timeout=PATIENCE))
    assert samples[-1].finish_reason is not None, samples[-1].error
    return "".join(sample.text for sample in samples), samples[-1].finish_reason


@pytest.fixture(scope="module", params=TOKENIZERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon's inside, with each kind of tokenizer; at the end nothing is left."""
    served = Served(write_model(tmp_path_factory.mktemp("models") / "m", request.param))
    yield served
    served.driver.stop("the tests are over")
    served.engine.check_integrity()
    assert served.engine.stats().pages_owned == 0


def random_forms(count: int) -> list[dict[str, Any]]:
    """Half patterns, half schemas."""
    forms: list[dict[str, Any]] = []
    for seed in range(count // 2):
        rng = random.Random(seed)
        forms.append({"regex": random_regex(rng)})
        forms.append({"json": random_schema(rng), "disable_any_whitespace": rng.random() < 0.5})
    return forms


def check(form: dict[str, Any], text: str) -> None:
    """The text is of the form."""
    if "regex" in form:
        assert re.fullmatch(form["regex"], text), (form, text)
    else:
        jsonschema.validate(json.loads(text), form["json"])


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_whatever_ends_by_itself_is_of_its_form(served: Served, count: int, temperature: float) -> None:
    """Random patterns and schemas, random weights: what ends with stop is valid, what is cut says length."""
    forms = random_forms(count)

    channels = [served.submit(form, temperature=temperature) for form in forms]

    reasons = []
    for form, channel in zip(forms, channels, strict=True):
        text, reason = whole(channel)
        reasons.append(reason)
        if reason == "stop":
            check(form, text)
    assert set(reasons) <= {"stop", "length"} and reasons.count("stop") > count / 2


def test_a_choice_is_one_of_them(served: Served) -> None:
    """Also where one begins like another, or has what a grammar would read as its own."""
    choices = ['say "no"', "a | b", "a", "back\\slash", "one\nline", "日本"]

    texts = [served.ask({"choice": choices}, temperature=20) for _ in range(20)]

    assert all(text in choices and reason == "stop" for text, reason in texts)
    assert len(set(texts)) > 2


def test_a_grammar_is_followed(served: Served) -> None:
    """Lark's notation, with recursion that no pattern could follow."""
    grammar = 'start: "(" start ")" | "x"'

    texts = [served.ask({"grammar": grammar}, temperature=1) for _ in range(10)]

    for text, reason in texts:
        depth = text.count("(")
        assert reason == "length" or text == "(" * depth + "x" + ")" * depth


def test_a_json_object_is_any(served: Served) -> None:
    """A text that ends is an object."""
    texts = [served.ask({"json_object": True, "disable_any_whitespace": True}, temperature=1) for _ in range(10)]

    ended = [json.loads(text) for text, reason in texts if reason == "stop"]
    assert all(isinstance(value, dict) for value in ended)


def test_a_schema_may_be_text(served: Served) -> None:
    """As in a file."""
    assert served.ask({"json": ' {"const": 7} '}) == ("7", "stop")


def blank(served: Served) -> int:
    """The token that is a space."""
    return next(token_id for token_id in range(VOCAB_SIZE) if served.tokenizer.bytes_of(token_id) == b" ")


def test_whitespace_is_as_asked_for(served: Served) -> None:
    """None, or what a pattern allows; where nothing is said a model cannot go on with it for ever."""
    schema = {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2, "items": False}

    assert served.ask({"json": schema, "disable_any_whitespace": True}) == ("[1,2]", "stop")
    text, _ = served.ask({"json": schema, "whitespace_pattern": "_"})
    assert re.fullmatch("\\[_?1_?,_?2_?\\]", text)
    assert served.ask({"json": schema}, logit_bias={blank(served): 100}) == ("[ 1 , 2 ]", "stop")


def test_additional_properties_are_only_those_asked_for(served: Served) -> None:
    """An object that may have any other property has none where they are disabled."""
    form = {"json": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}}

    text, reason = served.ask({**form, "disable_any_whitespace": True, "disable_additional_properties": True})

    assert (text, reason) == ('{"x":1}', "stop")


def test_the_end_waits_where_it_is_ignored(served: Served) -> None:
    """ignore_eos goes on as long as the form allows, and ends where it allows no more."""
    assert served.ask({"regex": "a*"}, ignore_eos=True, max_tokens=7)[1] == "length"
    assert served.ask({"regex": "(ab)?"}, ignore_eos=True) == ("ab", "stop")


def test_a_cut_text_says_so(served: Served) -> None:
    """max_tokens holds as for any other."""
    text, reason = served.ask({"regex": "[a-z]{50}"}, max_tokens=2)

    assert reason == "length" and re.fullmatch("[a-z]*", text) and len(text) < 50


def test_neighbours_draw_what_they_draw_alone(served: Served) -> None:
    """With and without forms, greedy and drawn, in one batch: each has what it has alone."""
    forms = [
        None,
        {"regex": "[a-z ]{30}"},
        None,
        {"json": {"type": "array", "maxItems": 9}},
        {"choice": ["a", "b"]},
    ] * 3

    def ask(index: int) -> "SimpleQueue[ReturnSample]":
        return served.submit(forms[index], seed=index, temperature=index % 2, max_tokens=40)

    alone = [whole(ask(index)) for index in range(len(forms))]
    channels = [ask(index) for index in range(len(forms))]

    assert [whole(channel) for channel in channels] == alone


@pytest.mark.parametrize(
    ("structured_outputs", "complaint"),
    [
        ({}, "structured_outputs must be exactly one of json, json_object, regex, choice, grammar, not none"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs must be exactly one of"),
        ({"regexp": "a"}, "structured_outputs: object contains unknown field regexp"),
        ("a", "structured_outputs: expected object | null, got str"),
        ({"regex": 3}, "structured_outputs.regex: expected str | null, got int"),
        ({"choice": "a"}, "structured_outputs.choice: expected list | null, got str"),
        ({"choice": ["a", 1]}, "structured_outputs.choice[1]: expected str, got int"),
        ({"choice": []}, "structured_outputs.choice must be from 1 to 4096 strings, not 0"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must be strings of at least 1 character"),
        ({"json_object": False}, "structured_outputs.json_object must be true, or left out"),
        ({"json": {}}, "structured_outputs.json must be more than nothing"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern must be left out"),
        ({"regex": "a", "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern must be left out"),
        (
            {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
            "structured_outputs.whitespace_pattern must be left out where disable_any_whitespace",
        ),
        ({"json": "{"}, "structured_outputs.json: this is no JSON"),
        ({"json": "3"}, "structured_outputs.json: a JSON schema is an object, not int"),
        ({"json": "true"}, "structured_outputs.json: a JSON schema is an object, not bool"),
        ({"json": {"type": "text"}}, "structured_outputs.json: Invalid type: text"),
        ({"json": {"not": {}}}, 'structured_outputs.json: Unimplemented keys: ["not"]'),
        ({"json": {"enum": []}}, "structured_outputs.json: Unsatisfiable schema"),
        ({"json": json.loads('{"items":' * 200 + "{}" + "}" * 200)}, "structured_outputs.json: recursion limit"),
        ({"json": '{"items":' * 10**5 + "{}" + "}" * 10**5}, "structured_outputs.json: it is nested too deeply"),
        ({"json": {"enum": ["x" * 70000]}}, "and may have at most 65536"),
        ({"regex": "a(b"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex: no token of this model can come next"),
        ({"regex": "a\\"}, "structured_outputs.regex: it ends in a backslash"),
        ({"regex": "\ud800"}, "structured_outputs.regex: it holds half a surrogate pair"),
        ({"regex": "x" * 65537}, "structured_outputs.regex: it has 65537 bytes and may have at most 65536"),
        ({"grammar": "start: unheard_of"}, 'structured_outputs.grammar: at 1(8): unknown name: "unheard_of"'),
        ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "a rule cannot have a temperature"),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(
    served: Served, structured_outputs: dict[str, Any], complaint: str
) -> None:
    """Before a slot is taken, and the next request is served."""
    assert complaint in served.refusal(structured_outputs)
    assert served.ask({"choice": ["fine"]}) == ("fine", "stop")


def test_a_form_that_breaks_its_process_ends_alone(served: Served) -> None:
    """A grammar nested so deeply that it overflows a stack is refused; one that is being followed goes on."""
    deep = "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(5000)), 'r5000: "x"'])
    going_on = served.submit({"regex": "[a-z]{80}"})

    assert "cannot be compiled within 5 seconds" in served.refusal({"grammar": deep})
    assert whole(going_on)[1] in ("stop", "length")


def test_samples_share_a_grammar_that_is_compiled_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, and whoever asks for it again."""
    compiled, compile_grammar = [], GrammarCompiler.compile

    def counted(self: GrammarCompiler, job: bytes, tier: int) -> CompiledGrammar | None:
        grammar = compile_grammar(self, job, tier)
        compiled.extend([job] if grammar else [])
        return grammar

    monkeypatch.setattr(GrammarCompiler, "compile", counted)

    channels = [served.submit({"regex": "[a-y]{3}"}, n=64, temperature=1) for _ in range(2)]

    for channel in channels:
        samples = [channel.get(timeout=PATIENCE)]
        while sum(sample.finish_reason is not None for sample in samples) < 64:
            samples.append(channel.get(timeout=PATIENCE))
        texts = ["".join(sample.text for sample in samples if sample.index == index) for index in range(64)]
        assert all(re.fullmatch("[a-y]{3}", text) for text in texts), samples[-1].error
    assert len(compiled) == 1


def test_processes_that_are_killed_change_no_text(served: Served) -> None:
    """Whoever kills them: each request that was followed in one has the text that it has undisturbed."""
    forms = [{"regex": "[a-z ]{60}"}, {"json": {"type": "array", "minItems": 40}}, {"regex": "([0-9]{3} ){20}"}] * 2

    def ask(index: int) -> "SimpleQueue[ReturnSample]":
        return served.submit(forms[index], seed=index, temperature=index % 2, max_tokens=60)

    undisturbed = [whole(ask(index)) for index in range(len(forms))]
    channels = [ask(index) for index in range(len(forms))]
    killed = 0
    while killed < 3 and any(channel.qsize() < 50 for channel in channels):
        seen = sum(channel.qsize() for channel in channels)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it may end by itself meanwhile
                if seen > 12 * killed + 12 and process.ppid() != os.getpid():
                    process.kill()
        killed += seen > 12 * killed + 12

    assert [whole(channel) for channel in channels] == undisturbed and killed


def test_a_form_that_gets_too_hard_is_an_error_there(served: Served) -> None:
    """One that can be compiled, but not followed, says so when it comes to that: too many things may come next."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(2000)}}
    channel = served.submit({"json": schema, "disable_any_whitespace": True})

    samples = [channel.get(timeout=PATIENCE)]
    while not samples[-1].is_last:
        samples.append(channel.get(timeout=PATIENCE))

    error = samples[-1].error
    assert error is not None and error.code == "invalid_request" and error.message.startswith("structured_outputs: ")


def test_an_abort_frees_what_it_holds(served: Served) -> None:
    """Also while its mask is being worked out."""
    channel = served.submit({"regex": "[a-z]{200}"}, max_tokens=150)
    sample = channel.get(timeout=PATIENCE)

    served.driver.abort(sample.request_id)

    while not sample.is_last:
        sample = channel.get(timeout=PATIENCE)
    assert sample.finish_reason == "abort"


def test_nothing_is_compiled_for_them(served: Served) -> None:
    """All that the tests above needed of the device was there before them."""
    served.ask({"regex": "[ab]{3}"}, temperature=1)

    assert served.engine.stats().compilations_after_ready == 0


@pytest.mark.thorough
@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_drafts_change_nothing(tmp_path: Path, run_ahead: int) -> None:
    """With what grammars force and n-grams for drafts, random forms have the texts that they have without: greedy and drawn, with their
    log-probabilities, beside others, aborted ones too, and where workers are killed meanwhile."""
    directory, answers = write_model(tmp_path / "m"), []
    for speculation in (None, SPECULATION):
        served = Served(directory, build_drafting(directory, speculation, run_ahead=run_ahead, num_pages=30))
        forms = [*random_forms(20), *[{"json": PERSON, "disable_any_whitespace": True}, None] * 6]
        channels = [served.submit(form, temperature=n % 2, logprobs=1, max_tokens=70) for n, form in enumerate(forms)]
        aborted = served.submit({"regex": "(a long text that is forced){9}"}, max_tokens=80)
        served.driver.abort(aborted.get(timeout=PATIENCE).request_id)
        for process in children():
            if process.ppid() != os.getpid():
                process.kill()
        try:
            answers.append([parts(channel) for channel in channels])
            before = served.engine.stats().num_accepted_tokens
            answers[-1].append(parts(served.submit({"regex": "[qz]{90}"}, max_tokens=90)))
            guessed = served.engine.stats().num_accepted_tokens - before
        finally:
            served.driver.stop("measured")
        served.engine.check_integrity()
        stats = served.engine.stats()

    assert answers[0] == answers[1]
    assert stats.num_accepted_tokens > 100 and stats.num_draft_tokens > stats.num_accepted_tokens
    assert guessed > 20, "of a form that forces nothing, n-grams are accepted"


def parts(channel: "SimpleQueue[ReturnSample]") -> tuple[list[int], list[list[int]], str | None]:
    """Token ids, those of log-probabilities, and finish reason of a request that went well."""
    samples = [channel.get(timeout=PATIENCE)]
    while not samples[-1].is_last:
        samples.append(channel.get(timeout=PATIENCE))
    assert samples[-1].finish_reason is not None, samples[-1].error
    logprobs = [list(token) for sample in samples for token in sample.logprobs]
    return [token_id for sample in samples for token_id in sample.token_ids], logprobs, samples[-1].finish_reason


@pytest.mark.thorough
def test_run_ahead_and_preemption_change_nothing(tmp_path: Path) -> None:
    """With and without run-ahead, and with pages for all and for few, the same requests have the same texts."""
    directory = write_model(tmp_path / "m")
    steps = build(build_config(directory), lambda progress: None, lambda steps: steps)
    page_size = steps.manager.shapes.cache.page_size
    limits = ServingLimits(120, VOCAB_SIZE, steps.served.model.eos_token_ids, page_size)
    forms = [
        {"regex": "[qz]{100}"},
        {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 99}},
        None,
    ] * 4  # two of so many run at once, however late the first grammar is
    texts, preemptions = [], []
    for run_ahead, num_pages in ((0, 40), (1, 40), (1, 9)):
        pages = HBMPageManager(num_pages)
        scheduler = InferenceScheduler(
            SequenceMemory(pages, CacheGroups(page_size)), max_num_seqs=2, max_num_batched_tokens=2
        )
        runner = eSurgeRunner(steps.manager, 0)
        served = Served(directory, oEngine(scheduler, runner, limits, run_ahead=run_ahead))
        channels = [served.submit(form, max_tokens=90, temperature=n % 2) for n, form in enumerate(forms)]
        texts.append([whole(channel) for channel in channels])
        preemptions.append(served.engine.stats().preemptions)
        served.driver.stop("measured")
        served.engine.check_integrity()

    assert texts[0] == texts[1] == texts[2]
    assert preemptions[:2] == [0, 0] and preemptions[2] > 0
