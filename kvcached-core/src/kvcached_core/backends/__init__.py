"""Backends: the driver of one kind of device, behind one protocol."""

from kvcached_core.backends.base import Backend, DeviceMemory, Fence, hookimpl, load_backend

__all__ = ["Backend", "DeviceMemory", "Fence", "hookimpl", "load_backend"]
