"""The honest clients, a process of their own: streams whose text is known, and small requests, one after the other."""

import json
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException

from msgspec import Struct

from ipc.client import Client
from ipc.errors import OdriverError
from scripts.benchmarks.processes.child import answer_all

STREAMS = {"Once upon a time": 200, "The king and the": 150}
"""Prompts, and tokens of each: greedy, and so the same each time."""
SMALL, SMALL_TOKENS = "A small", 8
PAUSE = 0.02
FEWEST = 5
"""Small requests, however long they take."""


class Report(Struct):
    """What became of honest clients for a while."""

    latencies: list[float]
    """Of small requests, in seconds."""
    streams: int
    """Whole ones, with the text that they were to have."""
    wrong: list[str]
    """What was not as it should be."""


class Honest:
    """Clients of one daemon, and of a gateway if there is a URL (HOST:PORT): small requests then go there."""

    def __init__(self, address: str, key: str, url: str) -> None:
        self._url = url
        self._client = Client(address, resume=True, resume_timeout=10.0, key=key or None)
        self._expected = {prompt: self._stream(prompt) for prompt in STREAMS}
        self._small = self._ask()

    def run(self, seconds: float) -> Report:
        """For so long, with a stream of each prompt at least, and until what is open by then has ended."""
        report = Report([], 0, [])
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=self._listen, args=(prompt, until, report)) for prompt in STREAMS]
        for thread in threads:
            thread.start()
        while time.monotonic() < until or (len(report.latencies) < FEWEST and len(report.wrong) < FEWEST):
            began = time.monotonic()
            try:
                text = self._ask()
            except (OdriverError, OSError, HTTPException) as error:
                report.wrong.append(f"a small request: {error}")
            else:
                report.latencies.append(time.monotonic() - began)
                if text != self._small:
                    report.wrong.append(f"a small request was answered {text!r}, and not {self._small!r}")
            time.sleep(PAUSE)
        for thread in threads:
            thread.join()
        return report

    def _listen(self, prompt: str, until: float, report: Report) -> None:
        while True:
            try:
                text = self._stream(prompt)
            except OdriverError as error:
                report.wrong.append(f"a stream: {error}")
                time.sleep(PAUSE)
            else:
                if text == self._expected[prompt]:
                    report.streams += 1
                else:
                    report.wrong.append(f"a stream was {text!r}, and not {self._expected[prompt]!r}")
            if time.monotonic() >= until:
                return

    def _stream(self, prompt: str) -> str:
        pieces = self._client.generate(prompt, max_tokens=STREAMS[prompt], temperature=0, ignore_eos=True)
        return "".join(piece.text for piece in pieces)

    def _ask(self) -> str:
        if not self._url:
            return self._client.complete(SMALL, max_tokens=SMALL_TOKENS, temperature=0, ignore_eos=True).text
        connection = HTTPConnection(self._url, timeout=30)
        body = {"prompt": SMALL, "max_tokens": SMALL_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in answer:
            raise OdriverError(answer["error"]["message"])
        return str(answer["choices"][0]["text"])


def main() -> None:
    """Serve as a child: seconds a line, answered by the Report of them."""
    honest = Honest(*sys.argv[1:4])
    answer_all(honest.run)


if __name__ == "__main__":
    main()
