"""Ranks that exchange arrays: what a sharded plan asks of them, and how NCCL does it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from mlaflash.checks import finite, integer
from mlaflash.device import current_ordinal, on_device
from mlaflash.errors import CommunicationError, InvalidArgumentError, MissingDependencyError

_BYE, _FAILED = b".", b"!"
_POLL_S = 0.05
_ID_BYTES = 128


class Communicator(Protocol):
    """Ranks of one computation, each with a process and a device of its own.

    Attributes
    ----------
    num_ranks, rank : int
    """

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    @property
    def rank(self) -> int:
        """Which one this is."""

    def all_gather(self, buffer: Any, stream: Any) -> None:
        """Fill the rows of a buffer (N, bytes), uint8 and contiguous, with what each rank has in its own one."""

    def all_to_all(self, send: Any, receive: Any, stream: Any) -> None:
        """Give each rank its row of `send` (N, bytes); row r of `receive` is what rank r has for this one."""

    def abort(self, reason: str) -> None:
        """Give up: no rank waits for another any more, and each later call raises."""


class NcclCommunicator:
    """Ranks that exchange arrays by NCCL, and learn of it when one of them dies.

    Each rank is a process with a GPU of its own, the current one when this is made. They meet at an address of rank 0
    and stay connected: if a process ends without `close`, or raises in the ``with`` block, the others stop waiting for
    it at once. Collectives that are in flight then end, in graphs too, what they were to write is undefined, and every
    later call raises. A rank that lives and does not come is noticed by `synchronize`, and where the host itself waits.
    They hear of each other through the process of rank 0, also after its `close`, for as long as it runs.

    Parameters
    ----------
    num_ranks, rank : int
    address : tuple of str and int
        Host and port where rank 0 listens. Processes that can reach it can join: take a host that others cannot.
    timeout : float
        Seconds to wait for other ranks: here, in `synchronize`, and where NCCL blocks the host.

    Attributes
    ----------
    num_ranks, rank : int
    timeout : float

    Raises
    ------
    InvalidArgumentError
        A value that is not allowed.
    CommunicationError
        A rank did not come, or left.
    MissingDependencyError, NoDeviceError
        NCCL, or a GPU, is missing here.

    Notes
    -----
    In a CUDA graph: run the same call once before the capture, which lets NCCL connect. All ranks replay in the same
    order. Delete the graphs before `close`: NCCL waits for them.
    """

    def __init__(
        self, num_ranks: int, rank: int, address: tuple[str, int] = ("127.0.0.1", 29533), *, timeout: float = 30.0
    ) -> None:
        self.num_ranks, self.rank = integer("num_ranks", num_ranks, 1), integer("rank", rank, 0)
        self.timeout = finite("timeout", timeout)
        if self.rank >= self.num_ranks or self.timeout <= 0:
            raise InvalidArgumentError(
                f"rank is {rank} of {num_ranks} and timeout {timeout}; rank must be below num_ranks, timeout positive."
            )
        self._nccl = _load_nccl()
        self._ordinal = current_ordinal()
        self._comm: Any = None
        self._failure = ""
        self._waits_since: float | None = None  # when the host began to wait for NCCL
        self._is_closed = False
        self._lock = threading.Lock()
        deadline = time.monotonic() + self.timeout
        self._peers, unique_id = _meet(self.num_ranks, self.rank, address, deadline, self._nccl.get_unique_id)
        threading.Thread(target=self._watch, name="mlaflash-ranks", daemon=True).start()
        try:
            self._bounded(lambda: self._join(unique_id), deadline, "joined")
        except BaseException:
            self._fail("it could not join")
            raise

    def _join(self, unique_id: bytes) -> None:
        with on_device(self._ordinal):
            self._comm = self._nccl.NcclCommunicator(self.num_ranks, unique_id, self.rank)

    def _bounded(self, work: Callable[[], None], deadline: float, what: str) -> None:
        """Do what may wait for other ranks, in a thread that can be left behind."""
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                work()
            except RuntimeError as error:  # NcclError is one
                errors.append(error)

        thread = threading.Thread(target=run, name=f"mlaflash-{what}", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < deadline and not self._failure:
            thread.join(_POLL_S)
        self.check()
        if errors:
            raise CommunicationError(f"rank {self.rank} has not {what} the others: {errors[0]}") from errors[0]
        if thread.is_alive():
            raise CommunicationError(
                f"rank {self.rank} has not {what} the {self.num_ranks - 1} others within {self.timeout:g} s. See "
                "whether all of them are there, each with a GPU of its own, or give a longer timeout."
            )

    # --- collectives -------------------------------------------------------------------------------------------------

    def all_gather(self, buffer: Any, stream: Any) -> None:
        """Fill the rows of a buffer with what each rank has in its own one.

        Parameters
        ----------
        buffer : cupy.ndarray, shape (N, bytes), uint8, C-contiguous
        stream : cupy.cuda.Stream
            Where the work runs; it may be captured.

        Raises
        ------
        CommunicationError
            A rank is gone, or NCCL fails.
        """
        size, ptr = buffer.shape[1], buffer.data.ptr
        self._begin()
        try:
            self._comm.allGather(ptr + self.rank * size, ptr, size, self._nccl.NCCL_UINT8, stream.ptr)
        except self._nccl.NcclError as error:
            self._raise(error)
        finally:
            self._waits_since = None

    def all_to_all(self, send: Any, receive: Any, stream: Any) -> None:
        """Give each rank its row of `send`, and fill row r of `receive` with what rank r has for this one.

        Parameters
        ----------
        send, receive : cupy.ndarray, shape (N, bytes), uint8, C-contiguous
        stream : cupy.cuda.Stream
            Where the work runs; it may be captured.

        Raises
        ------
        CommunicationError
            A rank is gone, or NCCL fails.
        """
        nccl, comm, handle = self._nccl, self._comm, stream.ptr
        size, kind = send.shape[1], nccl.NCCL_UINT8
        source, target = send.data.ptr, receive.data.ptr
        self._begin()
        try:
            nccl.groupStart()
            try:
                for peer in range(self.num_ranks):
                    comm.send(source + peer * size, size, kind, peer, handle)
                    comm.recv(target + peer * size, size, kind, peer, handle)
            finally:
                nccl.groupEnd()
        except nccl.NcclError as error:
            self._raise(error)
        finally:
            self._waits_since = None

    def _begin(self) -> None:
        """Call NCCL from here on, which may make the host wait for other ranks."""
        if self._failure:
            self.check()
        self._waits_since = time.monotonic()

    def _raise(self, error: RuntimeError) -> None:
        self._fail(f"NCCL failed: {error}")
        self.check()

    # --- failures ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a rank is known to be gone; does not look at the device.

        Raises
        ------
        CommunicationError
            It is, and nothing that was exchanged since can be trusted.
        """
        if self._failure:
            raise CommunicationError(
                f"rank {self.rank} of {self.num_ranks} cannot go on: {self._failure}. Results of the steps in flight "
                "are undefined. Start all ranks again, with a new communicator."
            )

    def abort(self, reason: str) -> None:
        """Give up: no rank waits for another any more, and each later call raises.

        Parameters
        ----------
        reason : str
            What this rank's later errors say.
        """
        self._fail(reason)

    def synchronize(self, stream: Any = None, timeout: float | None = None) -> None:
        """Wait for a stream, but not for ever.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            By default CuPy's current one.
        timeout : float, optional
            Seconds; by default that of the communicator.

        Raises
        ------
        CommunicationError
            A rank is gone, or the work did not end in time; it is given up then.
        """
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream() if stream is None else stream)
        limit = self.timeout if timeout is None else finite("timeout", timeout)
        deadline = time.monotonic() + limit
        while not event.done:
            self.check()
            if time.monotonic() > deadline:
                self._fail(f"a step did not end within {limit:g} s")
            time.sleep(5e-5)
        self.check()

    def _watch(self) -> None:
        """Notice, in a thread of its own, when another rank leaves or the host waits for too long."""
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            leaving = set()
            # Rank 0, through which the others hear of each other, stays for them after its own close.
            while not self._failure and not (self._is_closed and (self.rank or not selector.get_map())):
                ready = selector.select(_POLL_S)
                if not ready:
                    time.sleep(_POLL_S)  # a selector without connections does not wait
                for key, _ in ready:
                    try:
                        said = key.fileobj.recv(1)  # type: ignore[union-attr]
                    except OSError:
                        said = b""
                    if said == _BYE:
                        leaving.add(key.data)
                        continue
                    selector.unregister(key.fileobj)
                    if not said and key.data in leaving:
                        continue
                    if self._is_closed:
                        self._say(_FAILED)
                    else:
                        self._fail(f"rank {key.data} is gone" if not said else f"rank {key.data} said that one is gone")
                since = self._waits_since
                if since is not None and time.monotonic() - since > self.timeout:
                    self._fail(f"NCCL waited for other ranks for {self.timeout:g} s")
        for connection in self._peers.values():
            connection.close()

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._failure or self._is_closed:
                return
            self._failure = reason
        self._say(_FAILED)
        comm = self._comm
        if comm is not None:
            # Its kernels stop first, then it waits for graphs that hold it: in a thread that can be left behind.
            threading.Thread(target=comm.abort, name="mlaflash-abort", daemon=True).start()

    def _say(self, word: bytes) -> None:
        for connection in self._peers.values():
            with contextlib.suppress(OSError):
                connection.sendall(word)

    def close(self) -> None:
        """Leave in good order, once all work is done. May be called again.

        Raises
        ------
        CommunicationError
            A rank is gone, or a CUDA graph still holds the communicator.
        """
        if self._is_closed:
            return
        try:
            self.check()
            self._say(_BYE)
            self._bounded(self._comm.destroy, time.monotonic() + self.timeout, "left")
        finally:
            self._is_closed = True

    def __enter__(self) -> NcclCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._fail("it raised an error")
        self._is_closed = True


def _load_nccl() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(
            f"NCCL is used through CuPy, which is missing: {error}. Install mlaflash[cuda12] or mlaflash[cuda13]."
        ) from error
    if not nccl.available:
        raise MissingDependencyError(
            "CuPy finds no NCCL (libnccl.so.2). Install mlaflash[nccl12] beside CuPy for CUDA 12, mlaflash[nccl13] "
            "beside that for CUDA 13."
        )
    return nccl


def _meet(
    num_ranks: int, rank: int, address: tuple[str, int], deadline: float, make_id: Callable[[], bytes]
) -> tuple[dict[int, socket.socket], bytes]:
    """Connect every rank to rank 0, which tells them the id that they share."""
    where = f"{address[0]}:{address[1]}"
    peers: dict[int, socket.socket] = {}
    try:
        if rank == 0:
            unique_id = make_id()
            if num_ranks == 1:
                return peers, unique_id
            with socket.create_server(address) as server:
                while len(peers) + 1 < num_ranks:
                    server.settimeout(_left(deadline))
                    connection, _ = server.accept()
                    connection.settimeout(_left(deadline))
                    peers[int.from_bytes(_receive(connection, 4), "big")] = connection
            for connection in peers.values():
                connection.sendall(unique_id)
        else:
            peers[0] = _connect(address, deadline)
            peers[0].sendall(rank.to_bytes(4, "big"))
            unique_id = _receive(peers[0], _ID_BYTES)
    except OSError as error:
        for connection in peers.values():
            connection.close()
        missing = sorted(set(range(num_ranks)) - {rank, *peers}) if rank == 0 else [0]
        raise CommunicationError(
            f"rank {rank} of {num_ranks} did not meet ranks {missing} at {where}: {error or 'they did not come'}. See "
            "whether they run, and whether all give the same address and num_ranks, each a rank of its own."
        ) from error
    for connection in peers.values():
        connection.settimeout(None)
    return peers, unique_id


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connect to rank 0, which may start later."""
    while True:
        try:
            return socket.create_connection(address, _left(deadline))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other side closed the connection")
        data += piece
    return data
