"""What a backend is: one device's pages, addresses and fences. Implementations are found through pluggy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from kvcached_core.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

BUILT_IN_BACKENDS = ("host", "cuda")
ENTRY_POINT_GROUP = "kvcached.backends"

hookspec = pluggy.HookspecMarker("kvcached")
hookimpl = pluggy.HookimplMarker("kvcached")


@dataclass(frozen=True)
class DeviceMemory:
    """What a device says of its memory at one moment.

    Attributes:
        free_bytes: What nobody holds; None where only the ledger knows, since its members alone make up the use
            (the host, whose total is a budget).
        total_bytes: What the device has.
    """

    free_bytes: int | None
    total_bytes: int


class Fence(Protocol):
    """A point behind all work that was launched on some streams."""

    def done(self) -> bool:
        """Whether that work has ended. Never waits; may be asked from any thread, and again after it was true.

        Raises:
            DriverError: The work failed, or the device is lost.
        """


class Backend(Protocol):
    """One device, named by its UUID. Every method works in any thread and is about this device alone.

    The caller's current device and context are neither read nor changed. Pages of one address range are
    mapped and unmapped by one thread at a time (see `Arena`); the other methods may run beside it.

    Attributes:
        device_id: UUID of the device as its vendor's tools print it; ``"host"`` for the host backend. What the
            ledger is keyed by.
        granularity_bytes: What the size of a page is a multiple of. A power of two.
    """

    device_id: str
    granularity_bytes: int

    @property
    def device(self) -> torch.device:
        """The device under its name in this process."""

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        """Take addresses, without memory.

        Args:
            size_bytes: A multiple of the granularity.
            alignment_bytes: Power of two, at least the granularity.

        Returns:
            The first address.

        Raises:
            DeviceMemoryError: No address range of that size is left.
        """

    def release(self, address: int, size_bytes: int) -> None:
        """Give a whole reserved range back, its guard too. None of its pages may be mapped."""

    def map(self, address: int, size_bytes: int, page_bytes: int) -> None:
        """Put pages behind neighbouring addresses, readable and writable. Their content is undefined until `zero`.

        Args:
            size_bytes: A multiple of ``page_bytes``; each page can be unmapped without the others.

        Raises:
            DeviceMemoryError: The device has too few pages left. The addresses are as they were.
            DriverError: Another failure. The addresses are as they were.
        """

    def unmap(self, address: int, size_bytes: int, page_bytes: int) -> None:
        """Take neighbouring pages away; their memory is the device's again when this returns.

        Not ordered behind any stream. They need not have been mapped together.

        Raises:
            DriverError: All of them are still mapped.
        """

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Write zeros and wait for them. All of the memory is really there afterwards.

        Args:
            spans: (address, bytes) pairs, whole mapped pages.

        Raises:
            DeviceMemoryError: A backend that takes memory at the first write found none.
            DriverError: Another failure. What the spans hold is undefined.
        """

    def fence(self, streams: Sequence[int]) -> Fence:
        """A fence behind all work launched so far on these streams of this device (handles; 0: the default one)."""

    def memory(self) -> DeviceMemory:
        """Free and total memory of this device, now."""

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        """An int8 tensor over these addresses, mapped or not. It owns nothing and keeps nothing alive."""

    def set_guard(self, address: int, size_bytes: int, page_bytes: int, *, writable: bool) -> None:
        """Stand one shared guard page behind every unmapped address of a reserved range; later ones included.

        Called writable before anything is mapped, and again read-only once stray writes are over: it then reads
        as zeros, and a write faults. Nothing of the range may be in use by the device during the second call.
        Mapped pages stay writable throughout. A backend without guard pages does nothing: its unmapped addresses
        fault.
        """

    def close(self) -> None:
        """Give up the device. Every range has been released. Closing again does nothing."""


class BackendHooks:
    """What a plugin of the entry-point group ``kvcached.backends`` may implement (mark it with `hookimpl`)."""

    @hookspec(firstresult=True)
    def kvcached_make_backend(self, kind: str, ordinal: int, budget_bytes: int | None) -> Backend | None:
        """Make the backend of a kind, or return None where the kind is another's.

        Args:
            kind: ``"cuda"``, ``"host"``, or a name of the plugin's own.
            ordinal: Which device, as this process numbers them.
            budget_bytes: What a device without memory of its own counts as its total (the host); None: all of it.
        """


def load_backend(kind: str, *, ordinal: int = 0, budget_bytes: int | None = None) -> Backend:
    """Make a backend, from this package or from a plugin that is installed.

    Args:
        kind: ``"cuda"``, ``"host"``, or what an installed plugin answers to.
        ordinal: Which device, as this process numbers them.
        budget_bytes: Total of the host backend; None: the machine's memory.

    Raises:
        ConfigError: No backend answers to that kind.
        UnsupportedError: The device, its driver or a plugin cannot be used; the message says why.
    """
    made: Backend | None = _plugins().hook.kvcached_make_backend(kind=kind, ordinal=ordinal, budget_bytes=budget_bytes)
    if made is None:
        raise ConfigError(
            f"no backend {kind!r}. Built in: {', '.join(BUILT_IN_BACKENDS)}; "
            f"others come with a package that has an entry point in the group {ENTRY_POINT_GROUP!r}."
        )
    return made


def _plugins() -> Any:
    manager = pluggy.PluginManager("kvcached")
    manager.add_hookspecs(BackendHooks)
    for name in BUILT_IN_BACKENDS:
        manager.register(import_module(f"{__package__}.{name}"), name)
    try:
        manager.load_setuptools_entrypoints(ENTRY_POINT_GROUP)
        manager.check_pending()
    except (ImportError, pluggy.PluginValidationError) as error:
        raise UnsupportedError(f"a plugin of the group {ENTRY_POINT_GROUP!r} cannot be used: {error}") from error
    return manager
