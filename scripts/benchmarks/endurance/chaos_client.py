"""A client that is there to be killed: threads that share a Client and stream, and keep what is whole in a file.

Its arguments are the daemon's address, a file of plain lines as ``odriver batch`` has them, and where results go.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ipc.batch.batch_lines import Line, read_lines
from ipc.batch.batch_output import SUCCESS, BatchOutput
from ipc.client import Client
from ipc.openai.translation import body_of
from ipc.wire.completion import whole

THREADS = 16
PATIENCE = 600.0


def main() -> None:
    """Ask what has no result yet."""
    address, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with (
        BatchOutput(target) as output,
        Client(address, PATIENCE, resume=True, resume_timeout=PATIENCE) as client,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        missing = [line for line in read_lines(source) if line.custom_id not in output.results]
        for result in threads.map(lambda line: _result(client, line), missing):
            output.append(result)


def _result(client: Client, line: Line) -> dict[str, object]:
    model = client.welcome.model
    asked = line.question(model)
    body = body_of(whole(list(client.generate(asked.prompt, **asked.params))), asked, model, line.custom_id)
    return {"custom_id": line.custom_id, "response": {"status_code": SUCCESS, "body": body}}


if __name__ == "__main__":
    main()
