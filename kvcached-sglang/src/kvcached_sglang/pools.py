"""SGLang's KV tensors over arenas: its own code asks for the tensors, with the shapes and strides it wants.

SGLang's pools allocate with ``torch.zeros(shape, dtype=store_dtype, device=...)``, one call for each layer's K and V
(0.5.23: one for both). The pool's own method runs twice: once answered with tensors without memory, to learn what it
will ask for and which views it takes of it, then answered from an arena that was laid out for exactly that.

Source: ``MHATokenToKVPool._create_buffers_normal`` and ``MLATokenToKVPool._create_buffers``, 0.5.20 to 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from kvcached_core.arena import Arena
from kvcached_core.backends.base import Backend
from kvcached_core.errors import UnsupportedError
from kvcached_core.geometry import Geometry, Stripe
from torch.overrides import TorchFunctionMode


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


@dataclass(frozen=True)
class _Request:
    """One tensor that a pool asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Buffer:
    """One layer's K or V: a view of a requested tensor, rows of tokens or of whole blocks."""

    request: int
    offset_bytes: int
    row_bytes: int
    num_rows: int


@dataclass(frozen=True)
class _Placement:
    """Where a requested tensor lies in the arena.

    Attributes:
        leading_stride_bytes: Between the tensor's halves, where K and V are one tensor; else as torch would have it.
    """

    offset_bytes: int
    leading_stride_bytes: int
    size_bytes: int


def create_elastic_buffers(
    create: Callable[[Any], None],
    pool: Any,
    buffer_lists: Sequence[str],
    backend: Backend,
    *,
    page_bytes: int | None,
    guard: bool,
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
        blocks_per_extent: For numbers of blocks that there are ids for already, how those are cut; a draft model's
            pool follows the target's.

    Raises:
        UnsupportedError: The pool does not allocate as kvcached expects. Nothing is left reserved.
        ConfigError: ``page_bytes`` cannot work.
    """
    requests, buffers = _learn(create, pool, buffer_lists)
    num_tokens = pool.size + pool.page_size
    num_blocks = num_tokens // pool.page_size
    page_bytes = page_bytes or _suitable_page(requests, buffers, num_blocks, backend.granularity_bytes)
    placements = _place(requests, buffers, num_blocks, page_bytes)
    stripes = _stripes(buffers, placements, requests, num_blocks)
    size_bytes = sum(placement.size_bytes for placement in placements)
    geometry = Geometry.choose(
        stripes, num_blocks, size_bytes, granularity_bytes=backend.granularity_bytes, page_bytes=page_bytes
    )
    if blocks_per_extent and num_blocks in blocks_per_extent:
        geometry = replace(geometry, blocks_per_extent=blocks_per_extent[num_blocks])
    arena = Arena(backend, size_bytes, page_bytes, guard=guard)
    try:
        with _answering(requests, [_tensor(arena, *each) for each in zip(requests, placements, strict=True)], pool):
            create(pool)
        _verify(pool, buffer_lists, buffers, placements, arena)
    except BaseException:
        arena.close()
        raise
    return ElasticPool(arena, geometry, pool.page_size, pool.layer_num)


class _Answers(TorchFunctionMode):
    """Answers the pool's ``torch.zeros`` calls; every other call goes through."""

    def __init__(self, dtype: torch.dtype, answer: Callable[[_Request], torch.Tensor]) -> None:
        super().__init__()
        self._dtype = dtype
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or len(args) != 1 or kwargs.get("dtype") is not self._dtype:
            return func(*args, **kwargs)
        return self._answer(_Request(tuple(args[0]), self._dtype))


def _learn(
    create: Callable[[Any], None], pool: Any, buffer_lists: Sequence[str]
) -> tuple[list[_Request], list[_Buffer]]:
    """What the pool asks for and how its buffers lie in that; allocates nothing."""
    requests: list[_Request] = []
    answers: list[torch.Tensor] = []

    def answer(request: _Request) -> torch.Tensor:
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
        buffers.append(_Buffer(index, tensor.storage_offset() * size, tensor.stride(0) * size, tensor.shape[0]))
    return requests, buffers


def _tensors(pool: Any, buffer_lists: Sequence[str]) -> Iterator[torch.Tensor]:
    for name in buffer_lists:
        yield from getattr(pool, name)


def _suitable_page(requests: Sequence[_Request], buffers: Sequence[_Buffer], num_blocks: int, granularity: int) -> int:
    """The page size that suits these buffers laid end to end, rounded so that an extent is whole pages of each."""
    placements = _place(requests, buffers, num_blocks, granularity)
    size_bytes = sum(placement.size_bytes for placement in placements)
    stripes = _stripes(buffers, placements, requests, num_blocks)
    page = Geometry.choose(stripes, num_blocks, size_bytes, granularity_bytes=granularity).page_bytes
    whole = math.lcm(granularity, *(stripe.stride_bytes for stripe in stripes))
    return page // whole * whole or page


def _place(
    requests: Sequence[_Request], buffers: Sequence[_Buffer], num_blocks: int, page_bytes: int
) -> list[_Placement]:
    """Lay the tensors one after the other, each layer's K and V from a page boundary on.

    Where K and V are halves of one tensor, SGLang only asks that V be whole blocks behind K (its paged kernels count
    blocks from K's base), so the second half moves up to the next page boundary that is a whole number of blocks
    away.
    """
    placements: list[_Placement] = []
    offset = 0
    for index, request in enumerate(requests):
        halves = sorted(buffer.offset_bytes for buffer in buffers if buffer.request == index)
        leading = request.size_bytes // request.shape[0]
        if halves == [0, leading] and request.shape[0] == 2:
            block = next(_block_bytes(buffer, num_blocks) for buffer in buffers if buffer.request == index)
            leading = _round_up(leading, math.lcm(page_bytes, block))
        size = _round_up(leading * request.shape[0], page_bytes)
        placements.append(_Placement(offset, leading, size))
        offset += size
    return placements


def _stripes(
    buffers: Sequence[_Buffer], placements: Sequence[_Placement], requests: Sequence[_Request], num_blocks: int
) -> list[Stripe]:
    stripes = []
    for buffer in buffers:
        block = _block_bytes(buffer, num_blocks)
        stripes.append(Stripe(_offset_of(buffer, placements, requests), block, block))
    return stripes


def _offset_of(buffer: _Buffer, placements: Sequence[_Placement], requests: Sequence[_Request]) -> int:
    placement, request = placements[buffer.request], requests[buffer.request]
    half, rest = divmod(buffer.offset_bytes, request.size_bytes // request.shape[0])
    return placement.offset_bytes + half * placement.leading_stride_bytes + rest


def _block_bytes(buffer: _Buffer, num_blocks: int) -> int:
    rows_per_block, rest = divmod(buffer.num_rows, num_blocks)
    if rest:
        raise UnsupportedError(
            f"a KV buffer has {buffer.num_rows} rows for {num_blocks} pages, so SGLang's layout is unknown to kvcached."
        )
    return rows_per_block * buffer.row_bytes


def _tensor(arena: Arena, request: _Request, placement: _Placement) -> torch.Tensor:
    flat = arena.tensor(placement.offset_bytes, placement.size_bytes).view(request.dtype)
    inner = torch.empty(request.shape[1:], device="meta").stride()
    return flat.as_strided(request.shape, (placement.leading_stride_bytes // request.dtype.itemsize, *inner))


@contextmanager
def _answering(requests: Sequence[_Request], tensors: Sequence[torch.Tensor], pool: Any) -> Iterator[None]:
    """Answer exactly these requests, in this order, each once."""
    left = list(zip(requests, tensors, strict=True))[::-1]

    def answer(request: _Request) -> torch.Tensor:
        if not left or left[-1][0] != request:
            raise UnsupportedError(f"{type(pool).__name__} asks for {request} the second time, not what it did before.")
        return left.pop()[1]

    with _Answers(pool.store_dtype, answer):
        yield
    if left:
        raise UnsupportedError(f"{type(pool).__name__} did not ask for {len(left)} of its tensors the second time.")


def _verify(
    pool: Any,
    buffer_lists: Sequence[str],
    buffers: Sequence[_Buffer],
    placements: Sequence[_Placement],
    arena: Arena,
) -> None:
    """The real tensors are where the geometry says."""
    for tensor, buffer in zip(_tensors(pool, buffer_lists), buffers, strict=True):
        placement = placements[buffer.request]
        start = tensor.data_ptr() - arena.address
        inside = placement.offset_bytes <= start < placement.offset_bytes + placement.size_bytes
        row_bytes = tensor.stride(0) * tensor.element_size()
        if not inside or not tensor.is_contiguous() or row_bytes != buffer.row_bytes:
            raise UnsupportedError(
                f"a KV buffer of {type(pool).__name__} lies at byte {start} of its arena with rows of {row_bytes} "
                f"bytes, where kvcached planned {placement} with rows of {buffer.row_bytes}."
            )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
