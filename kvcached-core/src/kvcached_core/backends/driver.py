"""Calls of the CUDA driver, whose failures are exceptions with the call, the result, the device and what to do."""

from __future__ import annotations

from importlib import import_module
from types import TracebackType
from typing import Any

from kvcached_core.errors import DeviceMemoryError, DriverError, InvariantError, UnsupportedError
from kvcached_core.sizes import format_bytes

# A kernel of this process failed earlier; every later call of the context reports it.
# Source: CUDA Driver API, CUresult: "leaves the process in an inconsistent state".
_CONTEXT_LOST = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "TENSOR_MEMORY_LEAK",
    )
)
_CONTEXT_GONE = frozenset(
    f"CUDA_ERROR_{name}" for name in ("CONTEXT_IS_DESTROYED", "DEINITIALIZED", "INVALID_CONTEXT", "NOT_INITIALIZED")
)
# How much is free is asked with these: where one of them fails, it is not known.
_QUERIES = frozenset(("cuCtxPushCurrent", "cuCtxPopCurrent", "cuMemGetInfo"))


def load_driver(module: Any = None) -> Any:
    """`cuda.bindings.driver`, or the stand-in that is given, initialised.

    Raises:
        UnsupportedError: The package, the driver or a device is missing.
    """
    try:
        module = module or import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedError(
            "the cuda backend needs the package cuda-bindings: pip install 'kvcached-core[cuda]'"
        ) from error
    try:
        (result,) = module.cuInit(0)
    except RuntimeError as error:  # cuda.bindings: libcuda.so.1 cannot be opened
        raise UnsupportedError(
            f"no NVIDIA driver on this machine: {error}. In a container, start it with its GPUs (--gpus all)."
        ) from error
    if result != module.CUresult.CUDA_SUCCESS:
        raise UnsupportedError(
            f"the NVIDIA driver cannot be used: cuInit gave {result.name}. nvidia-smi and CUDA_VISIBLE_DEVICES"
            " tell which devices this process has."
        )
    return module


class Driver:
    """The driver as one device's backend calls it.

    Args:
        module: `cuda.bindings.driver` or a stand-in, initialised.
        device_id: UUID that failures name.

    Attributes:
        context: The device's, once there is one; until then no failure says how much is free.
    """

    def __init__(self, module: Any, device_id: str) -> None:
        self.module = module
        self.device_id = device_id
        self.context: Any = None
        self._success = module.CUresult.CUDA_SUCCESS

    def call(self, name: str, *arguments: Any) -> Any:
        """What the driver function returns besides its result: one value, or a tuple of none or several.

        Raises:
            DeviceMemoryError: CUDA_ERROR_OUT_OF_MEMORY.
            DriverError: Any other failure.
        """
        answer = getattr(self.module, name)(*arguments)
        self.check(name, answer[0])
        return answer[1] if len(answer) == 2 else answer[1:]

    def check(self, name: str, result: Any) -> None:
        """Raise what a call's result stands for, unless it is success."""
        if result != self._success:
            raise self._failure(name, result.name)

    def entered(self) -> Entered:
        """Within, the device's context is current in this thread."""
        return Entered(self)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of this device. The driver's query takes no device, so its context is entered for it.

        Raises:
            DeviceMemoryError, DriverError: The driver does not say.
            InvariantError: The context could not be left.
        """
        with self.entered():
            free_bytes, total_bytes = self.call("cuMemGetInfo")
        return int(free_bytes), int(total_bytes)

    def _failure(self, name: str, result: str) -> DeviceMemoryError | DriverError:
        message = f"{name} failed on {self.device_id}: {result}."
        if result == "CUDA_ERROR_OUT_OF_MEMORY":
            return DeviceMemoryError(
                f"{message} {self._free_memory(name)} A process outside kvcached may hold memory here: stop it, or"
                " raise KVCACHED_HEADROOM."
            )
        if result in _CONTEXT_LOST:
            message += " An earlier kernel of this process failed and took its context along: restart the engine."
        elif result in _CONTEXT_GONE:
            message += (
                " The device's primary context is gone: the process is ending, or something has reset the device."
            )
        return DriverError(message, call=name, result=result, device_id=self.device_id)

    def _free_memory(self, failed: str) -> str:
        if self.context is None:
            return "How much is free there is not known: this process has no context of it."
        if failed in _QUERIES:
            return "How much is free there is not known."
        try:
            free_bytes, total_bytes = self.memory()
        except (DeviceMemoryError, DriverError) as error:
            return f"How much is free there is not known: {error}"
        return f"The driver reports {format_bytes(free_bytes)} of {format_bytes(total_bytes)} free."


class Entered:
    """Within, a device's context is current in this thread.

    Raises:
        DriverError: It could not be entered; the thread is as it was.
        InvariantError: It could not be left. What this thread does from now on may reach the wrong device.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent", self._driver.context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._leave("cuCtxPopCurrent")

    def _leave(self, name: str, *arguments: Any) -> None:
        try:
            self._driver.call(name, *arguments)
        except (DeviceMemoryError, DriverError) as error:
            raise InvariantError(f"{error} This thread may now use another device than it believes: end it.") from error
