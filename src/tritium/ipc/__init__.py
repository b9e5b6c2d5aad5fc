"""Process edges: typed messages over a private zmq channel, and child processes that cannot outlive us.

A channel is one zmq PAIR socket in a folder that only this user can enter; every start of a child gets a new
one, so a late message of a dead child reaches nobody. Messages are msgspec structs, never pickle.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

Received = TypeVar("Received")

PR_SET_PDEATHSIG = 1


class Link(Generic[Received]):
    """One end of a channel, for a process without an event loop.

    Args:
        address: ``ipc://`` address of the channel.
        receives: the type (or union of tagged structs) of the messages that arrive here.
    """

    def __init__(self, address: str, receives: Any) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        _open(self._socket)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Hands a message over; never blocks."""
        self._socket.send(self._encoder.encode(message))

    def receive(self, timeout_ms: int) -> Received | None:
        """The next message, or None when none came in ``timeout_ms`` milliseconds (0: do not wait)."""
        if not self._socket.poll(timeout_ms):
            return None
        return self._decoder.decode(self._socket.recv())

    def close(self) -> None:
        """Gives up the channel after what was sent has left, or after a second."""
        self._socket.close(linger=1000)
        self._context.term()


class AsyncLink(Generic[Received]):
    """The other end of a channel, in an event loop; it owns the folder of the address."""

    def __init__(self, receives: Any) -> None:
        # A unix socket's path is limited to about 107 bytes: the folder must be short.
        parent = tempfile.gettempdir()
        self._folder = Path(tempfile.mkdtemp(prefix="tritium-", dir="/tmp" if len(parent.encode()) > 80 else parent))
        self._named = True
        self.address = f"ipc://{self._folder}/link"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _open(self._socket)
        self._socket.bind(self.address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Hands a message over; never blocks (the queue has no limit, the requests have)."""
        future: Any = self._socket.send(self._encoder.encode(message))
        future.add_done_callback(_read_exception)

    async def receive(self) -> Received:
        """The next message."""
        data = await self._socket.recv()
        if self._named:
            # Both ends are connected, nobody needs the name any more; so nothing is left when we are killed.
            self._named = False
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._decoder.decode(data)

    def close(self) -> None:
        """Gives up the channel and removes its folder."""
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)


def _open(socket: Any) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)


def _read_exception(future: asyncio.Future[Any]) -> None:
    # A send to a child that has just died is cancelled with its socket; the death itself is reported elsewhere.
    if not future.cancelled():
        future.exception()


async def start_child(
    module: str, arguments: list[str], env: Mapping[str, str], pass_fds: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    """Starts ``python -m module``; its output goes where ours goes.

    Args:
        module: entry point, as a string, so that no import crosses the edge.
        env: variables to set on top of ours.
        pass_fds: descriptors that the child keeps, under the same numbers.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        env={**os.environ, **env},
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=pass_fds,
        # A session of its own: Ctrl-C in the terminal is for us, who then end the child in good order.
        start_new_session=True,
    )


def follow_parent(parent: int) -> None:
    """Called first in a child: it dies with its parent and leaves Ctrl-C to it.

    Args:
        parent: the process id that started us; if it is gone already, so are we.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)
