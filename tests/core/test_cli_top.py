"""kvcached top: frames with rates, and the live view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from kvcached_core.cli.ledgers import Ledgers
from kvcached_core.cli.top import Sampler
from kvcached_core.ledger import Ledger

from tests.core.command import kvcached, kvcached_here
from tests.core.follower import MIB, Follower

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"


def test_one_frame_has_the_bar_the_members_and_their_rates(runtime_dir: Path) -> None:
    with Follower(runtime_dir, in_use=100 * MIB, cached=50 * MIB, static=200 * MIB):
        done = kvcached("top", "--once", "--interval", "0.1", runtime_dir=runtime_dir)
    assert done.code == 0
    headline, bar, headings, member = done.out.splitlines()
    assert headline.startswith("host   capacity 2048.0 MiB")
    assert "static 200.0" in bar
    assert "in use 100.0" in bar
    assert "cached 50.0" in bar
    assert headings.split()[:3] == ["MEMBER", "ENGINE", "RESIDENT"]
    assert member.split()[:4] == ["qwen3-0.6b", "vllm", "150.0", "MiB"]


def test_rates_are_of_the_time_between_two_frames(runtime_dir: Path) -> None:
    ledger = Ledger.open("host", 2048 * MIB, runtime_dir=runtime_dir)
    account = ledger.join("a", engine="vllm")
    with Ledgers(runtime_dir) as ledgers:
        sampler = Sampler(ledgers)
        first = sampler.frame()
        account.lease(100 * MIB)
        account.created(100 * MIB)
        account.destroyed(40 * MIB)
        time.sleep(0.05)
        frame = sampler.frame()
    account.destroyed(60 * MIB)
    ledger.close()
    assert first.interval_seconds == 0
    assert first.devices[0].rates[0].mapped_bytes == 0
    (rates,) = frame.devices[0].rates
    assert rates.mapped_bytes * frame.interval_seconds == pytest.approx(100 * MIB)
    assert rates.unmapped_bytes * frame.interval_seconds == pytest.approx(40 * MIB)


def test_a_member_that_has_just_joined_has_no_rates(runtime_dir: Path) -> None:
    with Ledgers(runtime_dir) as ledgers:
        sampler = Sampler(ledgers)
        sampler.frame()
        with Follower(runtime_dir, cached=50 * MIB):
            (device,) = sampler.frame().devices
    assert device.rates[0].mapped_bytes == 0


def test_without_a_terminal_the_live_view_is_refused_with_the_way_out(runtime_dir: Path) -> None:
    done = kvcached_here("top", runtime_dir=runtime_dir)
    assert done.code == 3
    assert "kvcached top --once" in done.err


textual_app = pytest.importorskip("textual.app")
from kvcached_core.cli.dashboard import Dashboard  # noqa: E402  # textual is an extra
from textual.pilot import Pilot  # noqa: E402
from textual.widgets import Input  # noqa: E402

Script = Callable[[Dashboard, "Pilot[None]"], Awaitable[None]]


def watch(runtime_dir: Path, script: Script) -> Dashboard:
    """Run the live view in a terminal of 160 by 30 and do something in it."""

    async def session() -> Dashboard:
        with Ledgers(runtime_dir) as ledgers:
            app = Dashboard(Sampler(ledgers), 0.1)
            async with app.run_test(size=(160, 30), notifications=True) as pilot:
                await script(app, pilot)
            return app

    return asyncio.run(session())


async def until(pilot: Pilot[None], seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not seen():
        assert time.monotonic() < deadline, "the screen never showed it"
        await pilot.pause(0.05)


def cells(app: Dashboard, device_id: str = "host") -> list[list[str]]:
    if device_id not in app.views:
        return []
    table = app.views[device_id].table
    return [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]


def test_the_live_view_follows_members_as_they_come_and_go(runtime_dir: Path) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert cells(app) == []
        with Follower(runtime_dir, "a", cached=50 * MIB) as member:
            await until(pilot, lambda: [row[:3] for row in cells(app)] == [["a", "vllm", "50.0 MiB"]])
            with Follower(runtime_dir, "b", device_id=GPU_ID, engine="sglang"):
                await until(pilot, lambda: len(app.views) == 2)
            member.process.kill()
            await until(pilot, lambda: [cells(app), cells(app, GPU_ID)] == [[], []])

    watch(runtime_dir, script)


def test_a_ceiling_is_lowered_from_the_live_view(runtime_dir: Path) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(cells(app)) == 2)
        await pilot.press("down", "l")
        app.screen.query_one("#ceiling", Input).value = "12G"
        await pilot.press("enter")
        assert "'12G' is not a size" in str(app.screen.query_one("#hint").render())
        app.screen.query_one("#ceiling", Input).value = "200MiB"
        await pilot.press("enter")
        await until(pilot, lambda: cells(app)[1][:3] == ["b", "vllm", "200.0 MiB"])
        await until(pilot, lambda: any("reached 200.0 MiB" in notice.message for notice in app._notifications))
        assert cells(app)[0][:3] == ["a", "vllm", "500.0 MiB"]

    with Follower(runtime_dir, "a", cached=500 * MIB), Follower(runtime_dir, "b", cached=500 * MIB):
        watch(runtime_dir, script)


def test_escape_changes_nothing_and_q_quits(runtime_dir: Path) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(cells(app)) == 1)
        await pilot.press("l")
        app.screen.query_one("#ceiling", Input).value = "10MiB"
        await pilot.press("escape", "q")
        await until(pilot, lambda: not app.is_running)

    with Follower(runtime_dir, cached=500 * MIB):
        app = watch(runtime_dir, script)
        assert app.return_code == 0
        (device,) = kvcached_here("status", "--json", runtime_dir=runtime_dir).document["devices"]
    assert device["members"][0]["limits_revision"] == 0


def test_a_damaged_ledger_is_shown(runtime_dir: Path) -> None:
    (runtime_dir / "host.ledger").write_bytes(b"nonsense")

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "truncated" in str(app.screen.query_one("#problems").render()))

    watch(runtime_dir, script)


def test_a_device_that_was_asked_for_and_has_no_ledger_is_shown_as_missing(runtime_dir: Path) -> None:
    async def session() -> None:
        with Ledgers(runtime_dir, "GPU-9") as ledgers:
            app = Dashboard(Sampler(ledgers), 0.1)
            async with app.run_test() as pilot:
                await until(
                    pilot, lambda: "no device beginning with" in str(app.screen.query_one("#problems").render())
                )

    asyncio.run(session())
