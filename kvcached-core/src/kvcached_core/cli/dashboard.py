"""The live view of ``kvcached top``, in textual. Imported by `top` alone: textual is the extra ``[top]``."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Literal

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, Static

from kvcached_core.cli.ledgers import ranks_of
from kvcached_core.cli.limit import Outcome, Wish, closing, opening, put_in_force, read_wish, wait
from kvcached_core.cli.status import headline, short_id
from kvcached_core.cli.top import COLUMNS, DeviceFrame, Frame, Sampler, bar, justification, rows
from kvcached_core.cli.units import Unit
from kvcached_core.errors import ConfigError, KvcachedError, LedgerError
from kvcached_core.ledger_statistics import LedgerStatistics
from kvcached_core.sizes import Size

HISTORY_FRAMES = 30
LIMIT_TIMEOUT_SECONDS = 10.0
NOTICE_SECONDS = 10.0
LEVELS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Selected:
    """The member that the cursor is on."""

    device: LedgerStatistics
    name: str


class LimitDialog(ModalScreen["Wish | None"]):
    """Asks for a member's limits; the answer is what was changed, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape", "dismiss_nothing", "Cancel")]

    def __init__(self, selected: Selected) -> None:
        super().__init__()
        unit, ranks = Unit.of(selected.device.total_bytes), ranks_of(selected.device, selected.name)
        self._title = f"Limits of {selected.name} on {short_id(selected.device.device_id)}"
        self._written = {
            "floor": _written(sum(rank.floor_bytes for rank in ranks), unit),
            "ceiling": _written(sum(rank.ceiling_bytes for rank in ranks), unit),
            "weight": f"{ranks[0].weight:g}",
        }

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog"):
            yield Label(self._title, id="title")
            for word, written in self._written.items():
                yield Label(word)
                yield Input(written, id=word)
            yield Static("Sizes: 512MiB, 20GiB, 25%. Enter applies, Escape cancels.", id="hint")

    def on_mount(self) -> None:
        self.query_one("#ceiling", Input).focus()

    def on_input_submitted(self) -> None:
        changed = {
            word: given
            for word, written in self._written.items()
            if (given := self.query_one(f"#{word}", Input).value.strip()) != written
        }
        try:
            weight = float(changed["weight"]) if "weight" in changed else None
            wish = read_wish(changed.get("floor"), changed.get("ceiling"), weight)
        except (ConfigError, ValueError) as error:
            self.query_one("#hint", Static).update(Text(str(error), style="bold red"))
            return
        self.dismiss(wish)

    def action_dismiss_nothing(self) -> None:
        self.dismiss(None)


def _written(num_bytes: int, unit: Unit) -> str:
    """As `parse_size` reads it; rounded where the exact bytes are no round number: only what is edited is applied."""
    exact = str(Size(num_bytes))
    return f"{num_bytes / unit.num_bytes:.1f}{unit.name}" if exact.isdecimal() and num_bytes else exact


class DeviceView(Vertical):
    """One device: its line, its bar, its members."""

    def __init__(self, device_id: str) -> None:
        super().__init__(classes="device")
        self.device_id = device_id
        self.table: DataTable[Text] = DataTable(cursor_type="row")
        self.table.add_columns(*(Text(name, justify=justification(name)) for name in COLUMNS), "RESIDENT OVER TIME")
        self._headline = Static(classes="headline")
        self._bar = Static()
        self._history: dict[tuple[int, str], deque[int]] = {}

    def compose(self) -> ComposeResult:
        yield self._headline
        yield self._bar
        yield self.table

    def show(self, frame: DeviceFrame, product: str) -> None:
        """Put a frame on the screen; the cursor stays on its line."""
        self._headline.update(headline(frame.device, product))
        self._bar.update(bar(frame.device))
        at = self.table.cursor_row
        self.table.clear()
        for member, cells in zip(frame.device.members, rows(frame), strict=True):
            history = self._history.setdefault((member.slot, member.member_id), deque(maxlen=HISTORY_FRAMES))
            history.append(member.resident_bytes)
            for name, cell in zip(COLUMNS, cells, strict=True):
                cell.justify = justification(name)
            self.table.add_row(*cells, Text(sparkline(history, member.ceiling_bytes), style="green"))
        self.table.move_cursor(row=min(at, max(0, self.table.row_count - 1)))


def sparkline(values: deque[int], top_bytes: int) -> str:
    """One character for each value, from 0 to the larger of the ceiling and the largest value."""
    highest = max(*values, top_bytes if top_bytes < 2 * max(values) else 0, 1)
    return "".join(LEVELS[-(-value * (len(LEVELS) - 1) // highest)] for value in values)


class Dashboard(App[None]):
    """The live view.

    Args:
        sampler: Makes the frames.
        interval_seconds: From one to the next.
    """

    TITLE = "kvcached"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "Quit"), ("l", "limit", "Limits of the selected member")]
    CSS = """
    Screen { layout: vertical; }
    .device { height: auto; margin: 0 0 1 0; }
    .headline { text-style: bold; }
    DataTable { height: auto; }
    #empty { color: $text-muted; }
    #problems { color: $error; height: auto; }
    LimitDialog { align: center middle; }
    #dialog { width: 60; height: auto; padding: 1 2; border: round $primary; background: $surface; }
    #title { text-style: bold; margin: 0 0 1 0; }
    #hint { color: $text-muted; margin: 1 0 0 0; }
    """

    def __init__(self, sampler: Sampler, interval_seconds: float) -> None:
        super().__init__()
        self._sampler = sampler
        self._interval_seconds = interval_seconds
        self._frame: Frame | None = None
        self._empty = Static("no ledger yet", id="empty")
        self._problems = Static(id="problems")
        self._devices = VerticalScroll(self._empty, self._problems, can_focus=False)
        self.views: dict[str, DeviceView] = {}

    def compose(self) -> ComposeResult:
        yield self._devices
        yield Footer()

    async def on_mount(self) -> None:
        self.set_interval(self._interval_seconds, self.refresh_frame)
        await self.refresh_frame()

    async def refresh_frame(self) -> None:
        """Read the ledgers and show them."""
        if not self._devices.is_attached:  # the view is being closed
            return
        try:
            self._frame = frame = self._sampler.frame()
        except LedgerError as error:
            self._problems.update(Text(str(error)))
            return
        for each in frame.devices:
            device_id = each.device.device_id
            if device_id not in self.views:
                await self._add_view(device_id)
            self.views[device_id].show(each, frame.device_names.get(device_id, ""))
        for device_id in self.views.keys() - {each.device.device_id for each in frame.devices}:
            await self.views.pop(device_id).remove()
        self._empty.display = not frame.devices
        problems = "\n".join(f"{short_id(each.device_id)}  {each.reason}" for each in frame.unreadable)
        self._problems.update(Text(problems))

    async def _add_view(self, device_id: str) -> None:
        view = self.views[device_id] = DeviceView(device_id)
        await self._devices.mount(view, before=self._problems)
        if self.focused is None:
            view.table.focus()

    def selected(self) -> Selected | None:
        """The member under the cursor, if there is one."""
        for each in self._frame.devices if self._frame is not None else ():
            table = self.views[each.device.device_id].table
            if table.has_focus and table.cursor_row < len(each.device.members):
                return Selected(each.device, each.device.members[table.cursor_row].name)
        return None

    def action_limit(self) -> None:
        selected = self.selected()
        if selected is None:
            self.notify("no member is selected", severity="warning")
            return

        def answered(wish: Wish | None) -> None:
            if wish is not None:
                self._apply(selected, wish)

        self.push_screen(LimitDialog(selected), answered)

    @work(thread=True)
    def _apply(self, selected: Selected, wish: Wish) -> None:
        """Change the limits and tell what came of it, while the frames go on."""
        try:
            ledger = self._sampler.ledgers.ledger(selected.device.device_id)
            began = time.monotonic()
            change = put_in_force(ledger, selected.name, wish)
            result = wait(ledger, change, began, LIMIT_TIMEOUT_SECONDS)
        except KvcachedError as error:
            self._tell(str(error), "error")
            return
        words = opening(change, wish) + closing(change, result)
        self._tell(words, "information" if result.outcome is Outcome.REACHED else "warning")

    def _tell(self, words: str, severity: Literal["information", "warning", "error"]) -> None:
        self.call_from_thread(self.notify, words, severity=severity, timeout=NOTICE_SECONDS, markup=False)
