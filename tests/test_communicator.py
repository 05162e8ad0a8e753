"""Ranks that meet, leave, die and hang, with a stand-in for NCCL."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mlaflash.distributed import NcclCommunicator, communicator
from mlaflash.errors import CommunicationError, InvalidArgumentError, MissingDependencyError

BUFFER = SimpleNamespace(data=SimpleNamespace(ptr=0), shape=(2, 16))
STREAM = SimpleNamespace(ptr=0)


class FakeError(RuntimeError):
    """As NcclError."""


class FakeComm:
    """A communicator whose collectives wait, as NCCL's do, until it is aborted."""

    hangs = False

    def __init__(self, num_ranks: int, unique_id: bytes, rank: int) -> None:
        self.given = (num_ranks, unique_id, rank)
        self.aborted, self.destroyed, self.calls = threading.Event(), False, []

    def allGather(self, *arguments: int) -> None:
        self.calls.append(("allGather", *arguments))
        if self.hangs and self.aborted.wait(20):
            raise FakeError("aborted")

    def send(self, *arguments: int) -> None:
        self.calls.append(("send", *arguments))

    def recv(self, *arguments: int) -> None:
        self.calls.append(("recv", *arguments))

    def abort(self) -> None:
        self.aborted.set()

    def destroy(self) -> None:
        self.destroyed = True


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(
        NcclCommunicator=FakeComm,
        NcclError=FakeError,
        NCCL_UINT8=1,
        get_unique_id=lambda: bytes(range(128)),
        groupStart=lambda: None,
        groupEnd=lambda: None,
    )
    monkeypatch.setattr(communicator, "_load_nccl", lambda: module)
    monkeypatch.setattr(communicator, "current_ordinal", lambda: 0)
    monkeypatch.setattr(communicator, "on_device", lambda ordinal: nullcontext())
    return module


@pytest.fixture
def address() -> tuple[str, int]:
    with communicator.socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return "127.0.0.1", port


def start(num_ranks: int, address: tuple[str, int], timeout: float = 5.0) -> list[NcclCommunicator]:
    """Make all ranks, each in a thread: they wait for each other."""
    made: dict[int, NcclCommunicator] = {}

    def make(rank: int) -> None:
        made[rank] = NcclCommunicator(num_ranks, rank, address, timeout=timeout)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[rank] for rank in range(num_ranks)]


def wait_for(condition: Callable[[], Any], seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def die(rank: NcclCommunicator) -> None:
    """End as a killed process does: it says nothing more, and its connections close."""
    rank._say = lambda _: None  # type: ignore[method-assign]
    for connection in rank._peers.values():
        connection.shutdown(communicator.socket.SHUT_RDWR)


def test_all_ranks_join_with_one_id_and_leave(address: tuple[str, int]) -> None:
    ranks = start(3, address)
    assert [rank._comm.given for rank in ranks] == [(3, bytes(range(128)), number) for number in range(3)]
    for rank in (ranks[1], ranks[0], ranks[2]):
        rank.close()
        rank.close()
    time.sleep(0.2)
    assert all(rank._comm.destroyed and not rank._comm.aborted.is_set() for rank in ranks)


def test_one_rank_needs_nobody() -> None:
    with NcclCommunicator(1, 0, ("no such host", 1)) as alone:
        alone.all_gather(SimpleNamespace(data=SimpleNamespace(ptr=64), shape=(1, 16)), STREAM)
        alone.all_to_all(BUFFER, SimpleNamespace(data=SimpleNamespace(ptr=256), shape=(2, 16)), STREAM)
        assert alone._comm.calls == [
            ("allGather", 64, 64, 16, 1, 0),
            ("send", 0, 16, 1, 0, 0),
            ("recv", 256, 16, 1, 0, 0),
        ]
    assert alone._comm.destroyed


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_is_an_error_for_all_others(dead: int, address: tuple[str, int]) -> None:
    ranks = start(3, address)
    die(ranks[dead])
    for rank in (0, 1, 2):
        if rank == dead:
            continue
        wait_for(ranks[rank]._comm.aborted.is_set)
        with pytest.raises(CommunicationError, match=f"rank {rank} of 3 cannot go on: rank \\d (is gone|said)"):
            ranks[rank].all_gather(BUFFER, STREAM)
        with pytest.raises(CommunicationError, match="Start all ranks again"):
            ranks[rank].close()


def test_ranks_hear_of_each_other_after_rank_0_left(address: tuple[str, int]) -> None:
    ranks = start(4, address)
    ranks[0].close()
    ranks[3].close()
    time.sleep(0.2)
    assert not any(rank._comm.aborted.is_set() for rank in ranks)
    die(ranks[2])
    wait_for(ranks[1]._comm.aborted.is_set)
    with pytest.raises(CommunicationError, match="rank 0 said that one is gone"):
        ranks[1].check()
    ranks[0].close()


def test_the_process_of_rank_0_may_end_once_it_left(address: tuple[str, int]) -> None:
    ranks = start(3, address)
    ranks[0].close()
    die(ranks[0])
    time.sleep(0.2)
    for rank in ranks[1:]:
        rank.close()
    assert not any(rank._comm.aborted.is_set() for rank in ranks)


def test_a_rank_that_gives_up_ends_it_for_all(address: tuple[str, int]) -> None:
    ranks = start(2, address)
    ranks[1].abort("run() raised")
    with pytest.raises(CommunicationError, match=r"rank 1 of 2 cannot go on: run\(\) raised"):
        ranks[1].all_to_all(BUFFER, BUFFER, STREAM)
    wait_for(ranks[0]._comm.aborted.is_set)


def test_what_a_collective_refuses_is_our_error(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise FakeError("invalid argument")

    ranks = start(2, address)
    monkeypatch.setattr(FakeComm, "send", refuse)
    with pytest.raises(CommunicationError, match="NCCL failed: invalid argument"):
        ranks[0].all_to_all(BUFFER, BUFFER, STREAM)
    wait_for(ranks[1]._comm.aborted.is_set)


def test_a_collective_in_which_the_host_waits_ends_when_a_rank_dies(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(2, address)
    monkeypatch.setattr(FakeComm, "hangs", True)
    threading.Timer(0.2, die, ranks[1:]).start()
    with pytest.raises(CommunicationError, match="rank 1 is gone"):
        ranks[0].all_gather(BUFFER, STREAM)


def test_a_collective_in_which_the_host_waits_ends_after_the_timeout(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = start(2, address, timeout=0.6)
    monkeypatch.setattr(FakeComm, "hangs", True)
    with pytest.raises(CommunicationError, match=r"NCCL waited for other ranks for 0\.6 s"):
        ranks[0].all_gather(BUFFER, STREAM)
    wait_for(ranks[1]._comm.aborted.is_set)


def test_an_error_in_the_block_is_one_for_all(address: tuple[str, int]) -> None:
    ranks = start(2, address)
    with pytest.raises(ZeroDivisionError), ranks[1]:
        _ = 1 / 0
    wait_for(ranks[0]._comm.aborted.is_set)
    with pytest.raises(CommunicationError, match="rank 1 said that one is gone"):
        ranks[0].check()


def test_a_rank_that_does_not_come_is_an_error(address: tuple[str, int], nccl: SimpleNamespace) -> None:
    with pytest.raises(CommunicationError, match=r"rank 0 of 2 did not meet ranks \[1\]"):
        NcclCommunicator(2, 0, address, timeout=0.2)
    with pytest.raises(CommunicationError, match=r"rank 1 of 2 did not meet ranks \[0\]"):
        NcclCommunicator(2, 1, address, timeout=0.2)

    def wait_for_ever(*_: Any) -> None:
        threading.Event().wait(5)

    nccl.NcclCommunicator = wait_for_ever
    with pytest.raises(CommunicationError, match=r"has not joined the 0 others within 0\.2 s"):
        NcclCommunicator(1, 0, timeout=0.2)


def test_what_nccl_refuses_is_our_error(nccl: SimpleNamespace) -> None:
    def refuse(*_: Any) -> None:
        raise FakeError("unhandled cuda error")

    nccl.NcclCommunicator = refuse
    with pytest.raises(CommunicationError, match="unhandled cuda error"):
        NcclCommunicator(1, 0)


@pytest.mark.parametrize("arguments", [(0, 0), (2, 2), (2, -1)])
def test_ranks_that_do_not_exist_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="rank"):
        NcclCommunicator(*arguments)


def test_without_nccl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    module = pytest.importorskip("cupy.cuda")
    monkeypatch.setattr(module, "nccl", SimpleNamespace(available=False), raising=False)
    with pytest.raises(MissingDependencyError, match=r"mlaflash\[nccl12\]"):
        NcclCommunicator(1, 0)
