"""Where a pool's tensors lie in its arena: layer after layer, or token after token.

*Layer-major*: each layer's K and V is a tensor of its own, as SGLang has it natively. An extent takes a page of each,
so pages are small. *Token-major*: all rows of one token lie together as one *entry*, and every tensor is a view whose
rows are an entry apart. An extent is one run of bytes, so pages may be as large as it, and cost fewer driver calls.

SGLang has the second order itself, for ``--enable-unified-memory``.

Source: ``sglang/srt/mem_cache/layout/token_major.py``, 0.5.22 and 0.5.23.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

import torch
from kvcached_core.errors import InvariantError, UnsupportedError
from kvcached_core.geometry import Geometry, Stripe

LAYER_MAJOR = "layer-major"
TOKEN_MAJOR = "token-major"

ROW_ALIGN_BYTES = 16
"""Kernels store a token's row in vectors of so many bytes."""
ENTRY_ALIGN_BYTES = 32
"""SGLang's own entries are multiples of it."""


@dataclass(frozen=True)
class Request:
    """One tensor that a pool asks for."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of the tensor, were it contiguous."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Buffer:
    """One layer's K or V: a view of a requested tensor, rows of tokens or of whole blocks.

    Attributes:
        request: Number of the request that it is part of.
        offset_bytes: In a contiguous tensor of that shape.
    """

    request: int
    offset_bytes: int
    row_bytes: int
    num_rows: int


@dataclass(frozen=True)
class Wanted:
    """All that a pool asks for.

    Attributes:
        requests: In the order in which they are made.
        buffers: What the pool makes of them.
        num_blocks: SGLang's pages, the padding page included.
        tokens_per_block: SGLang's page size.
    """

    requests: Sequence[Request]
    buffers: Sequence[Buffer]
    num_blocks: int
    tokens_per_block: int

    def block_bytes(self, buffer: Buffer) -> int:
        """Of one block in one buffer, its rows without a gap.

        Raises:
            UnsupportedError: The rows are no whole number for each block.
        """
        rows_per_block, rest = divmod(buffer.num_rows, self.num_blocks)
        if rest:
            raise UnsupportedError(
                f"a KV buffer has {buffer.num_rows} rows for {self.num_blocks} pages, so SGLang's layout is unknown to "
                "kvcached."
            )
        return rows_per_block * buffer.row_bytes

    def has_halves(self, index: int) -> bool:
        """Whether a request is for a layer's K and V as the halves of one tensor (0.5.23)."""
        request = self.requests[index]
        offsets = sorted(buffer.offset_bytes for buffer in self.buffers if buffer.request == index)
        return request.shape[0] == 2 and offsets == [0, request.size_bytes // 2]


@dataclass(frozen=True)
class Rows:
    """Rows of equal length at equal distances in the arena.

    Attributes:
        offset_bytes: Of the first.
        stride_bytes: From one to the next.
        row_bytes: Of one; what is behind it up to the next is somebody else's.
        num_rows: How many.
    """

    offset_bytes: int
    stride_bytes: int
    row_bytes: int
    num_rows: int

    def is_apart_from(self, other: Rows) -> bool:
        """Whether no byte is in both: one behind the other, or each in the other's gaps."""
        first, second = sorted((self, other), key=lambda rows: rows.offset_bytes)
        if first.offset_bytes + first.row_bytes > second.offset_bytes:
            return False
        if first.offset_bytes + (first.num_rows - 1) * first.stride_bytes + first.row_bytes <= second.offset_bytes:
            return True
        same = first.stride_bytes == second.stride_bytes
        return same and second.offset_bytes + second.row_bytes <= first.offset_bytes + first.stride_bytes

    def blocks_are(self, stripe: Stripe, num_blocks: int) -> bool:
        """Whether each block's rows are within what a stripe says of it."""
        rows_per_block = self.num_rows // num_blocks
        start = self.offset_bytes - stripe.offset_bytes
        stop = start + (rows_per_block - 1) * self.stride_bytes + self.row_bytes
        return start >= 0 and stop <= stripe.length_bytes and rows_per_block * self.stride_bytes == stripe.stride_bytes


@dataclass(frozen=True)
class Placement:
    """Where everything of a pool lies.

    Attributes:
        geometry: Of the arena.
        tensors: For each request, where it begins and its strides in bytes.
        buffers: Where each buffer's rows must then be.
    """

    geometry: Geometry
    tensors: Sequence[tuple[int, tuple[int, ...]]]
    buffers: Sequence[Rows]

    def __post_init__(self) -> None:
        for rows in self.buffers:
            if not any(rows.blocks_are(stripe, self.geometry.num_blocks) for stripe in self.geometry.stripes):
                raise InvariantError(f"{rows} are not where {self.geometry} has its blocks")
        for one, other in combinations(self.buffers, 2):
            if not one.is_apart_from(other):
                raise InvariantError(f"{one} and {other} of one pool overlap")


Place = Callable[[Wanted, int, int | None], Placement]
"""Places what is wanted, for a device's granularity and pages of so many bytes (None: chosen).

Raises `UnsupportedError` where it cannot, `ConfigError` where the pages cannot be."""


# Layer-major


def layer_major(wanted: Wanted, granularity_bytes: int, page_bytes: int | None) -> Placement:
    """Every tensor by itself, one behind the other."""
    page_bytes = page_bytes or _suitable_page(wanted, granularity_bytes)
    runs = _end_to_end(wanted, page_bytes)
    tensors = []
    for request, run in zip(wanted.requests, runs, strict=True):
        tensors.append((run.offset_bytes, (run.leading_stride_bytes, *_contiguous_strides(request)[1:])))
    buffers = [
        Rows(_offset_of(wanted, buffer, runs), buffer.row_bytes, buffer.row_bytes, buffer.num_rows)
        for buffer in wanted.buffers
    ]
    return Placement(_geometry(wanted, runs, granularity_bytes, page_bytes), tensors, buffers)


@dataclass(frozen=True)
class _Run:
    """Where one tensor of its own lies.

    Attributes:
        leading_stride_bytes: Between the tensor's halves, where K and V are one tensor; else as torch would have it.
    """

    offset_bytes: int
    leading_stride_bytes: int
    size_bytes: int


def _suitable_page(wanted: Wanted, granularity_bytes: int) -> int:
    """The page size that suits these buffers laid end to end, rounded so that an extent is whole pages of each."""
    geometry = _geometry(wanted, _end_to_end(wanted, granularity_bytes), granularity_bytes, None)
    whole = math.lcm(granularity_bytes, *(wanted.block_bytes(buffer) for buffer in wanted.buffers))
    return geometry.page_bytes // whole * whole or geometry.page_bytes


def _end_to_end(wanted: Wanted, page_bytes: int) -> list[_Run]:
    """Lay the tensors one after the other, each layer's K and V from a page boundary on.

    Where K and V are halves of one tensor, SGLang only asks that V be whole blocks behind K (its paged kernels count
    blocks from K's base), so the second half moves up to the next page boundary that is a whole number of blocks
    away.
    """
    runs: list[_Run] = []
    offset = 0
    for index, request in enumerate(wanted.requests):
        leading = request.size_bytes // request.shape[0]
        if wanted.has_halves(index):
            block = next(wanted.block_bytes(buffer) for buffer in wanted.buffers if buffer.request == index)
            leading = _round_up(leading, math.lcm(page_bytes, block))
        size = _round_up(leading * request.shape[0], page_bytes)
        runs.append(_Run(offset, leading, size))
        offset += size
    return runs


def _geometry(wanted: Wanted, runs: Sequence[_Run], granularity_bytes: int, page_bytes: int | None) -> Geometry:
    blocks = [(_offset_of(wanted, buffer, runs), wanted.block_bytes(buffer)) for buffer in wanted.buffers]
    return Geometry.choose(
        [Stripe(offset, block, block) for offset, block in blocks],
        wanted.num_blocks,
        sum(run.size_bytes for run in runs),
        granularity_bytes=granularity_bytes,
        page_bytes=page_bytes,
    )


def _offset_of(wanted: Wanted, buffer: Buffer, runs: Sequence[_Run]) -> int:
    run, request = runs[buffer.request], wanted.requests[buffer.request]
    half, rest = divmod(buffer.offset_bytes, request.size_bytes // request.shape[0])
    return run.offset_bytes + half * run.leading_stride_bytes + rest


# Token-major


def token_major(wanted: Wanted, granularity_bytes: int, page_bytes: int | None) -> Placement:
    """All rows of a token together, in the order of the requests: K_0, V_0, K_1 … where a layer's are one request.

    Consecutive tokens' entries follow one another, so a block is its tokens' entries and an extent one run of bytes.
    """
    for index, request in enumerate(wanted.requests):
        _check_rows(wanted, index, request)
    order = sorted(wanted.buffers, key=lambda buffer: (buffer.request, buffer.offset_bytes))
    offsets = list(accumulate((buffer.row_bytes for buffer in order), initial=0))
    entry = _round_up(offsets.pop(), ENTRY_ALIGN_BYTES)
    offset_of = dict(zip(order, offsets, strict=True))
    tensors = []
    for index, request in enumerate(wanted.requests):
        parts = [offset_of[buffer] for buffer in order if buffer.request == index]
        outer = (parts[1] - parts[0], entry) if wanted.has_halves(index) else (entry,)
        tensors.append((parts[0], (*outer, *_contiguous_strides(request)[len(outer) :])))
    block = entry * wanted.tokens_per_block
    geometry = Geometry.choose(
        [Stripe(0, block, block)],
        wanted.num_blocks,
        block * wanted.num_blocks,
        granularity_bytes=granularity_bytes,
        page_bytes=page_bytes,
    )
    buffers = [Rows(offset_of[buffer], entry, buffer.row_bytes, buffer.num_rows) for buffer in wanted.buffers]
    return Placement(geometry, tensors, buffers)


def _check_rows(wanted: Wanted, index: int, request: Request) -> None:
    """A tensor must be every token's rows of one layer's K, of its V or of both, and each row aligned."""
    num_rows = wanted.num_blocks * wanted.tokens_per_block
    buffers = [buffer for buffer in wanted.buffers if buffer.request == index]
    shape = (2, num_rows) if wanted.has_halves(index) else (num_rows,)
    is_all = sum(buffer.row_bytes for buffer in buffers) * num_rows == request.size_bytes
    if request.shape[: len(shape)] != shape or not is_all or any(buffer.num_rows != num_rows for buffer in buffers):
        raise UnsupportedError(
            f"a KV tensor of shape {request.shape} is not the rows of {num_rows} tokens, so tokens cannot lie together."
        )
    for buffer in buffers:
        if buffer.row_bytes % ROW_ALIGN_BYTES:
            raise UnsupportedError(
                f"a token's row of {buffer.row_bytes} bytes is no multiple of {ROW_ALIGN_BYTES}, so tokens cannot lie "
                "together."
            )


PLACES: Mapping[str, Place] = {LAYER_MAJOR: layer_major, TOKEN_MAJOR: token_major}
"""By the name of the layout."""


def _contiguous_strides(request: Request) -> tuple[int, ...]:
    """In bytes."""
    strides = torch.empty(request.shape, device="meta").stride()
    return tuple(stride * request.dtype.itemsize for stride in strides)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
