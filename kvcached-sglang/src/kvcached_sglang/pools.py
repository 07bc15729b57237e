"""SGLang's KV tensors over arenas: its own code asks for the tensors, with the shapes and strides it wants.

SGLang's pools allocate with ``torch.zeros(shape, dtype=store_dtype, device=...)``, one call for each layer's K and V
(0.5.23: one for both). The pool's own method runs twice: once answered with tensors without memory, to learn what it
will ask for and which views it takes of it, then answered from an arena that was laid out for exactly that.

Source: ``MHATokenToKVPool._create_buffers_normal`` and ``MLATokenToKVPool._create_buffers``, 0.5.20 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from kvcached_core.arena import Arena
from kvcached_core.backends.base import Backend
from kvcached_core.errors import UnsupportedError
from kvcached_core.geometry import Geometry
from torch.overrides import TorchFunctionMode

from kvcached_sglang.placement import PLACES, Buffer, Placement, Request, Rows, Wanted


@dataclass(frozen=True)
class ElasticPool:
    """One KV pool of SGLang over an arena.

    Attributes:
        arena: Its addresses.
        geometry: Blocks are SGLang's pages, block 0 the padding page.
        tokens_per_block: SGLang's page size.
        num_layers: Of the model in this pool.
    """

    arena: Arena
    geometry: Geometry
    tokens_per_block: int
    num_layers: int

    @property
    def bytes_per_token(self) -> float:
        """Of one token in all layers."""
        return sum(stripe.length_bytes for stripe in self.geometry.stripes) / self.tokens_per_block


def create_elastic_buffers(
    create: Callable[[Any], None],
    pool: Any,
    buffer_lists: Sequence[str],
    backend: Backend,
    *,
    page_bytes: int | None,
    guard: bool,
    layout: str,
    blocks_per_extent: Mapping[int, int] | None = None,
) -> ElasticPool:
    """Run a pool's own allocation so that its tensors lie in an arena.

    Args:
        create: The pool's method, unhooked.
        pool: SGLang's pool. Afterwards its buffers are over the arena, nothing of them mapped.
        buffer_lists: Names of the pool's lists of tensors, one tensor per layer each.
        backend: The pool's device.
        page_bytes: Of the arena; None: chosen.
        guard: Whether a guard page stands behind unmapped addresses (``KVCACHED_GUARD``).
        layout: Name of how the tensors lie in it.
        blocks_per_extent: For numbers of blocks that there are ids for already, how those are cut; a draft model's
            pool follows the target's.

    Raises:
        UnsupportedError: The pool does not allocate as kvcached expects, or cannot be laid out so. Nothing is left
            reserved.
        ConfigError: ``page_bytes`` cannot work.
    """
    wanted = _learn(create, pool, buffer_lists)
    placement = PLACES[layout](wanted, backend.granularity_bytes, page_bytes)
    geometry = placement.geometry
    if blocks_per_extent and geometry.num_blocks in blocks_per_extent:
        geometry = replace(geometry, blocks_per_extent=blocks_per_extent[geometry.num_blocks])
    arena = Arena(backend, geometry.size_bytes, geometry.page_bytes, guard=guard)
    try:
        tensors = [_tensor(arena, *each) for each in zip(wanted.requests, placement.tensors, strict=True)]
        with _answering(wanted.requests, tensors, pool):
            create(pool)
        _verify(pool, buffer_lists, placement, arena)
    except BaseException:
        arena.close()
        raise
    return ElasticPool(arena, geometry, pool.page_size, pool.layer_num)


class _Answers(TorchFunctionMode):
    """Answers the pool's ``torch.zeros`` calls; every other call goes through."""

    def __init__(self, dtype: torch.dtype, answer: Callable[[Request], torch.Tensor]) -> None:
        super().__init__()
        self._dtype = dtype
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or len(args) != 1 or kwargs.get("dtype") is not self._dtype:
            return func(*args, **kwargs)
        return self._answer(Request(tuple(args[0]), self._dtype))


def _learn(create: Callable[[Any], None], pool: Any, buffer_lists: Sequence[str]) -> Wanted:
    """What the pool asks for and how its buffers lie in that; allocates nothing."""
    requests: list[Request] = []
    answers: list[torch.Tensor] = []

    def answer(request: Request) -> torch.Tensor:
        requests.append(request)
        answers.append(torch.empty(request.shape, dtype=request.dtype, device="meta"))
        return answers[-1]

    with _Answers(pool.store_dtype, answer):
        create(pool)
    storages = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(answers)}
    buffers = []
    for tensor in _tensors(pool, buffer_lists):
        index = storages.get(tensor.untyped_storage()._cdata)
        if index is None or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{type(pool).__name__} has a KV buffer of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "that is no contiguous part of a tensor it asked for, so its layout is unknown to kvcached."
            )
        size = tensor.element_size()
        buffers.append(Buffer(index, tensor.storage_offset() * size, tensor.stride(0) * size, tensor.shape[0]))
    num_blocks = (pool.size + pool.page_size) // pool.page_size
    return Wanted(requests, buffers, num_blocks, pool.page_size)


def _tensors(pool: Any, buffer_lists: Sequence[str]) -> Iterator[torch.Tensor]:
    for name in buffer_lists:
        yield from getattr(pool, name)


def _tensor(arena: Arena, request: Request, placed: tuple[int, tuple[int, ...]]) -> torch.Tensor:
    offset_bytes, strides_bytes = placed
    item = request.dtype.itemsize
    span = sum((count - 1) * stride for count, stride in zip(request.shape, strides_bytes, strict=True)) + item
    flat = arena.tensor(offset_bytes, span).view(request.dtype)
    return flat.as_strided(request.shape, [stride // item for stride in strides_bytes])


@contextmanager
def _answering(requests: Sequence[Request], tensors: Sequence[torch.Tensor], pool: Any) -> Iterator[None]:
    """Answer exactly these requests, in this order, each once."""
    left = list(zip(requests, tensors, strict=True))[::-1]

    def answer(request: Request) -> torch.Tensor:
        if not left or left[-1][0] != request:
            raise UnsupportedError(f"{type(pool).__name__} asks for {request} the second time, not what it did before.")
        return left.pop()[1]

    with _Answers(pool.store_dtype, answer):
        yield
    if left:
        raise UnsupportedError(f"{type(pool).__name__} did not ask for {len(left)} of its tensors the second time.")


def _verify(pool: Any, buffer_lists: Sequence[str], placement: Placement, arena: Arena) -> None:
    """The real tensors are where they were placed, row for row."""
    for tensor, placed in zip(_tensors(pool, buffer_lists), placement.buffers, strict=True):
        row = tensor[0]
        found = Rows(tensor.data_ptr() - arena.address, tensor.stride(0) * row.element_size(), row.nbytes, len(tensor))
        if found != placed or not row.is_contiguous():
            raise UnsupportedError(
                f"a KV buffer of {type(pool).__name__} with strides {tensor.stride()} is {found} of its arena, where "
                f"kvcached placed {placed}."
            )
