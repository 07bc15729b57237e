"""From vLLM's KV cache configuration to stripes, and the check of real tensors against them.

From 0.30.0 on, vLLM places every layer in one backing allocation: layer ``l`` of block ``b`` starts at
``offset + l * layer_stride + b * block_stride`` (``KVCacheTensor``). That and the number of blocks say all;
no attention backend is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcached_core.errors import UnsupportedError
from kvcached_core.geometry import Geometry, Stripe, merge_stripes

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor


def kv_cache_stripes(kv_cache_config: KVCacheConfig) -> tuple[Stripe, ...]:
    """Where the KV cache keeps every block, as few stripes as there are.

    Block-outermost layouts (``BLHNC``, ``BLNHC``, ``BHLNC``) are one stripe: a block is one run that holds
    all layers of whatever group owns it. Layer-outermost ones are a stripe per layer (``LBHNC``,
    ``LBNHC``), or per layer and head (``LHBNC``). Groups of a hybrid model lie on one another.

    Raises:
        UnsupportedError: The configuration does not say where blocks are, or keeps some on the host.
    """
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        raise UnsupportedError("This model has no KV cache; there is nothing for kvcached to do.")
    if hosted := [name for tensor in tensors if tensor.host_resident for name in tensor.layers]:
        raise UnsupportedError(f"KV cache on the host (HiSparse) is not supported; layers {hosted[:3]} are kept there.")
    return merge_stripes(stripe for tensor in tensors for stripe in _tensor_stripes(tensor, kv_cache_config.num_blocks))


def kv_cache_geometry(
    kv_cache_config: KVCacheConfig,
    *,
    granularity_bytes: int,
    page_bytes: int | None = None,
    target_extent_bytes: int | None = None,
) -> Geometry:
    """The geometry of one process's KV cache; scheduler and worker derive the same from the same configuration.

    Args:
        kv_cache_config: As the engine core sends it to this process.
        granularity_bytes: Of the device.
        page_bytes: ``KVCACHED_PAGE_SIZE``, or None for a chosen size.
        target_extent_bytes: As for ``Geometry.choose``.

    Raises:
        UnsupportedError: See ``kv_cache_stripes``.
        ConfigError: ``page_bytes`` is not a multiple of the granularity.
    """
    return Geometry.choose(
        kv_cache_stripes(kv_cache_config),
        kv_cache_config.num_blocks,
        kv_cache_config.kv_cache_tensors[0].size,
        granularity_bytes=granularity_bytes,
        page_bytes=page_bytes,
        target_extent_bytes=target_extent_bytes,
    )


def check_tensors(
    geometry: Geometry, address: int, layers: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> None:
    """Compare the tensors that attention really uses with the geometry.

    Every block must lie where the geometry says that it does, or memory would be unmapped under a block
    in use. Blocks lie at equal strides, so the first two and the last speak for all.

    Args:
        geometry: Derived from the configuration.
        address: Of the arena.
        layers: What each layer was bound to (its ``kv_cache``): tensors whose first dimension is the
            block, or a block's kernel blocks.

    Raises:
        UnsupportedError: Names the first layer, block and bytes that lie elsewhere.
    """
    for name, bound in layers.items():
        for tensor in bound if isinstance(bound, (tuple, list)) else (bound,):
            _check_tensor(geometry, address, name, tensor)


_BLOCK_MAJOR_LIKE = {"LBNHC": "BLNHC", "LBHNC": "BLHNC"}


def prefer_block_major(names: Sequence[str], backends: Iterable[Any], block_size: int) -> list[str]:
    """vLLM's layouts with the block-major one that keeps blocks as they are inside put first, if kernels take it.

    Block-major makes an extent one page instead of one per layer, and costs the kernels nothing (H200, FlashAttention
    3, Llama-8B shape: 14.81 ms a step against 14.83). But vLLM never splits its blocks there
    (``prepare_kernel_block_sizes``), so every backend must take the manager's block size whole.

    Args:
        names: What every attention backend supports, most preferred first.
        backends: The model's attention backends.
        block_size: Tokens in a block.
    """
    wanted = _BLOCK_MAJOR_LIKE.get(names[0])
    if wanted not in names or not all(_takes_whole(backend, block_size) for backend in backends):
        return list(names)
    return [wanted, *(name for name in names if name != wanted)]


def _takes_whole(backend: Any, block_size: int) -> bool:
    """Whether kernels take blocks of this size without splitting them: an exact size, or a multiple of a base."""
    sizes = backend.get_supported_kernel_block_sizes()
    return any(block_size == size if isinstance(size, int) else block_size % size.base == 0 for size in sizes)


def bound_tensors(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, Any]
) -> dict[str, torch.Tensor | Sequence[torch.Tensor]]:
    """What vLLM has bound to each layer that has a view of its own.

    Args:
        kv_cache_config: Of this process.
        layers: The static forward context.
    """
    viewed = {
        name
        for group in kv_cache_config.kv_cache_groups
        if group.kv_cache_spec.has_layer_views
        for name in group.layer_names
    }
    return {
        name: layers[name].kv_cache
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
        if name in viewed and name in layers
    }


def _tensor_stripes(tensor: KVCacheTensor, num_blocks: int) -> Iterator[Stripe]:
    if tensor.block_stride * num_blocks == tensor.size:
        yield Stripe(0, tensor.block_stride, tensor.block_stride)
        return
    # A layer is one plane of all its blocks, or one per head.
    plane_bytes = tensor.block_stride * num_blocks
    num_planes, rest = divmod(tensor.layer_stride, plane_bytes)
    if rest or not num_planes:
        raise UnsupportedError(
            f"KV cache of layer {tensor.layers[0]} has layer stride {tensor.layer_stride} and block stride "
            f"{tensor.block_stride} for {num_blocks} blocks in {tensor.size} bytes: neither block- nor "
            "layer-outermost. Set VLLM_KV_CACHE_LAYOUT to BLHNC or LBNHC, or report this layout."
        )
    for layer, plane in itertools.product(range(len(tensor.layers)), range(num_planes)):
        offset = tensor.offset + layer * tensor.layer_stride + plane * plane_bytes
        yield Stripe(offset, tensor.block_stride, tensor.block_stride)


def _check_tensor(geometry: Geometry, address: int, name: str, tensor: torch.Tensor) -> None:
    kernel_blocks, rest = divmod(tensor.shape[0], geometry.num_blocks)
    if rest or not kernel_blocks:
        raise UnsupportedError(
            f"KV cache of layer {name} has shape {tuple(tensor.shape)}; its first dimension is no multiple of "
            f"the {geometry.num_blocks} blocks that the geometry has."
        )
    for block_id in sorted({0, min(1, geometry.num_blocks - 1), geometry.num_blocks - 1}):
        expected = geometry.byte_ranges(range(block_id, block_id + 1))
        part = tensor[block_id * kernel_blocks : (block_id + 1) * kernel_blocks]
        for start, stop in _byte_runs(part):
            found = (start - address, stop - address)
            if not any(first <= found[0] and found[1] <= last for first, last in expected):
                raise UnsupportedError(
                    f"KV cache of layer {name} keeps block {block_id} at bytes {found[0]} to {found[1]} of the arena "
                    f"({geometry.size_bytes} bytes), where the geometry has {_listed(expected)}. Shape "
                    f"{tuple(tensor.shape)}, strides {tensor.stride()} of {tensor.element_size()} bytes."
                )


def _byte_runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The bytes that a tensor covers, as contiguous runs of addresses."""
    item = tensor.element_size()
    run, outer = item, []
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (dim[1], dim[0])):
        if not outer and stride * item == run:
            run *= size
        elif size > 1:
            outer.append([index * stride * item for index in range(size)])
    for offsets in itertools.product(*outer):
        start = tensor.data_ptr() + sum(offsets)
        yield start, start + run


def _listed(ranges: Iterable[tuple[int, int]]) -> str:
    shown = [f"{start} to {stop}" for start, stop in ranges]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")
