"""Servers are accounted for to the last child, whatever they do when they are interrupted."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server, ServerError, free_port

SERVE = """
import http.server, subprocess, sys
port, child = int(sys.argv[1]), sys.argv[2]
if child:
    subprocess.Popen([sys.executable, "-c", child])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
except KeyboardInterrupt:
    print("interrupted")
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    # A shell starts background jobs with SIGINT ignored, which the servers would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    servers = []

    def start(*words: str) -> Server:
        port = free_port()
        command = [sys.executable, "-c", *words[:1], str(port), *words[1:]]
        server = Server("test", command, {}, port=port, log=tmp_path / "server.log", cwd=tmp_path)
        servers.append(server)
        return server.__enter__()

    yield start
    for server in servers:
        server.__exit__()


def test_an_interrupted_server_ends_and_leaves_nothing(start: Callable[..., Server]) -> None:
    server = start(SERVE, "")
    server.wait_ready("/", deadline_seconds=20)
    ended = server.interrupt(deadline_seconds=20)
    assert (ended.code, ended.left) == (0, ())
    assert "interrupted" in server.log_text()
    assert not server.pids()


def test_a_child_that_outlives_the_interrupt_is_named_and_killed(start: Callable[..., Server]) -> None:
    server = start(SERVE, STUBBORN)
    server.wait_ready("/", deadline_seconds=20)
    while "deaf" not in server.log_text():
        assert server.alive
        time.sleep(0.01)
    (child,) = set(server.pids()) - {server._process.pid}
    ended = server.interrupt(deadline_seconds=1)
    assert ended.code == 0
    assert [left.split()[0] for left in ended.left] == [str(child)]
    assert not server.pids()


def test_a_server_that_ends_before_it_is_ready_is_an_error_with_its_code(start: Callable[..., Server]) -> None:
    with pytest.raises(ServerError, match="ended with code 3"):
        start("import sys; sys.exit(3)").wait_ready("/", deadline_seconds=20)


def test_a_server_that_never_answers_is_an_error_at_its_deadline(start: Callable[..., Server]) -> None:
    with pytest.raises(ServerError, match="not ready after 1 s"):
        start("import time; time.sleep(60)").wait_ready("/", deadline_seconds=1)


def test_no_setting_of_the_caller_reaches_a_server(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "1")
    monkeypatch.setenv("KVCACHED_NAME", "x")
    server = start("import os; print([n for n in os.environ if 'KVCACHED' in n], 'HOME' in os.environ)")
    with pytest.raises(ServerError):
        server.wait_ready("/", deadline_seconds=20)
    assert server.log_text().strip() == f"[] {'HOME' in os.environ}"
