"""SGLang's own pools over arenas: same shapes and strides, memory only where extents are mapped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvcached_core.backends.host import HostBackend
from kvcached_core.errors import UnsupportedError
from kvcached_sglang.placement import LAYER_MAJOR, PLACES, TOKEN_MAJOR
from kvcached_sglang.pools import ElasticPool, create_elastic_buffers
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

MHA = ("k_buffer", "v_buffer")
MLA = ("kv_buffer",)


def make_mha(**changed: Any) -> MHATokenToKVPool:
    arguments: dict[str, Any] = {
        "size": 4096,
        "page_size": 1,
        "dtype": torch.float16,
        "head_num": 2,
        "head_dim": 16,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return MHATokenToKVPool(**(arguments | changed))


def make_mla(**changed: Any) -> MLATokenToKVPool:
    arguments: dict[str, Any] = {
        "size": 4096,
        "page_size": 1,
        "dtype": torch.bfloat16,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 8,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    return MLATokenToKVPool(**(arguments | changed))


def rebuild(pool: Any, **options: Any) -> ElasticPool:
    """Allocate the buffers of a native pool anew, over an arena."""
    is_mha = isinstance(pool, MHATokenToKVPool)
    create = MHATokenToKVPool._create_buffers_normal if is_mha else MLATokenToKVPool._create_buffers
    options = {"page_bytes": None, "guard": True, "layout": LAYER_MAJOR} | options
    return create_elastic_buffers(create, pool, MHA if is_mha else MLA, HostBackend(1 << 30), **options)


@pytest.fixture
def elastic() -> Iterator[Callable[..., ElasticPool]]:
    made: list[ElasticPool] = []

    def build(pool: Any, **options: Any) -> ElasticPool:
        made.append(rebuild(pool, **options))
        return made[-1]

    yield build
    for pool in made:
        pool.arena.close()


POOLS = {
    "one token a page": lambda: make_mha(),
    "64 tokens a page": lambda: make_mha(page_size=64),
    "fp8": lambda: make_mha(dtype=torch.float8_e4m3fn),
    "unequal heads": lambda: make_mha(head_dim=24, v_head_dim=16),
    "three heads": lambda: make_mha(head_num=3, head_dim=20),
    "MLA": lambda: make_mla(),
    "MLA, 64 tokens a page": lambda: make_mla(page_size=64),
    "MLA, fp8": lambda: make_mla(dtype=torch.float8_e4m3fn),
}
ODD = {"three heads": 120, "MLA, fp8": 72}
"""Those whose rows are no multiple of 16 bytes, which token-major pools cannot have, with the rows' bytes."""
EITHER_WAY = [(name, layout) for name in POOLS for layout in PLACES if layout == LAYER_MAJOR or name not in ODD]


@pytest.mark.parametrize("name", POOLS)
def test_buffers_have_the_native_shapes_strides_and_types(name, elastic):
    pool = POOLS[name]()
    lists = MHA if isinstance(pool, MHATokenToKVPool) else MLA
    native = [(t.shape, t.stride(), t.dtype) for attribute in lists for t in getattr(pool, attribute)]
    elastic(pool)
    assert [(t.shape, t.stride(), t.dtype) for attribute in lists for t in getattr(pool, attribute)] == native


@pytest.mark.parametrize("name", [name for name in POOLS if name not in ODD])
def test_token_major_buffers_differ_from_native_ones_in_the_distance_of_rows_alone(name, elastic):
    pool = POOLS[name]()
    lists = MHA if isinstance(pool, MHATokenToKVPool) else MLA
    native = [t for attribute in lists for t in getattr(pool, attribute)]
    made = elastic(pool, layout=TOKEN_MAJOR)
    buffers = [t for attribute in lists for t in getattr(pool, attribute)]
    assert [(t.shape, t.dtype, t[0].stride()) for t in buffers] == [(t.shape, t.dtype, t[0].stride()) for t in native]
    [entry_bytes] = {t.stride(0) * t.element_size() for t in buffers}
    assert entry_bytes == made.bytes_per_token
    assert sum(t[0].nbytes for t in native) <= entry_bytes < sum(t[0].nbytes for t in native) + 32
    assert {t.data_ptr() % 16 for t in buffers} == {0}


@pytest.mark.parametrize(("name", "layout"), EITHER_WAY)
def test_a_block_is_where_the_geometry_says(name, layout, elastic):
    """Mapped block by block, every row can be written, and no byte of another block is touched."""
    pool = POOLS[name]()
    made = elastic(pool, layout=layout)
    geometry = made.geometry
    extent = geometry.num_extents // 2
    made.arena.map(geometry.page_ranges(geometry.blocks_of(extent)))
    tokens = geometry.blocks_of(extent)
    rows = slice(tokens.start * made.tokens_per_block, tokens.stop * made.tokens_per_block)
    buffers = [*pool.k_buffer, *pool.v_buffer] if isinstance(pool, MHATokenToKVPool) else pool.kv_buffer
    for number, buffer in enumerate(buffers, 1):
        buffer[rows] = number
    for number, buffer in enumerate(buffers, 1):
        assert bool((buffer[rows] == number).all())


@pytest.mark.parametrize("name", ODD)
def test_rows_that_kernels_cannot_write_in_vectors_cannot_be_token_major(name):
    with pytest.raises(UnsupportedError, match=f"row of {ODD[name]} bytes is no multiple of 16"):
        rebuild(POOLS[name](), layout=TOKEN_MAJOR)


def test_a_page_whose_heads_lie_together_cannot_be_token_major():
    pool = make_mha(page_size=64)
    pool.use_hnd, pool.num_pages = True, 65
    with pytest.raises(UnsupportedError, match="not the rows of 4160 tokens"):
        rebuild(pool, layout=TOKEN_MAJOR)


def test_every_layers_rows_of_every_token_are_read_back_as_they_were_written(elastic):
    """Against plain tensors: writes to scattered tokens, layer by layer, as an engine makes them."""
    pool = make_mha(size=256, page_size=16, head_dim=24, v_head_dim=16)
    made = elastic(pool, layout=TOKEN_MAJOR)
    made.arena.map(made.geometry.page_ranges(range(made.geometry.num_blocks)))
    generator = torch.Generator().manual_seed(0)
    plain = [[torch.zeros(t.shape, dtype=t.dtype) for t in buffers] for buffers in (pool.k_buffer, pool.v_buffer)]
    for _ in range(40):
        tokens = torch.randperm(272, generator=generator)[:50]
        for buffers, copies in zip((pool.k_buffer, pool.v_buffer), plain, strict=True):
            for buffer, copy in zip(buffers, copies, strict=True):
                copy[tokens] = buffer[tokens] = torch.randn((50, *copy.shape[1:]), generator=generator).half()
    for buffers, copies in zip((pool.k_buffer, pool.v_buffer), plain, strict=True):
        assert all(torch.equal(buffer, copy) for buffer, copy in zip(buffers, copies, strict=True))


@pytest.mark.parametrize(("name", "layout"), EITHER_WAY)
def test_sglangs_own_methods_write_read_copy_and_move_tokens(name: str, layout: str, elastic):
    pool = POOLS[name]()
    made = elastic(pool, layout=layout)
    made.arena.map(made.geometry.page_ranges(range(made.geometry.num_blocks)))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([3, 200, 77, 4090])
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0):
        for number in range(3):
            layer = SimpleNamespace(layer_id=number, k_scale=None, v_scale=None)
            key, value = (
                torch.randn((4, *buffer.shape[1:]), generator=generator).to(pool.dtype)
                for buffer in pool.get_kv_buffer(number)
            )
            if isinstance(pool, MLATokenToKVPool):
                value = key[..., : pool.kv_lora_rank]
            pool.set_kv_buffer(layer, tokens, key, value)
            found = [buffer[tokens].float() for buffer in pool.get_kv_buffer(number)]
            assert torch.equal(found[0], key.float())
            assert torch.equal(found[1], value.float())
        pool.load_cpu_copy(pool.get_cpu_copy(tokens), tokens + 1)
        pool.use_native_move_kv_cache = True  # the other is a Triton kernel, for speculative decoding
        pool.move_kv_cache(tokens - 2, tokens + 1)
    for number in range(3):
        for buffer in pool.get_kv_buffer(number):
            written = buffer[tokens].float()
            assert torch.equal(buffer[tokens + 1].float(), written)
            assert torch.equal(buffer[tokens - 2].float(), written)


@pytest.mark.parametrize("name", ["one token a page", "64 tokens a page", "fp8"])
@pytest.mark.parametrize("layout", PLACES)
def test_extents_are_whole_pages_where_rows_are_powers_of_two(name, layout, elastic):
    made = elastic(POOLS[name](), layout=layout)
    assert not made.geometry.extents_share_pages


@pytest.mark.parametrize("layout", PLACES)
def test_nothing_is_resident_before_it_is_mapped(layout, elastic):
    made = elastic(make_mha(), layout=layout)
    assert made.arena.resident_bytes == 0
    made.arena.map(made.geometry.page_ranges(made.geometry.blocks_of(0)))
    assert made.arena.resident_bytes == made.geometry.extent_bytes


def test_new_memory_is_zero(elastic):
    pool = make_mha()
    made = elastic(pool)
    pages = made.geometry.page_ranges(made.geometry.blocks_of(0))
    made.arena.map(pages)
    pool.k_buffer[0][:8] = 7
    made.arena.unmap(pages)
    made.arena.map(pages)
    assert not pool.k_buffer[0][:8].any()


def test_a_pool_that_allocates_otherwise_is_refused_with_nothing_reserved():
    pool = make_mha()

    def create(pool: Any) -> None:
        pool.k_buffer = [torch.zeros((8, 2), dtype=torch.float16, device="cpu") for _ in range(3)]
        pool.v_buffer = [torch.ones((8, 2), dtype=torch.float16) for _ in range(3)]

    with pytest.raises(UnsupportedError, match="no contiguous part of a tensor it asked for"):
        create_elastic_buffers(create, pool, MHA, HostBackend(1 << 30), page_bytes=None, guard=True, layout=LAYER_MAJOR)


def test_a_pool_that_asks_for_something_else_the_second_time_is_refused():
    pool, calls = make_mha(), []

    def create(pool: Any) -> None:
        calls.append(1)
        pool.k_buffer = [torch.zeros((4097, len(calls)), dtype=torch.float16, device="cpu")]
        pool.v_buffer = []

    with pytest.raises(UnsupportedError, match="not what it did before"):
        create_elastic_buffers(create, pool, MHA, HostBackend(1 << 30), page_bytes=None, guard=True, layout=LAYER_MAJOR)


@pytest.mark.parametrize("layout", PLACES)
def test_a_pool_that_takes_other_views_the_second_time_is_refused(layout: str):
    pool, calls = make_mha(), []

    def create(pool: Any) -> None:
        calls.append(1)
        MHATokenToKVPool._create_buffers_normal(pool)
        if len(calls) == 2:
            pool.k_buffer, pool.v_buffer = pool.v_buffer, pool.k_buffer

    with pytest.raises(UnsupportedError, match="where kvcached placed"):
        create_elastic_buffers(create, pool, MHA, HostBackend(1 << 30), page_bytes=None, guard=True, layout=layout)


def test_a_draft_pool_is_cut_like_the_target(elastic):
    target = elastic(make_mha())
    cut = {target.geometry.num_blocks: target.geometry.blocks_per_extent}
    draft = elastic(make_mha(layer_num=1), page_bytes=target.arena.page_bytes, blocks_per_extent=cut)
    assert draft.geometry.blocks_per_extent == target.geometry.blocks_per_extent


def test_touching_what_is_not_mapped_ends_the_process():
    """The teeth of every test on a CPU: a missing map is a real fault."""
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from tests.sglang import conftest\n"
        "from tests.sglang.test_pools import make_mha, rebuild\n"
        "pool = make_mha(); rebuild(pool)\n"
        "pool.k_buffer[0][5] = 1.0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    assert done.returncode == -11, done.stderr.decode()[-500:]
