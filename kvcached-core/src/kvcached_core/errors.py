"""Every error that kvcached raises. A message says what happened, the measured values, and what to do."""

from __future__ import annotations


class KvcachedError(Exception):
    """The base of all errors of kvcached."""


class ConfigError(KvcachedError):
    """Settings that cannot work. The message has the value and the accepted form."""


class UnsupportedError(KvcachedError):
    """An engine release, a model or a feature that is refused, in words."""


class DeviceMemoryError(KvcachedError):
    """The device had no page although the ledger had granted a lease."""


class DriverError(KvcachedError):
    """A driver call failed for another reason than memory.

    Attributes:
        call: The driver's function.
        result: The driver's name for the failure.
        device_id: UUID of the device that the call was made for.
    """

    def __init__(self, message: str, *, call: str = "", result: str = "", device_id: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.result = result
        self.device_id = device_id


class LedgerError(KvcachedError):
    """The shared record cannot be read or changed, or would not grant within the deadline."""


class OrderError(KvcachedError):
    """A rank is dead or does not answer. The message names it."""


class InvariantError(KvcachedError):
    """Our bug: two parts of kvcached disagree. Please report it."""
