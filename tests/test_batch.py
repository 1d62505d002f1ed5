"""``odriver batch``: a file of requests against servers in this process."""

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from fake_driver import PATIENCE, FakeDriver, serving
from fakes import FakeEngine, FakeTokenizer
from test_cli import ENVIRONMENT, ODRIVER

from driver.errors import Overloaded
from driver.odriver import oDriver
from driver.request import Logprob, Usage
from ipc.batch.batch_lines import Line
from ipc.batch.batch_output import BatchOutput
from ipc.commands.cli import main
from ipc.commands.requests import batch
from ipc.errors import BatchError
from ipc.openai.answer_format import AnswerFormat, format_of
from ipc.openai.logprob_bodies import TextPlace, chat_logprobs, text_logprobs
from ipc.openai.question import BodyError, Question
from ipc.openai.translation import CHAT, TEXT, body_of, question_of
from ipc.wire.completion import Choice, Completion


class Files:
    """A batch's input and output."""

    def __init__(self, directory: Path, address: str) -> None:
        self.source, self.target = directory / "in.jsonl", directory / "out.jsonl"
        self.command = ["batch", str(self.source), str(self.target), "--connect", address]

    def write(self, *lines: dict[str, Any] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(f"{text}\n" for text in texts))

    def count(self) -> int:
        """Of results so far."""
        return self.target.read_bytes().count(b"\n") if self.target.exists() else 0

    def results(self) -> dict[str, dict[str, Any]]:
        """By custom_id; each is there once."""
        lines = [json.loads(line) for line in self.target.read_text().splitlines()]
        results = {line["custom_id"]: line["response"] for line in lines}
        assert len(results) == len(lines)
        return results


@pytest.fixture
def files(tmp_path: Path, address: str) -> Files:
    """Of the batch under test."""
    return Files(tmp_path, address)


def asked(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    """A line as OpenAI's batches have it."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_lines_of_either_format_are_answered(files: Files, driver: FakeDriver) -> None:
    """Bodies are OpenAI's; a line that has no name is called by its number, blank ones count."""
    files.write(
        asked("text", TEXT, model="parrot", prompt="once upon", max_tokens=5, seed=1),
        asked("chat", CHAT, messages=[{"role": "user", "content": "what is it"}]),
        "",
        {"prompt": "a plain one", "temperature": 0},
        {"messages": [{"role": "user", "content": "so plain"}], "custom_id": "mine"},
    )

    assert main(files.command) == 0

    results = files.results()
    assert results["text"]["body"] == {
        "id": "cmpl-text",
        "object": "text_completion",
        "model": "parrot",
        "choices": [{"index": 0, "text": "onceupon", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert results["chat"]["body"]["choices"][0]["message"] == {"role": "assistant", "content": "whatisit"}
    assert results["line-4"]["body"]["choices"][0]["text"] == "aplainone"
    assert results["mine"]["body"]["choices"][0]["message"]["content"] == "soplain"
    params = {str(request.prompt): request.params for request in driver.submitted}
    assert params["once upon"] == {"max_tokens": 5, "seed": 1}
    assert params["a plain one"]["temperature"] == 0


def test_a_line_without_a_seed_has_one_of_its_own(files: Files, driver: FakeDriver) -> None:
    """The same in every run, and another for every custom_id; null is none, in either format."""
    lines = [
        {"prompt": "x", "custom_id": "a"},
        {"prompt": "x", "custom_id": "b", "seed": None},
        asked("c", TEXT, prompt="x", seed=None),
    ]
    files.write(*lines)
    for _ in range(2):
        assert main(files.command) == 0
        files.target.unlink()

    seeds = [request.params["seed"] for request in driver.submitted]
    assert len(set(seeds)) == 3 and sorted(seeds[:3]) == sorted(seeds[3:]) and None not in seeds


def test_a_mistake_is_the_result_of_its_line(
    files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded as an answer of OpenAI's would be; the exit code tells, in the next run too, which asks nothing."""
    files.write(
        asked("model", TEXT, model="owl", prompt="x"),
        asked("url", "/v1/embeddings", input="x"),
        asked("parameter", TEXT, prompt="x", suffix="y"),
        asked("prompt", CHAT, prompt="x"),
        {"prompt": 5, "custom_id": "type"},
        {"prompt": "good", "custom_id": "good"},
    )

    assert main(files.command) == 1
    submitted = len(driver.submitted)
    assert main(files.command) == 1

    results = files.results()
    errors = {name: result["body"]["error"] for name, result in results.items() if result["status_code"] != 200}
    assert {name: results[name]["status_code"] for name in errors} == {
        "model": 404, "url": 400, "parameter": 400, "prompt": 400, "type": 400
    }  # fmt: skip
    assert errors["model"]["code"] == "model_not_found" and "suffix" in errors["parameter"]["message"]
    assert len(driver.submitted) == submitted
    assert "6 of 6 requests are in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "results", "words"),
    [
        (["{"], "", "in.jsonl, line 1 is no JSON"),
        (["[]"], "", "line 1 is no JSON object"),
        (['{"url": "/v1/completions", "body": {}}'], "", "line 1 must have custom_id, method"),
        (['{"prompt": "x", "custom_id": 5}'], "", "custom_id must be a string"),
        (['{"prompt": "x", "custom_id": "line-2"}', '{"prompt": "y"}'], "", "line 2: custom_id 'line-2' is used twice"),
        (['{"prompt": "x"}'], "what is this\n", "out.jsonl, line 1 is no result of a batch"),
        (['{"prompt": "x"}'], '{"no": "newline"}', "out.jsonl, line 1 is no result of a batch"),
        (['{"prompt": "x"}'], '{"id":"batch_x', "out.jsonl, line 1 is no result of a batch"),
        (
            ['{"prompt": "x"}'],
            '{"custom_id": "other", "response": {"status_code": 200}}\n',
            "has a result of 'other', which",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_before_anything_is_asked(
    files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str], lines: list[str], results: str, words: str
) -> None:
    """With file and line; the output is left as it is."""
    files.write(*lines)
    if results:
        files.target.write_text(results)

    assert main(files.command) == 1

    assert words in capsys.readouterr().err
    assert not driver.submitted
    assert (files.target.read_text() if results else "") == results


def test_results_do_not_replace_the_requests(
    files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another name, too, and with no newline at the end."""
    files.source.write_text('{"prompt": "x"}')
    files.target.symlink_to(files.source)

    assert main(files.command) == 1

    assert "has the requests: choose another file" in capsys.readouterr().err
    assert files.source.read_text() == '{"prompt": "x"}' and not driver.submitted


def test_a_file_may_be_of_windows(files: Files, driver: FakeDriver) -> None:
    """With a byte order mark, and lines that end as they do there."""
    files.source.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n\r\n{"prompt": "y", "custom_id": "y"}\r\n')

    assert main(files.command) == 0
    assert files.results().keys() == {"line-1", "y"} and len(driver.submitted) == 2


def test_requests_may_come_through_a_pipe(files: Files, driver: FakeDriver) -> None:
    """Which has them once: ``zcat in.jsonl.gz | odriver batch /dev/stdin out.jsonl``."""
    lines = "".join(json.dumps({"prompt": name, "custom_id": name}) + "\n" for name in "abc")
    command = [*ODRIVER, "batch", "/dev/stdin", *files.command[2:]]

    done = subprocess.run(command, env=ENVIRONMENT, input=lines, capture_output=True, text=True, timeout=PATIENCE)

    assert (done.returncode, files.results().keys(), len(driver.submitted)) == (0, set("abc"), 3)


def test_results_go_to_files_alone(files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str]) -> None:
    """What a device or a pipe is given cannot be read again."""
    files.write({"prompt": "x"})
    pipe = files.target.with_name("pipe")
    os.mkfifo(pipe)

    for target in ("/dev/full", "/dev/null", str(pipe)):
        assert main([*files.command[:2], target, *files.command[3:]]) == 1
        assert f"{target} is no file: results are read again" in capsys.readouterr().err
    assert not driver.submitted


def test_a_directory_that_cannot_be_synced_is_refused_in_words(
    files: Files, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one in which the user may write and not list what is there, or of a file system that cannot; it was a
    traceback."""
    files.write({"prompt": "x"})

    def refused(_: int) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "fsync", refused)

    assert main(files.command) == 1
    assert f"odriver: cannot write {files.target}: Permission denied" in capsys.readouterr().err
    assert not driver.submitted


def test_a_request_without_a_result_is_no_success(
    files: Files, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the file of requests is cut meanwhile."""
    files.write({"prompt": "x"}, {"prompt": "y"})
    answer = batch.answer

    async def answer_one(lines: Iterator[Line], *args: Any, **options: Any) -> None:
        await answer(islice(lines, 1), *args, **options)

    monkeypatch.setattr(batch, "answer", answer_one)

    assert main(files.command) == 1
    assert len(driver.submitted) == len(files.results()) == 1


@pytest.mark.parametrize("left", [1, 10, 40])
def test_a_result_of_which_little_was_written_is_cut(files: Files, driver: FakeDriver, left: int) -> None:
    """However little it is."""
    files.write({"prompt": "x"})
    assert main(files.command) == 0
    whole = files.target.read_bytes()
    files.target.write_bytes(whole[:left])

    assert main(files.command) == 0
    assert files.target.read_bytes() == whole and len(driver.submitted) == 2


def test_a_file_that_is_not_there_is_named(
    files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Input or output's directory."""
    assert main(files.command) == 1
    files.write({"prompt": "x"})
    assert main([*files.command[:2], "/nonexistent/out", *files.command[3:]]) == 1

    said = capsys.readouterr().err
    assert f"cannot read {files.source}" in said and "cannot write /nonexistent/out" in said
    assert not driver.submitted


def test_a_torn_line_is_cut_and_done_again(files: Files, driver: FakeDriver) -> None:
    """What was whole stays, byte for byte, and is not asked again."""
    files.write(*({"prompt": name, "custom_id": name} for name in "abc"))
    assert main(files.command) == 0
    lines = files.target.read_bytes().splitlines(keepends=True)
    files.target.write_bytes(lines[0] + lines[1] + lines[2][:-7])
    driver.submitted.clear()

    assert main(files.command) == 0

    assert sorted(files.target.read_bytes().splitlines(keepends=True)) == sorted(lines)
    assert files.target.read_bytes().startswith(lines[0] + lines[1])
    assert len(driver.submitted) == 1


def test_a_full_disk_leaves_no_part_of_a_line(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another result that is written before the run ends would stand behind it, and neither could be read."""
    results = [{"id": f"batch_req_{name}", "custom_id": name, "response": {"status_code": 200}} for name in "ab"]
    room = 20

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= (size := min(room, len(data)))
        return real(descriptor, data[:size])

    real = os.write
    with BatchOutput(files.target) as output, monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(BatchError, match="No space left"):
            output.append(results[0])
        room = 1000
        output.append(results[1])

    assert files.results().keys() == {"b"}
    with BatchOutput(files.target) as output:
        assert output.results == {"b": True}


def test_no_more_are_open_than_asked_for_and_what_is_done_is_written(files: Files, driver: FakeDriver) -> None:
    """Five, of which each makes room for another; a result is in the file while others are open."""
    files.write(*({"prompt": f"hold {number}"} for number in range(12)))
    running = threading.Thread(target=main, args=([*files.command, "--max-concurrency", "5"],))
    running.start()

    held = [driver.take() for _ in range(5)]
    for number in range(7):
        assert len(driver.open) == 5
        driver.finish(held.pop(0))
        held.append(driver.take())
        assert len(files.results()) == number + 1
    for request in held:
        driver.finish(request)
    running.join(PATIENCE)

    assert len(files.results()) == 12


def test_a_daemon_that_has_no_room_is_asked_again(
    files: Files, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is in the results."""
    monkeypatch.setattr(batch, "OVERLOADED_DELAY", 0.01)
    files.write({"prompt": "x"}, {"prompt": "y"})
    driver.refusal = Overloaded("too many wait")
    running = threading.Thread(target=main, args=(files.command,))
    running.start()
    while len(driver.submitted) < 10:
        pass
    driver.refusal = None
    running.join(PATIENCE)

    assert {result["status_code"] for result in files.results().values()} == {200}


def test_another_batch_on_the_same_output_is_refused(
    files: Files, driver: FakeDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as the first one runs."""
    files.write({"prompt": "hold"})
    first = threading.Thread(target=main, args=(files.command,))
    first.start()
    request = driver.take()

    assert main(files.command) == 1
    assert f"another batch is writing {files.target}" in capsys.readouterr().err

    driver.finish(request)
    first.join(PATIENCE)
    assert len(files.results()) == 1


def test_a_daemon_that_does_not_come_back_ends_the_run(
    files: Files, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with what was done in the file, so that the next run does the rest."""
    files.write({"prompt": "done"}, {"prompt": "hold"})
    with serving(address, driver := FakeDriver()):
        running = threading.Thread(target=main, args=([*files.command, "--resume-timeout", "0.2"],))
        running.start()
        driver.take()
    running.join(PATIENCE)
    assert "within 0.2 s it could not be resumed" in capsys.readouterr().err
    assert files.results().keys() == {"line-1"}

    with serving(address, driver := FakeDriver()):
        again = threading.Thread(target=main, args=(files.command,))
        again.start()
        driver.finish(driver.take())
        again.join(PATIENCE)
    assert files.results().keys() == {"line-1", "line-2"}


@contextmanager
def parrots(address: str, files: Files) -> Iterator[None]:
    """Real drivers that are served one after the other, each for 30 results, until the end of the with statement."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            driver, before = oDriver(FakeEngine(), FakeTokenizer()), files.count()
            driver.start()
            with serving(address, driver):
                while not ended.wait(0.01) and files.count() < before + 30:
                    pass
            driver.stop("it is no more")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_until(files: Files, least: int | None) -> None:
    """Run the command, and kill it when there are so many results; None lets it end. It may find no daemon at first."""
    command = [*ODRIVER, *files.command, "--max-concurrency", "8"]
    while True:
        with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
            while process.poll() is None and least is not None:
                if files.count() >= least:
                    process.kill()
                time.sleep(0.001)
            _, said = process.communicate(timeout=PATIENCE)
        if process.returncode in (0, -signal.SIGKILL):
            return
        assert "no daemon answers" in said


def test_kills_of_the_batch_and_of_the_daemon_leave_no_trace(files: Files, address: str) -> None:
    """The output is that of a run that nobody disturbed, each custom_id once."""
    prompts = [f"é😀 number {number} " for number in range(300)]
    files.write(*({"prompt": prompt, "max_tokens": 60} for prompt in prompts))
    with parrots(address, files):
        for least in (20, 120):
            run_until(files, least)
            os.truncate(files.target, files.target.stat().st_size - 5)
        run_until(files, None)

    texts = {name: result["body"]["choices"][0]["text"] for name, result in files.results().items()}
    assert texts == {
        f"line-{number}": (prompt.encode() * 9)[:60].decode(errors="replace")
        for number, prompt in enumerate(prompts, start=1)
    }


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, {}),
        ({"max_completion_tokens": 5, "temperature": None, "stream": False, "user": "u"}, {"max_tokens": 5}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"logit_bias": {"7": -5}, "top_k": 4}, {"logit_bias": {7: -5}, "top_k": 4}),
        ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            {"structured_outputs": {"json": {"type": "null"}}},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "text", "json_schema": None, "triggers": None}}, {}),
    ],
)
def test_their_parameters_become_ours(body: dict[str, Any], params: dict[str, Any]) -> None:
    """Those of a chat, by their names and ours."""
    messages = [{"role": "user", "content": "x"}]

    asked = question_of(CHAT, {"messages": messages, **body}, ["parrot"])

    assert asked._replace(names={}) == Question(
        None, messages, params, format_of(params), form_fields=asked.form_fields
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"stream": True}, "stream must be false"),
        ({"functions": []}, "unknown parameter 'functions'$"),
        ({"stream_options": {"x": 1}}, "unknown parameter 'stream_options.x'"),
        ({"logprobs": 3}, "logprobs: expected `bool"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type must be json_object, json_schema, structural_tag or text, not 'xml'",
        ),
        ({"use_beam_search": True}, "use_beam_search must be false, not true"),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort must be high, low, max, medium, minimal, none or xhigh, not 'huge'",
        ),
        ({"tool_choice": {"type": "x"}}, r"tool_choice\.type must be function, not 'x'"),
        (
            {"messages": [{"role": "king"}]},
            r"messages\[0\]\.role must be assistant, developer, system, tool or user, not 'king'",
        ),
        ({"logit_bias": {"word": 1}}, "a key of logit_bias: expected `int`"),
        ({"self": 1}, "unknown parameter 'self'"),
        ({"max_token": 1}, r"unknown parameter 'max_token': did you mean 'max_tokens'\?"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {"type": "object"}}}},
            r"response_format\.json_schema must be left out where response_format\.type is json_object",
        ),
        (
            {"response_format": {"type": "text", "triggers": ["<a>"], "structures": None}},
            r"response_format\.triggers must be left out where response_format\.type is text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "structures": []}},
            r"response_format\.structures must be left out where response_format\.type is json_schema",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], words: str) -> None:
    """Nothing is ignored that would have changed the answer."""
    with pytest.raises(BodyError, match=words):
        question_of(CHAT, {"messages": []} | body, ["parrot"])


def test_a_text_has_their_length_if_none_is_given() -> None:
    """Sixteen tokens."""
    assert question_of(TEXT, {"prompt": "x"}, ["parrot"]).params == {"max_tokens": 16}


def test_log_probabilities_are_told_as_theirs() -> None:
    """Those of a chat token by token, those of a text in columns."""
    tokens = [{5: Logprob(-2.0, 3, "é"), 6: Logprob(-0.5, 1, "a")}, {6: Logprob(-0.1, 1, "a")}]
    completion = Completion([Choice(0, "éa", [5, 6], "length", tokens)], Usage(1, 2), [])

    chat = question_of(CHAT, {"messages": [], "logprobs": True, "top_logprobs": 1}, ["parrot"])
    text = question_of(TEXT, {"prompt": "x", "logprobs": 1}, ["parrot"])

    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    content = body_of(completion, chat, "parrot", "n")["choices"][0]["logprobs"]["content"]
    assert content[0] == {"token": "é", "logprob": -2.0, "bytes": [195, 169], "top_logprobs": [a]}
    assert body_of(completion, text, "parrot", "n")["choices"][0]["logprobs"] == {
        "tokens": ["é", "a"],
        "token_logprobs": [-2.0, -0.1],
        "top_logprobs": [{"é": -2.0, "a": -0.5}, {"a": -0.1}],
        "text_offset": [0, 1],
    }


WRITTEN = [b"a", b"\xb9", b"\xe4\xbb", b"\x8a", b"b", b"\xf0\x9f", b"c\xc3", b"\xa9", b"\x80", b"d"]
STARTS = [0, 1, 2, 3, 3, 4, 5, 7, 7, 8]


@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_offsets_are_those_of_the_text_behind_bytes_that_are_no_utf8(size: int) -> None:
    """Each such byte is a character, and one in several tokens is the first one's, however they come."""
    tokens = [{number: Logprob(-0.5, 1, "\ufffd", token)} for number, token in enumerate(WRITTEN)]
    place, offsets = TextPlace(), []
    for first in range(0, len(tokens), size):
        offsets += text_logprobs(tokens[first : first + size], AnswerFormat(1), place).text_offset

    text = b"".join(WRITTEN).decode(errors="replace")
    assert offsets == STARTS and [text[start] for start in (0, 1, 2, 3, 4, 5, 6, 7, 8)] == list(
        "a\ufffd今b\ufffdcé\ufffdd"
    )


def test_a_prompt_may_begin_with_a_part_of_a_character() -> None:
    """Of its first token there is no more than a text."""
    rest = [{number: Logprob(-0.5, 1, "\ufffd", token)} for number, token in enumerate([b"\xbb", b"\x8a", b"b"])]

    assert text_logprobs(rest, AnswerFormat(1), first="\ufffd").text_offset == [0, 1, 1, 1]


def test_tokens_of_one_text_are_told_apart() -> None:
    """The token's own keeps it, and others have their bytes for a name; a character in two tokens is counted once."""
    half = {5: Logprob(-2.0, 3, "\ufffd", b"\xc3"), 6: Logprob(-0.5, 1, "\ufffd", b"\xe4"), 7: Logprob(-0.6, 2, "a")}
    other = {8: Logprob(-0.1, 1, "\ufffd", b"\xa9")}
    same = {9: Logprob(-3.0, 2, "the"), 10: Logprob(-0.1, 1, "the")}

    columns = text_logprobs([half, other, same], AnswerFormat(2), TextPlace(7))

    assert columns.tokens == ["\ufffd", "\ufffd", "the"] and columns.text_offset == [7, 8, 8]
    assert columns.top_logprobs == [
        {"\ufffd": -2.0, "bytes:\\xe4": -0.5, "a": -0.6},
        {"\ufffd": -0.1},
        {"the": -3.0, "bytes:\\x74\\x68\\x65": -0.1},
    ]


@pytest.mark.parametrize(("text", "names"), [(None, ["token_id:4", "token_id:9"]), ("", ["", "token_id:9"])])
def test_tokens_without_text_are_told_apart(text: str | None, names: list[str]) -> None:
    """By their ids: where nothing is made text, and where several have none."""
    token = {4: Logprob(-2.0, 2, text), 9: Logprob(-0.5, 1, text)}

    columns, (told,) = text_logprobs([token], AnswerFormat(1)), chat_logprobs([token], AnswerFormat(1)).content

    assert columns.tokens == names[:1] and columns.top_logprobs == [dict(zip(names, (-2.0, -0.5), strict=True))]
    if text is None:
        assert [told.token, *(one.token for one in told.top_logprobs)] == names


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_chat_has_as_many_of_the_likeliest_as_were_asked_for(count: int) -> None:
    """By rank, and no more where the token's own logit is as high as theirs."""
    ranks = {3: 1, 1: 1, 2: 1} if count < 3 else {3: 3, 1: 1, 2: 2}
    token = {
        token_id: Logprob(-0.5, rank, str(token_id)) for token_id, rank in list(ranks.items())[: max(1, 1 + count)]
    }

    (told,) = chat_logprobs([token], AnswerFormat(count)).content

    expected = {0: [], 1: ["1"], 2: ["1", "2"], 3: ["1", "2", "3"]}
    assert told.token == "3" and [one.token for one in told.top_logprobs] == expected[count]
