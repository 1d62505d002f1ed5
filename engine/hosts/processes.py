"""The processes of an engine, one per host. Process 0 plans; all execute the same steps in order.

``jax.distributed`` joins their devices. Process 0 sends commands by a TCP connection to each
process, which takes 15 us a step where a broadcast between devices takes milliseconds (two
processes on two cores). The connections also detect failures: the kernel closes those of a
process that dies, and a host that does not answer is given up after about HOST_PATIENCE seconds.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait

import jax

from engine.adapters.adapter import Adapter
from engine.devices.device_errors import acquire_devices
from engine.errors import ConfigurationError, HostsError
from engine.exit_codes import FAULT
from engine.hosts.agreement import broadcast, check_facts_alike
from engine.hosts.hosts import Hosts
from engine.hosts.other_processes import StageHere
from engine.hosts.remote_weights import RemoteProcess, Staged
from engine.live.staging import StagedWeights
from engine.live.weight_source import WeightSource
from engine.models.weights.sources.tensor_source import TensorSource
from engine.step.commands import (
    Answer,
    AskToStop,
    Command,
    DiscardWeights,
    Joined,
    Leave,
    Left,
    decode_answer,
    decode_command,
    encode,
)

logger = logging.getLogger(__name__)

HOST_PATIENCE = 20
"""Seconds without a sign of life after which a host counts as dead."""
LEAVING_PATIENCE = 1.0
"""Seconds that the other processes have to end after Leave."""
TOKEN_BYTES = 16


class Leader:
    """Process 0's connections. Any thread may ``tell``, ``stage`` and ``send_adapter``; a thread of
    its own runs the callbacks."""

    def __init__(
        self,
        others: Mapping[int, Connection],
        remote: Mapping[int, RemoteProcess],
        lost: Callable[[int, str], None],
        asked_to_stop: Callable[[str, float], None],
    ) -> None:
        self._others = others
        self._remote = remote
        self._staging = threading.Lock()
        self._lost = lost
        self._asked_to_stop = asked_to_stop
        self._turn = threading.Lock()  # Leave is sent by another thread
        self._leaving = False
        self._first: Left | None = None
        """What the first process that has gone said."""
        self._thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        self._thread.start()

    def tell(self, command: Command) -> None:
        """Send a command to every other process. Raises HostsError if one has gone."""
        frame = encode(command)
        with self._turn:
            for process_id, connection in self._others.items():
                try:
                    connection.send_bytes(frame)
                except OSError as error:
                    raise HostsError(f"process {process_id} has gone ({error})") from error

    def stage(self, number: int, source: WeightSource, tensors: TensorSource, stage_here: StageHere) -> StagedWeights:
        """As OtherProcesses has it. Raises HostsError, too, if a process has gone."""
        with self._staging, ThreadPoolExecutor(len(self._remote), "stage weights") as pool:
            answers = {
                process_id: pool.submit(remote.stage, number, source, tensors)
                for process_id, remote in self._remote.items()
            }
            try:
                staged = stage_here()
                for process_id, answer in answers.items():
                    _check_staged(process_id, answer.result(), staged)
            except BaseException:
                futures.wait(answers.values())
                self.tell(DiscardWeights(number))
                raise
            return staged

    def send_adapter(self, adapter: Adapter) -> None:
        """As OtherProcesses has it. Raises HostsError if a process has gone."""
        with self._staging, ThreadPoolExecutor(len(self._remote), "send adapter") as pool:
            sent = [pool.submit(remote.send_adapter, adapter.uid, adapter.arrays) for remote in self._remote.values()]
            for each in sent:
                each.result()

    def leave(self, code: int, why: str) -> None:
        """End the other processes with this exit code, and wait briefly for them; with that of a process that has gone
        before, if one has."""
        self._leaving = True
        frame = encode(Leave(code, why) if self._first is None else Leave(self._first.code, self._first.why))
        if self._turn.acquire(timeout=LEAVING_PATIENCE):  # unless a send is blocked
            for connection in self._others.values():
                try:
                    connection.send_bytes(frame)
                except OSError:
                    logger.debug("a process has gone before it was told to")
            self._turn.release()
        self._thread.join(LEAVING_PATIENCE)

    def _watch(self) -> None:
        there = {connection: process_id for process_id, connection in self._others.items()}
        while there:
            for connection in wait(list(there)):
                assert isinstance(connection, Connection)
                answer = _hear(connection)
                if answer is None:
                    self._heed(there.pop(connection), Left(FAULT, "it has died, or its host has"))
                else:
                    self._heed(there[connection], answer)

    def _heed(self, process_id: int, answer: Answer) -> None:
        match answer:
            case Left(code=code, why=why) if not self._leaving:
                self._leaving = True  # report only the first
                self._first = Left(code, f"process {process_id} has gone: {why}")
                logger.error("process %d has gone: %s", process_id, why)
                self._lost(code, self._first.why)
            case AskToStop(why=why, seconds=seconds):
                self._asked_to_stop(f"process {process_id}: {why}", seconds)


class Member:
    """Another process's connections to process 0; ``weights`` is for ``stage_as_told``."""

    def __init__(self, connection: Connection, weights: Connection) -> None:
        self._connection = connection
        self.weights = weights

    def listen(self) -> Command:
        """Wait for the next command; Leave if process 0 has gone."""
        try:
            return decode_command(self._connection.recv_bytes())
        except (EOFError, OSError):
            return Leave(FAULT, "process 0 has gone: it has died, or its host has")

    def say(self, answer: Answer) -> None:
        """Send an answer to process 0, if it is still there."""
        try:
            self._connection.send_bytes(encode(answer))
        except OSError as error:
            logger.warning("process 0 does not hear %s: %s", answer, error)


def lead(
    hosts: Hosts,
    facts: Mapping[str, str],
    lost: Callable[[int, str], None],
    asked_to_stop: Callable[[str, float], None],
) -> Leader:
    """Be process 0; returns when all others are connected. Raises as ``_join`` does.

    ``lost`` gets the exit code with which a process has ended, and why.
    """
    _join(hosts, facts)
    token = secrets.token_bytes(TOKEN_BYTES)
    others: dict[int, Connection] = {}
    remote: dict[int, RemoteProcess] = {}
    with Listener(("", 0), backlog=2 * hosts.num_processes, authkey=token) as listener:
        broadcast((listener.address[1], *token))
        while len(others) + len(remote) < 2 * (hosts.num_processes - 1):
            try:
                connection = listener.accept()
            except (AuthenticationError, EOFError, OSError) as stranger:
                logger.warning("somebody else came to the port of the other processes: %s", stranger)
                continue
            joined = _hear(connection)
            assert isinstance(joined, Joined)
            _keep_alive(connection)
            if joined.stages:
                remote[joined.process_id] = RemoteProcess(joined.process_id, connection)
            else:
                others[joined.process_id] = connection
    logger.info("process 0 of %d: all others are there", hosts.num_processes)
    return Leader(others, remote, lost, asked_to_stop)


def follow(hosts: Hosts, facts: Mapping[str, str]) -> Member:
    """Be another process; returns when process 0 is connected. Raises as ``_join`` does."""
    _join(hosts, facts)
    port, *token = broadcast((0,) * (1 + TOKEN_BYTES))
    address = hosts.coordinator_address.rpartition(":")[0], port
    connections = []
    try:
        for stages in (False, True):
            connections.append(_keep_alive(Client(address, authkey=bytes(token))))
            connections[-1].send_bytes(encode(Joined(hosts.process_id, stages)))
    except OSError as error:
        raise HostsError(f"process 0 cannot be reached at {address[0]}:{port} ({error})") from error
    return Member(*connections)


def _check_staged(process_id: int, theirs: Staged, ours: StagedWeights) -> None:
    """Raises ConfigurationError unless a process has staged what process 0 has."""
    if theirs.refusal:
        raise ConfigurationError(f"process {process_id}: {theirs.refusal}")
    if theirs.fingerprint != ours.fingerprint:
        raise ConfigurationError(
            f"process {process_id} finds other weights in {ours.origin} than process 0: give all hosts the same"
        )


def _join(hosts: Hosts, facts: Mapping[str, str]) -> None:
    """Join the devices of all processes. Raises DevicesUnavailable, HostsError if a process is
    missing, and ConfigurationError if their ``facts``, values by name, differ.
    """
    logger.info(
        "process %d of %d: waiting for the others at %s",
        hosts.process_id, hosts.num_processes, hosts.coordinator_address,
    )  # fmt: skip
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would catch our SIGTERM
    background = ThreadPoolExecutor(1)  # so that signals are handled meanwhile
    try:
        background.submit(
            jax.distributed.initialize, hosts.coordinator_address, hosts.num_processes, hosts.process_id
        ).result()
    except RuntimeError as error:
        words = str(error).partition("\n")[0]
        raise HostsError(
            f"the {hosts.num_processes} processes did not find each other at {hosts.coordinator_address} ({words})"
        ) from error
    finally:
        background.shutdown(wait=False)
    acquire_devices()
    check_facts_alike(facts)


def _hear(connection: Connection) -> Answer | None:
    """The next answer; None if the connection is closed."""
    try:
        return decode_answer(connection.recv_bytes())
    except (EOFError, OSError):
        return None


def _keep_alive(connection: Connection) -> Connection:
    """Send without delay, and detect a host that does not answer."""
    with socket.socket(fileno=os.dup(connection.fileno())) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, HOST_PATIENCE // 2)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, HOST_PATIENCE // 4)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * HOST_PATIENCE)
    return connection
