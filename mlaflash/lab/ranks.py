"""Start the ranks of one computation as processes of this machine, and end them whatever happens."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

from mlaflash.errors import CommunicationError

_GRACE_S = 15.0  # for the others to notice that a rank is gone


def free_address() -> tuple[str, int]:
    """Return this host, and a port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return "127.0.0.1", server.getsockname()[1]


def run_ranks(
    work: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout: float = 600.0,
    required: Sequence[int] | None = None,
) -> list[Any]:
    """Call ``work(rank, *arguments)`` in a process for each rank.

    Parameters
    ----------
    work : callable
        A function of a module, as its processes import it. What it returns, and its arguments, can be pickled.
    num_ranks : int
    *arguments
    timeout : float
        Seconds; what runs on is then killed.
    required : sequence of int, optional
        Ranks that must return something; by default all.

    Returns
    -------
    list
        What each rank returned; None for one that did not and need not.

    Raises
    ------
    CommunicationError
        A rank ended without a result, or did not end in time. What it raised stands in its traceback on stderr.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    pending: dict[Any, int] = {}
    deadline = time.monotonic() + timeout
    found: dict[int, Any] = {}
    needed = range(num_ranks) if required is None else required
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(sender, work, rank, arguments), daemon=True)
            processes.append(process)
            pending[receiver] = rank
            process.start()
            sender.close()  # the process has it: its end is seen
        while pending and time.monotonic() < deadline:
            readable: list[Any] = connection.wait(list(pending), max(deadline - time.monotonic(), 0))
            for ready in readable:
                rank = pending.pop(ready)
                try:
                    found[rank] = ready.recv()
                except EOFError:
                    if rank in needed:
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
                ready.close()
    finally:
        for process in processes:
            if process.pid is not None:
                process.join(0 if pending else _GRACE_S)
                process.kill()
                process.join()
        for receiver in pending:
            receiver.close()
    missing = [rank for rank in needed if rank not in found]
    if missing:
        statuses = ", ".join(f"rank {rank}: exit status {processes[rank].exitcode}" for rank in missing)
        raise CommunicationError(
            f"of {num_ranks} ranks, {len(missing)} ended without a result within {timeout:g} s ({statuses}). See their "
            "tracebacks above."
        )
    return [found.get(rank) for rank in range(num_ranks)]


def _run(sender: Any, work: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> None:
    sender.send(work(rank, *arguments))
    sender.close()
