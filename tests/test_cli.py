"""The ``odriver`` command as a process, against a server in this one."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from fake_driver import PATIENCE, FakeDriver, serving

from driver.errors import Overloaded
from engine.sampling_params import SamplingParams
from ipc.commands import cli
from ipc.commands.requests import sampling_flags

ROOT = Path(__file__).parent.parent
ODRIVER = [sys.executable, "-c", "import sys; from ipc.commands.cli import main; sys.exit(main())"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


FLAGS = {
    "": {},
    "--max-tokens 5 --min-tokens 2 --timeout-s 1.5": {"max_tokens": 5, "min_tokens": 2, "timeout_s": 1.5},
    "--priority -3 --queue-timeout-s 2 --num-speculative-tokens 0": {
        "priority": -3, "queue_timeout_s": 2.0, "num_speculative_tokens": 0,
    },
    "--cache-salt mine --no-enable-prefix-caching": {"cache_salt": "mine", "enable_prefix_caching": False},
    "--temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed 3": {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3,
    },
    "--presence-penalty 1 --frequency-penalty -2 --repetition-penalty 1.1": {
        "presence_penalty": 1.0, "frequency_penalty": -2.0, "repetition_penalty": 1.1,
    },
    "--logit-bias 5=2.5 --logit-bias 7=-100 --allowed-token-ids 1,5 --bad-words a --bad-words b": {
        "logit_bias": {5: 2.5, 7: -100.0}, "allowed_token_ids": [1, 5], "bad_words": ["a", "b"],
    },
    "--stop x --stop y --stop-token-ids 3,4 --include-stop-str-in-output --ignore-eos": {
        "stop": ["x", "y"], "stop_token_ids": [3, 4], "include_stop_str_in_output": True,
        "ignore_eos": True,
    },
    "--repetition-detection 8 --n 2": {"repetition_detection": {"max_pattern_size": 8}, "n": 2},
    "--repetition-detection 8,2,3 --logprobs 0 --prompt-logprobs 20": {
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3}, "logprobs": 0,
        "prompt_logprobs": 20,
    },
    "--no-detokenize --no-skip-special-tokens --no-spaces-between-special-tokens": {
        "detokenize": False, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    },
}  # fmt: skip
"""Command lines and the parameters that they ask for."""


def odriver(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    return subprocess.run(
        [*ODRIVER, *arguments], env=ENVIRONMENT, input=stdin, capture_output=True, text=True, timeout=PATIENCE
    )


@contextmanager
def running(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command, for the test to talk with while it runs."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*ODRIVER, *arguments], env=ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing where it has ended; a test that failed would wait for it


@pytest.mark.usefixtures("driver")
def test_complete_streams_to_stdout(address: str) -> None:
    """The completion and a newline, and nothing else."""
    done = odriver("complete", "once upon a time", "--connect", address)

    assert (done.returncode, done.stdout, done.stderr) == (0, "onceuponatime\n", "")


@pytest.mark.usefixtures("driver")
def test_complete_reads_the_prompt_from_stdin(address: str) -> None:
    """Where none is given."""
    assert odriver("complete", "--connect", address, stdin="from a pipe\n").stdout == "fromapipe\n"


def test_complete_says_that_its_text_was_cut_off(driver: FakeDriver, address: str) -> None:
    """By its timeout or an operator, on stderr: the text alone does not show it."""
    with running("complete", "hold", "--connect", address) as complete:
        request = driver.held.get(timeout=PATIENCE)
        driver.say(request, "so far", [1])
        driver.finish(request, "timeout")
        stdout, stderr = complete.communicate(timeout=PATIENCE)

    assert (complete.returncode, stdout) == (0, "so far\n")
    assert stderr == "odriver: the text was cut off here: the time of --timeout-s is over\n"


def test_complete_passes_on_what_was_given_and_nothing_else(driver: FakeDriver, address: str) -> None:
    """A flag that is left out is the daemon's to decide."""
    for flags, params in FLAGS.items():
        assert cli.main(["complete", "x", "--connect", address, *flags.split()]) == 0
        assert driver.submitted[-1].params == params


def test_complete_lists_every_parameter_with_its_range() -> None:
    """Whatever SamplingParams has is a flag of the same name, or several, and no number's range is left out."""
    listed = " ".join(odriver("complete", "--help").stdout.split())

    for name in {*SamplingParams.__struct_fields__, *sampling_flags.FORMS} - {"structured_outputs"}:
        assert f"--{name.replace('_', '-')}" in listed
    for words in ("1 or more", "0 to 100", "-2 to 2", "0.01 to 10", "-100 to 100", "0 to 20", "1 to 64"):
        assert words in listed


@pytest.mark.usefixtures("driver")
def test_complete_shows_more_than_one_text_when_it_is_whole(address: str) -> None:
    """Samples are numbered; with log-probabilities, or as asked, all there is comes as JSON."""
    several = odriver("complete", "once upon", "--connect", address, "--n", "2")
    told = json.loads(odriver("complete", "once upon", "--connect", address, "--logprobs", "1").stdout)

    assert several.stdout == "[0] onceupon\n"
    assert told["choices"][0]["text"] == "onceupon" and told["usage"]["completion_tokens"] == 2


def test_complete_asks_for_a_form_of_the_text(driver: FakeDriver, address: str, tmp_path: Path) -> None:
    """A schema and a grammar are read from files, as they are; the parameter has the daemon's names."""
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"const": 7}')
    grammar.write_text('start: "ü"')

    for flags in (
        ["--json-schema", str(schema), "--disable-additional-properties", "--whitespace-pattern", " ?"],
        ["--json-object", "--disable-any-whitespace"],
        ["--regex", "[0-9]+"],
        ["--choice", "yes", "--choice", "no"],
        ["--grammar", str(grammar)],
    ):
        assert cli.main(["complete", "x", "--connect", address, *flags]) == 0

    assert [request.params for request in driver.submitted] == [
        {
            "structured_outputs": {
                "json": '{"const": 7}',
                "disable_additional_properties": True,
                "whitespace_pattern": " ?",
            }
        },
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "ü"'}},
    ]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(["--regex", "a", "--json-object"], "not allowed with"), (["--grammar", "/nowhere"], "cannot read /nowhere: ")],
)
def test_a_form_that_cannot_be_asked_for_is_a_wrong_command_line(flags: list[str], complaint: str) -> None:
    """Two forms, or a file that cannot be read."""
    done = odriver("complete", "x", *flags)

    assert done.returncode == 2 and complaint in done.stderr


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--logit-bias", "5", "must be a token id and a number, as in 5=-2.5, not '5'"),
        ("--allowed-token-ids", "1,,2", "must be token ids, as in 5,7, not '1,,2'"),
        ("--stop-token-ids", "x", "must be token ids, as in 5,7, not 'x'"),
        ("--repetition-detection", "8,x", "must be one to three whole numbers, as in 8,2,3, not '8,x'"),
        ("--repetition-detection", "1,2,3,4", "must be one to three whole numbers, as in 8,2,3, not '1,2,3,4'"),
    ],
)
def test_a_value_of_several_parts_is_refused_with_its_form(
    flag: str, value: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not with the name of a function of ours."""
    with pytest.raises(SystemExit):
        cli.main(["complete", "x", flag, value])

    assert f"argument {flag}: {complaint}\n" in capsys.readouterr().err


def test_a_refused_request_is_an_error_in_plain_words(driver: FakeDriver, address: str) -> None:
    """On stderr, with exit code 1 and no traceback."""
    driver.refusal = Overloaded("too many wait")

    done = odriver("complete", "x", "--connect", address)

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "odriver: too many wait\n")


def test_a_lost_daemon_is_an_error_in_plain_words(tmp_path: Path) -> None:
    """What had come until then was printed."""
    address, driver = f"ipc://{tmp_path}/o.sock", FakeDriver()
    with ExitStack() as daemon:
        daemon.enter_context(serving(address, driver))
        with running("complete", "hold", "--connect", address) as complete:
            driver.say(driver.take(), "so far", [1])
            assert complete.stdout is not None
            assert complete.stdout.read(6) == "so far"

            daemon.close()

            stdout, stderr = complete.communicate(timeout=PATIENCE)
    assert (complete.returncode, stdout, stderr) == (1, "", f"odriver: the daemon at {address} went away\n")


@pytest.mark.parametrize("command", [["complete", "x"], ["chat"], ["status"], ["status", "--json"]])
def test_without_a_daemon_every_command_says_what_to_do(command: list[str], address: str) -> None:
    """At once, and with exit code 1."""
    done = odriver(*command, "--connect", address)

    assert done.returncode == 1
    assert done.stderr == f"odriver: no daemon answers at {address}: start one with `odriver serve`\n"


def test_an_address_that_cannot_be_is_an_error_in_plain_words() -> None:
    """With the exit code of a configuration that cannot work, as for a daemon."""
    done = odriver("status", "--connect", "tcp://0.0.0.0:1")

    assert done.returncode == 78
    assert "odriver keys new" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["sing"],
        ["complete", "x", "--max-tokens", "many"],
        ["complete", "x", "--max", "5"],
        ["serve", "--dtype", "int3"],
        ["status", "now"],
        ["drain", "--timeout", "-1"],
        ["drain", "--timeout", "nan"],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Flags are not guessed from their beginnings, either."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)

    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: odriver")


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["complete", "x", "--temperture", "0"], "unrecognized arguments: --temperture 0; did you mean --temperature?"),
        (["complete", "Once", "upon", "a", "time"], "upon a time; a prompt of several words is one in quotes"),
        (["serve", "--max-num-seq=4"], "unrecognized arguments: --max-num-seq=4; did you mean --max-num-seqs?"),
        (["serve", "--max-num"], "did you mean --max-num-seqs or --max-num-batched-tokens?"),
        (["statsu"], "invalid choice: 'statsu'; did you mean status?"),
        (["keys", "revok", "a"], "invalid choice: 'revok'; did you mean revoke?"),
        (["log-level", "loud"], "invalid choice: 'loud' (choose from debug, info, warning, error)"),
        (["--verison"], "did you mean --version?"),
        (["serve", "--port", "8000"], "--port of vLLM is --http PORT here: without it HTTP is not served"),
        (
            ["serve", "--model=a/b", "-tp", "2"],
            "--model of vLLM is MODEL here: the model is named without a flag; -tp of "
            "vLLM is --tensor-parallel-size N here",
        ),
        (
            ["serve", "--swap-space", "4"],
            "; there is no --swap-space here: what preempted requests lose comes back from the "
            "prefix cache: see --host-cache-gib",
        ),
        (["serve", "--gpu_memory_utilization=0.9"], "--gpu_memory_utilization of vLLM is --hbm-utilization F here"),
        (["serve", "--no-enable-log-requests"], "--no-enable-log-requests of vLLM is --log-level warning here"),
        (
            ["serve", "--no-enable-chunked-prefill"],
            "there is no --no-enable-chunked-prefill here: prompts are always computed in chunks",
        ),
        (
            ["serve", "--structured-outputs-config.backend", "auto"],
            "there is no --structured-outputs-config.backend here: structured outputs are always on",
        ),
        (
            ["serve", "--quantization", "awq"],
            "invalid choice: 'awq' (choose from int8, w8a8, int4, none); a checkpoint that is in awq says so itself: "
            "leave this out",
        ),
        (
            ["serve", "--dtype", "half"],
            "(choose from auto, bfloat16, float32); a checkpoint that is in float16 is widened or rounded as it is "
            "loaded: leave this out",
        ),
        (["serve", "--max-model-len", "32k"], "argument --max-model-len: must be a whole number, not '32k'"),
        (["serve", "--hbm-utilization", "90%"], "argument --hbm-utilization: must be a number, not '90%'"),
        (["status", "--model", "a/b"], "--model of vLLM is --connect ADDR here: a daemon is chosen by its address"),
        (["keys", "new", "a", "--model", "b"], "unrecognized arguments: --model b"),
        (["gateway", "--swap-space", "4"], "unrecognized arguments: --swap-space 4"),
    ],
)
def test_what_is_near_a_misspelt_word_is_said(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a flag, a command or a value, in two lines and not with a list of all flags."""
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)

    lines = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2 and len(lines) == 2 and lines[1].endswith(near)


@pytest.mark.parametrize("place", range(3))
def test_flags_stand_before_between_or_behind_what_is_named(place: int) -> None:
    """Also where what comes last can be left out."""
    given = ["tales", "tales/of/today"]
    given[place:place] = ["--connect", "ipc:///tmp/x"]

    options = vars(cli.parser().parse_args(["adapters", "load", *given]))

    assert (options["name"], options["path"]) == ("tales", "tales/of/today")
    assert options["connect"] == "ipc:///tmp/x"


def test_odriver_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """And its version, where that is asked for."""
    assert cli.main([]) == 0
    assert "uninstall-service" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])

    assert exited.value.code == 0
    assert re.fullmatch(r"odriver \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_ctrl_c_aborts_the_completion(driver: FakeDriver, address: str) -> None:
    """The daemon stops working on it, and the exit code is 130."""
    with running("complete", "hold", "--connect", address) as complete:
        request = driver.take()
        driver.say(request, "so far", [1])
        assert complete.stdout is not None
        assert complete.stdout.read(6) == "so far"

        complete.send_signal(signal.SIGINT)

        stderr = complete.communicate(timeout=PATIENCE)[1]
    assert (complete.returncode, stderr) == (130, "")
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


def test_a_reader_that_has_enough_ends_the_completion(driver: FakeDriver, address: str) -> None:
    """As in ``odriver complete | head``: aborted, and no traceback."""
    with running("complete", "hold", "--connect", address) as complete:
        request = driver.take()
        assert complete.stdout is not None
        assert complete.stderr is not None
        complete.stdout.close()

        driver.say(request, "nobody reads this", [1])

        assert complete.stderr.read() == ""
    assert complete.returncode == 1
    assert driver.aborted.get(timeout=PATIENCE) == request.request_id


BUFFERED = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("command", ["status --json", "status", "complete x", "complete x --json"])
@pytest.mark.parametrize(
    "environment", [BUFFERED, {**BUFFERED, "PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"]
)
def test_a_full_disk_is_an_error_in_plain_words(command: str, environment: dict[str, str], address: str) -> None:
    """Whether the output is written at once or at the end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*ODRIVER, *command.split(), "--connect", address],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE,
        )  # fmt: skip

    assert (done.returncode, done.stderr) == (1, "odriver: the output cannot be written: No space left on device\n")


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("redirection", ["| :", ">&-", "2>&-"])
def test_nobody_reads_what_is_said_at_the_end(redirection: str, address: str) -> None:
    """No reader, or no stdout from the start: no traceback, and an exit code of its own."""
    command = f"{{ {shlex.join(ODRIVER)} status --json --connect {address}; echo $? >&3; }} {redirection}"
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1; {command}"], env=BUFFERED, capture_output=True, text=True, timeout=PATIENCE
    )

    assert done.stderr == "" and done.stdout.endswith("1\n" if redirection == "| :" else "0\n")


@pytest.mark.usefixtures("driver")
def test_status_as_json_is_the_dict(address: str) -> None:
    """For scripts."""
    status = json.loads(odriver("status", "--json", "--connect", address).stdout)

    assert status == {
        "model": "parrot",
        "clients": 0,
        "open_requests": 0,
        "state": "serving",
        "seconds_since_progress": 0.0,
        "weight_version": 1,
        "stages": {"prepare": 0.0, "execution": 0.0, "sockets": 0.0, "control": 0.0},
    }


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("command", [["status"], ["requests"], ["complete", "x"]])
def test_a_command_finds_the_daemon_by_its_configuration(command: list[str], address: str, tmp_path: Path) -> None:
    """With --config, as ``odriver serve`` has it."""
    (tmp_path / "o.toml").write_text(f"bind = '{address}'")

    assert odriver(*command, "--config", str(tmp_path / "o.toml")).returncode == 0


@pytest.mark.usefixtures("driver")
def test_status_is_a_table(address: str) -> None:
    """For people: a row for each number."""
    rows = odriver("status", "--connect", address).stdout.splitlines()

    assert any("open requests" in row and "0" in row for row in rows)
    assert any("model" in row and "parrot" in row for row in rows)


def test_a_chat_remembers_what_was_said(driver: FakeDriver, address: str) -> None:
    """Each question goes out with all that came before it, replies included; /exit leaves."""
    done = odriver("chat", "--connect", address, stdin="first question\n\nsecond one\n/exit\nnever asked\n")

    assert (done.returncode, done.stdout) == (0, "firstquestion\nsecondone\n")
    first = {"role": "user", "content": "first question"}
    reply = {"role": "assistant", "content": "firstquestion"}
    assert [request.messages for request in driver.submitted] == [
        [first],
        [first, reply, {"role": "user", "content": "second one"}],
    ]


def test_a_refused_turn_is_forgotten(driver: FakeDriver, address: str) -> None:
    """The conversation goes on without it."""
    driver.refusal = Overloaded("too many wait")
    with running("chat", "--connect", address) as chat:
        say(chat, "refused")
        assert chat.stderr is not None
        assert chat.stderr.readline() == "odriver: too many wait\n"
        driver.refusal = None

        stdout, stderr = chat.communicate("taken\n", timeout=PATIENCE)

    assert (chat.returncode, stdout, stderr) == (0, "taken\n", "")
    assert driver.submitted[1].messages == [{"role": "user", "content": "taken"}]


def test_a_chat_whose_last_message_is_refused_fails(driver: FakeDriver, address: str) -> None:
    """As when the model has no chat template: a script sees it by the exit code."""
    driver.refusal = Overloaded("too many wait")

    done = odriver("chat", "--connect", address, stdin="refused\n")

    assert (done.returncode, done.stdout, done.stderr) == (1, "", "odriver: too many wait\n")


def test_a_chat_has_a_system_message_and_the_parameters_of_complete(driver: FakeDriver, address: str) -> None:
    """The message may be changed, and the conversation begun anew; what is no command is sent or said to be none."""
    lines = "/system\nfirst\n/system Be a pirate.\nsecond\n/clear\n/etc/passwd is a file\n/nothing\n/help\n"
    flags = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "7", "--stop", "x")

    done = odriver("chat", "--connect", address, *flags, stdin=lines)

    assert done.returncode == 0
    assert done.stderr == "odriver: there is no /nothing: /help lists what there is\n"
    assert done.stdout.startswith("Be brief.\nfirst\nsecond\n/etc/passwdisafile\n/system TEXT")
    assert all(request.params == {"temperature": 0.0, "max_tokens": 7, "stop": ["x"]} for request in driver.submitted)
    asked = [[message["content"] for message in request.messages or []] for request in driver.submitted]
    assert asked == [
        ["Be brief.", "first"],
        ["Be a pirate.", "first", "first", "second"],
        ["Be a pirate.", "/etc/passwd is a file"],
    ]
    assert driver.submitted[0].messages is not None and driver.submitted[0].messages[0]["role"] == "system"


@pytest.mark.usefixtures("driver")
def test_how_long_a_reply_took_is_said_on_stderr(address: str) -> None:
    """Where it is asked for, beside a text that is as without it."""
    done = odriver("complete", "once upon", "--connect", address, "--timings")
    chat = odriver("chat", "--connect", address, "--timings", stdin="once upon\n")

    assert done.stdout == chat.stdout == "onceupon\n"
    assert done.stderr == chat.stderr == "[1 tokens of prompt (0 cached), 2 of reply]\n"


def test_ctrl_c_stops_a_reply_and_not_the_chat(driver: FakeDriver, address: str) -> None:
    """What was said so far stands, and the next turn knows it."""
    with running("chat", "--connect", address) as chat:
        say(chat, "hold forth")
        request = driver.take()
        driver.say(request, "Well,", [1])
        assert chat.stdout is not None
        assert chat.stdout.read(5) == "Well,"

        chat.send_signal(signal.SIGINT)

        assert driver.aborted.get(timeout=PATIENCE) == request.request_id
        assert chat.stdout.readline() == " [stopped]\n"
        assert chat.communicate("thanks anyway\n", timeout=PATIENCE)[0] == "thanksanyway\n"
    messages = driver.submitted[1].messages
    assert messages is not None
    assert [message["content"] for message in messages] == ["hold forth", "Well,", "thanks anyway"]


def say(chat: "subprocess.Popen[str]", text: str) -> None:
    """Type a line into a conversation."""
    assert chat.stdin is not None
    chat.stdin.write(text + "\n")
    chat.stdin.flush()


def read_until(leader: int, words: bytes) -> None:
    """What the terminal shows, up to these words."""
    shown = b""
    while words not in shown:
        shown += os.read(leader, 65536)


def test_a_conversation_outlives_its_daemon(tmp_path: Path) -> None:
    """On a terminal a lost reply is told, and the next daemon hears what was said before it."""
    address, driver = f"ipc://{tmp_path}/o.sock", FakeDriver()
    leader, follower = pty.openpty()
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        first.enter_context(serving(address, FakeDriver()))
        chat = stack.enter_context(
            subprocess.Popen(
                [*ODRIVER, "chat", "--connect", address],
                env=ENVIRONMENT,
                stdin=follower,
                stdout=follower,
                stderr=follower,
            )
        )
        stack.callback(chat.kill)
        read_until(leader, b"> ")
        os.write(leader, b"hello\n")
        read_until(leader, b"\nhello\r\n")
        first.close()
        os.write(leader, b"lost\n")
        read_until(leader, b"no daemon answers")

        with serving(address, driver):
            os.write(leader, b"again\n/exit\n")
            assert chat.wait(PATIENCE) == 0
    os.close(leader)
    os.close(follower)

    messages = driver.submitted[0].messages
    assert messages is not None
    assert [message["content"] for message in messages] == ["hello", "hello", "again"]


OBEYED = "a\x1b[31mX\x1b]0;pwned\x07\x9b2J\u202eb"
"""What a model may say, and a terminal would do."""


def on_terminal(*arguments: str, stdin: str = "") -> str:
    """What the command has a terminal show."""
    leader, follower = pty.openpty()
    with subprocess.Popen([*ODRIVER, *arguments], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=follower) as process:
        process.communicate(stdin.encode(), timeout=PATIENCE)
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    return shown.replace("\r\n", "\n")


@pytest.mark.usefixtures("driver")
def test_no_model_moves_a_terminals_cursor(address: str) -> None:
    """What it says that a terminal would obey is spelt out there; what is piped is what it said."""
    spelt = r"a\x1b[31mX\x1b]0;pwned\x07\x9b2J\u202eb"
    connect = ("--connect", address)

    assert on_terminal("complete", OBEYED, *connect) == f"{spelt}\n"
    assert on_terminal("complete", OBEYED, *connect, "--n", "2") == f"[0] {spelt}\n"
    assert on_terminal("chat", *connect, stdin=OBEYED) == f"{spelt}\n"
    assert odriver("complete", OBEYED, *connect).stdout == f"{OBEYED}\n"
    as_json = on_terminal("complete", OBEYED, *connect, "--json")
    assert json.loads(as_json)["choices"][0]["text"] == OBEYED
    assert not re.search("[\x1b\x07\x9b\u202e]", as_json)


def test_an_error_is_said_in_what_can_be_seen(driver: FakeDriver, address: str) -> None:
    """However long it is, and whatever is in it."""
    driver.refusal = Overloaded(f"{OBEYED}{'x' * 1_000_000}: come again")

    refused = odriver("complete", "x", "--connect", address)

    assert refused.stderr.startswith(r"odriver: a\x1b[31mX") and refused.stderr.endswith(": come again\n")
    assert "\x1b" not in refused.stderr and len(refused.stderr) < 1000


def test_a_models_name_is_no_markup(driver: FakeDriver, address: str) -> None:
    """Nor anything else that is shown in a table."""
    with serving(f"{address}2", driver, model="[bold]x[/bold]\x1b[2J [/nothing] :smile:"):
        shown = odriver("status", "--connect", f"{address}2")

    assert shown.returncode == 0, shown.stderr
    assert r"[bold]x[/bold]\x1b[2J [/nothing] :smile:" in shown.stdout
