"""Claims of orders.py, with ranks in this process, and in others that are really stopped and killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcached_core import orders
from kvcached_core.errors import ConfigError, OrderError
from kvcached_core.orders import (
    MAX_PATH_BYTES,
    TICK_SECONDS,
    Ack,
    Bye,
    Hello,
    Link,
    LocalLink,
    Map,
    OrderServer,
    Report,
    Retire,
    SocketLink,
    Standing,
    Undo,
    Welcome,
)

from tests.core.echo_rank import BROKEN, EchoRank

RANGES = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=3).map(tuple)
NUMBER = st.integers(0, 1 << 62)
MESSAGES = st.one_of(
    st.builds(Hello, NUMBER, st.none() | NUMBER),
    st.builds(Welcome, NUMBER, NUMBER, st.text(), st.text(), NUMBER, NUMBER, NUMBER, NUMBER),
    st.builds(Map, NUMBER, RANGES),
    st.builds(Retire, NUMBER, RANGES, NUMBER),
    st.builds(Undo, NUMBER, RANGES),
    st.builds(Report, NUMBER, NUMBER, NUMBER, NUMBER, busy=st.booleans()),
    st.builds(Ack, NUMBER, st.text(), st.booleans()),
    st.builds(Standing, NUMBER, NUMBER, NUMBER, st.booleans()),
    st.just(Bye()),
)


@given(message=MESSAGES)
def test_every_message_survives_the_channel(message: orders.ToRank | orders.FromRank) -> None:
    assert orders.decode(orders.encode(message)) == message


@pytest.mark.parametrize(
    "datagram",
    [b"", b"{", b"[]", b"3", b'{"kind": "Nothing"}', b'{"seq": 1}', b'{"kind": "Ack", "sequence": 1}', b"\xff"],
)
def test_what_is_no_message_is_refused(datagram: bytes) -> None:
    with pytest.raises(OrderError, match="not an order"):
        orders.decode(datagram)


# --- one process ------------------------------------------------------------------------------------------------------


def test_a_local_link_calls_the_rank_directly() -> None:
    rank = EchoRank()
    link = LocalLink(rank)
    assert not _readable(link)
    link.send(Map(1, ((0, 8),)))
    assert rank.orders == [Map(1, ((0, 8),))]
    assert _readable(link)
    assert link.receive() == [Ack(1)]
    assert not _readable(link)


def test_a_local_link_is_as_calm_as_its_rank() -> None:
    rank = EchoRank()
    assert LocalLink(rank).is_calm
    rank.is_calm = False
    assert not LocalLink(rank).is_calm


def test_a_rank_is_found_where_it_was_offered(runtime_dir: Path) -> None:
    address = runtime_dir / "orders" / "a.sock"
    assert orders.offer(address, EchoRank(3), local=True) is None
    assert isinstance(orders.connect(address, 3), LocalLink)
    orders.withdraw(address)
    orders.withdraw(address)
    with pytest.raises(OrderError, match=r"rank 3 does not listen for orders at .*a\.sock after 0 s"):
        orders.connect(address, 3, deadline_seconds=0)


# --- a socket ---------------------------------------------------------------------------------------------------------


@contextmanager
def served(path: Path, rank: EchoRank) -> Iterator[tuple[SocketLink, OrderServer]]:
    server = orders.offer(path, rank, local=False)
    assert server is not None
    with closing(server), closing(SocketLink(path, rank.index, deadline_seconds=5)) as link:
        yield link, server


def test_orders_arrive_in_order_and_answers_as_they_come(runtime_dir: Path) -> None:
    rank = EchoRank()
    rank.holds_back = {1, 3}
    with served(runtime_dir / "a.sock", rank) as (link, _):
        given = [Map(1, ((0, 8),)), Retire(2, ((8, 16),), 5), Undo(3, ((0, 8),)), Map(4, ())]
        for order in given:
            link.send(order)
        assert _received(link, 2) == [Ack(2), Ack(4)]
        assert rank.orders == given
        rank.holds_back = {1}
        assert _received(link, 1) == [Ack(3)]  # a rank ticks by itself too: fences complete without a word


def test_a_server_leaves_a_calm_rank_alone_while_its_engine_works(runtime_dir: Path) -> None:
    rank = EchoRank()
    with served(runtime_dir / "a.sock", rank) as (link, server):
        orders.greet([link], 80)
        for _ in range(50):
            rank.is_calm = True
            slept_on = _ticks_during_steps(rank, server)
            rank.is_calm = False
            looked = _ticks_during_steps(rank, server)
            if slept_on == 0:  # else this thread was late with a step
                break
        assert slept_on == 0
        assert looked >= 2
        link.send(Map(1, ()))
        assert _received(link, 1) == [Ack(1)]


def test_a_link_waits_for_a_rank_that_is_still_loading(runtime_dir: Path) -> None:
    path = runtime_dir / "a.sock"
    with rank_process(path, 1), closing(orders.connect(path, 1)) as link:
        assert orders.greet([link], 80)[0].rank == 1


def test_nobody_at_the_address_is_an_error_with_the_figures(runtime_dir: Path) -> None:
    with pytest.raises(OrderError, match=r"rank 1 does not listen for orders at .* after 0 s .*No such file"):
        SocketLink(runtime_dir / "none.sock", 1, deadline_seconds=0.05)


def test_the_socket_is_gone_from_the_directory_once_it_is_in_use(runtime_dir: Path) -> None:
    with served(runtime_dir / "orders" / "a.sock", EchoRank()) as (link, _):
        orders.greet([link], 80)
        assert list((runtime_dir / "orders").iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused_with_what_to_set(runtime_dir: Path) -> None:
    path = runtime_dir / ("x" * MAX_PATH_BYTES)
    with pytest.raises(ConfigError, match=r"at most 107: set KVCACHED_RUNTIME_DIR"):
        OrderServer(path, EchoRank())


def test_an_orderly_end_is_no_loss(runtime_dir: Path) -> None:
    with served(runtime_dir / "a.sock", EchoRank()) as (link, server):
        orders.greet([link], 80)
        server.close()
        _until(lambda: link.receive() == [] and link.closed)
        assert link.lost == ""
        link.send(Map(1, ()))  # nobody is there to hear it, which is known


def test_a_rank_whose_scheduler_has_ended_stays(runtime_dir: Path) -> None:
    rank = EchoRank()
    with served(runtime_dir / "a.sock", rank) as (link, server):
        orders.greet([link], 80)
        link.close()
        server.join(5)
        assert not server.is_alive()


def test_a_rank_ticks_though_nobody_orders_anything(runtime_dir: Path) -> None:
    rank = EchoRank()
    with served(runtime_dir / "a.sock", rank):
        _until(lambda: rank.ticks > 3)


# --- agreeing on the extent -------------------------------------------------------------------------------------------


def test_ranks_agree_on_the_largest_extent_that_one_would_choose() -> None:
    ranks = [EchoRank(0, preferred=8), EchoRank(1, preferred=16), EchoRank(2, preferred=1)]
    welcomes = orders.greet([LocalLink(rank) for rank in ranks], 160)
    assert [(welcome.rank, welcome.blocks_per_extent) for welcome in welcomes] == [(0, 16), (1, 16), (2, 16)]
    assert ranks[0].orders == [Hello(160), Hello(160, 16)]


def test_a_rank_that_does_not_answer_the_greeting_is_named() -> None:
    class Mute(EchoRank):
        def order(self, message: orders.ToRank) -> None:
            pass

    with pytest.raises(OrderError, match="rank 1 did not answer the scheduler's greeting within 0 s"):
        orders.greet([LocalLink(EchoRank(0)), LocalLink(Mute(1))], 80, deadline_seconds=0.05)


# --- other processes --------------------------------------------------------------------------------------------------


@contextmanager
def rank_process(path: Path, index: int = 0) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.core.echo_rank", str(path), str(index)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stderr
    with process.stdout, process.stderr:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait(10)


def test_a_killed_rank_closes_its_link_at_once(runtime_dir: Path) -> None:
    path = runtime_dir / "a.sock"
    with rank_process(path, 1) as process, closing(SocketLink(path, 1)) as link:
        orders.greet([link], 80)
        process.kill()
        killed = time.monotonic()
        _until(lambda: link.receive() == [] and link.closed)
        assert time.monotonic() - killed < 1
        assert link.lost


def test_a_stopped_rank_blocks_nobody_and_misses_nothing(runtime_dir: Path) -> None:
    """Sending never blocks, however full its queue; when it goes on it gets every order, in order."""
    path, count = runtime_dir / "a.sock", 5000
    with rank_process(path) as process, closing(SocketLink(path, 0)) as link:
        orders.greet([link], 80)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        started = time.monotonic()
        for seq in range(count):
            link.send(Map(seq, ((0, 8),)))
        assert time.monotonic() - started < 5
        assert link.receive() == []
        assert not link.closed
        assert not link.is_calm  # it has yet to send some of them
        process.send_signal(signal.SIGCONT)
        assert _received(link, count) == [Ack(seq) for seq in range(count)]
        assert link.is_calm


def test_a_rank_that_lost_track_ends_its_process_and_says_why(runtime_dir: Path) -> None:
    path = runtime_dir / "a.sock"
    with rank_process(path, 1) as process, closing(SocketLink(path, 1)) as link:
        link.send(Map(1, BROKEN))
        assert process.wait(10) == 70
        assert process.stderr
        assert "rank 1 cannot carry out orders any more, so it ends: MemoryError('half of it" in process.stderr.read()
        _until(lambda: link.receive() == [] and link.closed)


def _ticks_during_steps(rank: EchoRank, server: OrderServer) -> int:
    """How often the rank looks around by itself, over five times its period."""
    deadline = time.monotonic() + TICK_SECONDS
    while time.monotonic() < deadline:  # what came before is over
        server.note_step()
        time.sleep(TICK_SECONDS / 20)
    before, deadline = rank.ticks, time.monotonic() + 5 * TICK_SECONDS
    while time.monotonic() < deadline:
        server.note_step()
        time.sleep(TICK_SECONDS / 20)
    return rank.ticks - before


def _readable(link: Link) -> bool:
    return bool(select.select([link.fileno()], [], [], 0)[0])


def _received(link: Link, count: int) -> list[orders.FromRank]:
    messages: list[orders.FromRank] = []

    def enough() -> bool:
        messages.extend(link.receive())
        return len(messages) >= count

    _until(enough)
    return messages


def _until(condition: Callable[[], bool], deadline_seconds: float = 20) -> None:
    deadline = time.monotonic() + deadline_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_seconds} s"
        time.sleep(0.005)
