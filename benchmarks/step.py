"""What kvcached adds to one scheduling step of vLLM, and how that grows with the size of the block pool.

    python -m benchmarks.step --out build/bench

Three of vLLM's real schedulers, each in a process of its own, are driven alike, step by step in turn: two stock ones
and an elastic one over a real rank, ledger and arena. All blocks are resident and, but for those in use, filled with
cached prefixes. A step is ``schedule`` and ``update_from_output``; between them the thread sleeps for a moment, as an
engine waits for its device, and the agent has its turns.

The whole run is replayed with the same requests, and of each step the shortest time counts, so that what else the
machine does is no part of it. The second stock scheduler says how well that works: ``noise`` is what it "adds".

Written: ``step.json``, a list of one object per pool size with ``blocks``, ``added_us_p50``, ``added_us_p99`` and
``stock_us_p50`` among others, and ``queue.json`` with the time and memory that a million blocks take. Goal: at most
20 us added at the 99th percentile, and no growth with the pool.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from kvcached_core import orders
from kvcached_core.arena import Arena
from kvcached_core.backends import load_backend
from kvcached_core.geometry import Geometry, Stripe
from kvcached_core.ledger import Ledger
from kvcached_core.rank import Rank
from kvcached_vllm.member import order_address
from kvcached_vllm.queue import ElasticFreeQueue
from kvcached_vllm.scheduler import ElasticScheduler
from kvcached_vllm.worker import STEP_ATTRIBUTE
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.models.families import make_shape

POOL_SIZES = (1_000, 100_000, 1_000_000)
GOAL_US = 20.0

BLOCK_TOKENS = 16
BLOCK_BYTES = 256  # of the arena: small, so that a million resident blocks fit a small machine
PAGE_BYTES = 4096  # 16 blocks: an extent, as where an 8B model keeps 32 MiB pages

# The same load on every pool: it fits 1,000 blocks. A request takes 20 blocks on average and gives back as many.
RUNNING = 24
PROMPT_TOKENS = range(128, 384)
OUTPUT_TOKENS = 64
SHARED_PREFIXES = 4  # every other prompt begins with 96 tokens that others begin with too
WARM_UP_STEPS = 200
MODEL_SECONDS = 0.0005


class Load:
    """Requests without end, the same for everyone that asks with the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._prefixes = [self._tokens(96) for _ in range(SHARED_PREFIXES)]
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def next(self) -> Request:
        number = next(self._numbers)
        prompt = self._tokens(self._random.choice(PROMPT_TOKENS))
        if number % 2:
            prompt[:96] = self._random.choice(self._prefixes)
        return Request(
            str(number),
            prompt,
            SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
            None,
            block_hasher=self._hasher,
        )

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(1000) for _ in range(number)]


class Driven:
    """One scheduler under the load, a step at a time.

    Attributes:
        after_step: Called with the number of a step when it is launched.
    """

    def __init__(self, scheduler: Scheduler, after_step: Callable[[int], None] = lambda step: None) -> None:
        self.scheduler = scheduler
        self.preemptions = 0
        self._load = Load(seed=1)
        self.after_step = after_step

    def facts(self) -> dict[str, Any]:
        """What else is worth knowing of it at the end."""
        facts: dict[str, Any] = {"preemptions": self.preemptions}
        if isinstance(self.scheduler, ElasticScheduler):
            agent = self.scheduler.agent_statistics
            facts |= {"longest_hold_us": round(agent.longest_hold_seconds * 1e6, 1), "waits": agent.waits}
        return facts

    def step(self) -> float:
        """Keep `RUNNING` requests going for one step; the microseconds that the scheduler itself took."""
        while len(self.scheduler.requests) < RUNNING:
            self.scheduler.add_request(self._load.next())
        started = time.perf_counter_ns()
        output = self.scheduler.schedule()
        scheduled = time.perf_counter_ns()
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        answer = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        self.after_step(getattr(output, STEP_ATTRIBUTE, 0))
        self.work()
        answered = time.perf_counter_ns()
        self.scheduler.update_from_output(output, answer)
        self.preemptions += len(output.preempted_req_ids or ())
        return (scheduled - started + time.perf_counter_ns() - answered) / 1000

    def work(self) -> None:
        """What the thread does while its device computes the step."""
        time.sleep(MODEL_SECONDS)


class FillingScheduler(ElasticScheduler):
    """Asks for every block there is, until it is told that it has enough."""

    filling = True

    def wanted_blocks(self) -> int:
        return self.kv_cache_config.num_blocks if self.filling else super().wanted_blocks()

    def busy(self) -> bool:
        return self.filling or super().busy()

    def await_all_extents(self, deadline_seconds: float = 120.0) -> None:
        extents = self.kv_cache_manager.block_pool.free_block_queue.extents
        deadline = time.monotonic() + deadline_seconds
        while extents.num_resident < extents.num_extents:
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {deadline_seconds:.0f} s: {extents!r}")
            time.sleep(0.01)

    def has_enough(self) -> AbstractContextManager[Any]:
        """From now on; while entered, the agent waits."""
        self.filling = False
        return self._lock


def configuration(model: Path, num_blocks: int) -> tuple[VllmConfig, KVCacheConfig]:
    """Of an engine with so many blocks."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), max_model_len=2048, skip_tokenizer_init=True, dtype="bfloat16"),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=RUNNING, max_num_batched_tokens=2048, max_model_len=2048, is_encoder_decoder=False
        ),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=4, dtype=config.model_config.dtype)
    return config, KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def make(kind: type[Scheduler], config: VllmConfig, kv_cache_config: KVCacheConfig) -> Any:
    """A scheduler as the engine core makes it."""
    return kind(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


@contextmanager
def stock(model: Path, num_blocks: int, runtime_dir: Path) -> Iterator[Driven]:
    """A stock scheduler."""
    scheduler = make(Scheduler, *configuration(model, num_blocks))
    fill_cache(scheduler)
    yield Driven(scheduler)


@contextmanager
def elastic(model: Path, num_blocks: int, runtime_dir: Path) -> Iterator[Driven]:
    """An elastic scheduler over a real rank of this process, all of its extents mapped."""
    config, kv_cache_config = configuration(model, num_blocks)
    arena_bytes = num_blocks * BLOCK_BYTES
    backend = load_backend("host", budget_bytes=2 * arena_bytes + (64 << 20))
    stripe = Stripe(0, BLOCK_BYTES, BLOCK_BYTES)
    geometry = Geometry.choose(
        [stripe], num_blocks, arena_bytes, granularity_bytes=backend.granularity_bytes, page_bytes=PAGE_BYTES
    )
    total_bytes = backend.memory().total_bytes
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger.open("host", total_bytes, runtime_dir=runtime_dir)))
        account = ledger.join("step", engine="benchmark", ceiling_bytes=total_bytes)
        arena = Arena(backend, geometry.size_bytes, geometry.page_bytes)
        rank = stack.enter_context(closing(Rank(arena, geometry, account, backend, index=0)))
        rank.pin(range(1))
        address = order_address(config, 0)
        orders.offer(address, rank, local=True)
        stack.callback(orders.withdraw, address)
        scheduler = make(FillingScheduler, config, kv_cache_config)
        stack.callback(scheduler.shutdown)
        scheduler.await_all_extents()
        with scheduler.has_enough():
            fill_cache(scheduler)
        yield Driven(scheduler, rank.note_step)


def fill_cache(scheduler: Scheduler) -> None:
    """Give every block cached content, as a server has that has run for long."""
    pool = scheduler.kv_cache_manager.block_pool
    hashes = (BlockHash(number.to_bytes(32, "big")) for number in itertools.count(1))
    for _ in range(pool.num_gpu_blocks // 20):
        blocks = pool.get_new_blocks(20)
        request: Any = SimpleNamespace(block_hashes=[next(hashes) for _ in blocks])
        pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK_TOKENS, 0)
        pool.free_blocks(reversed(blocks))


KINDS = {"stock": stock, "noise": stock, "elastic": elastic}


def serve(connection: Connection, kind: str, model: Path, runtime_dir: Path) -> None:
    """A process with one scheduler of a kind: made anew on ``int``, driven for a step on ``None``."""
    os.environ["KVCACHED_RUNTIME_DIR"] = str(runtime_dir)
    init_none_hash(sha256)
    with ExitStack() as stack:
        while (num_blocks := connection.recv()) is not None:
            driven = stack.enter_context(KINDS[kind](model, num_blocks, runtime_dir))
            gc.collect()
            gc.freeze()  # as the engine core does once it is set up
            connection.send(num_blocks)
            while connection.recv():
                connection.send(driven.step())
            connection.send(driven.facts())
            gc.unfreeze()
            stack.close()


class Schedulers:
    """The three, in processes of their own."""

    def __init__(self, model: Path, runtime_dir: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connections = {}
        for kind in KINDS:
            self._connections[kind], theirs = spawn.Pipe()
            spawn.Process(target=serve, args=(theirs, kind, model, runtime_dir), daemon=True).start()

    def replay(self, num_blocks: int, steps: int, seed: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Give each its steps, in an order that changes with every step; the microseconds of each, and the facts."""
        self._ask_all(num_blocks)
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        turns, order = list(self._connections.items()), random.Random(seed)
        for step in range(WARM_UP_STEPS + steps):
            order.shuffle(turns)
            for kind, connection in turns:
                connection.send(True)
                taken = connection.recv()
                if step >= WARM_UP_STEPS:
                    times[kind].append(taken)
        return times, self._ask_all(False)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.send(None)

    def _ask_all(self, question: object) -> dict[str, Any]:
        for connection in self._connections.values():
            connection.send(question)
        return {kind: connection.recv() for kind, connection in self._connections.items()}


def measure(schedulers: Schedulers, num_blocks: int, steps: int, replays: int) -> dict[str, Any]:
    """Replay one load on all three; the shortest time of each step counts."""
    shortest: dict[str, list[float]] = {}
    for replay in range(replays):
        times, facts = schedulers.replay(num_blocks, steps, seed=replay)
        for kind, values in times.items():
            shortest[kind] = [min(pair) for pair in zip(values, shortest.get(kind, values), strict=True)]
    more = {
        name: [theirs - stock for theirs, stock in zip(shortest[kind], shortest["stock"], strict=True)]
        for name, kind in (("added", "elastic"), ("noise", "noise"))
    }
    figures: dict[str, Any] = {"blocks": num_blocks}
    for name, values in (*more.items(), ("stock", shortest["stock"]), ("elastic", shortest["elastic"])):
        figures[f"{name}_us_p50"] = round(statistics.median(values), 2)
        figures[f"{name}_us_p99"] = round(percentile(values, 99), 2)
    return figures | {"steps": steps, "replays": replays, "running": RUNNING, "facts": facts}


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def cost_of_blocks(num_blocks: int = 1_000_000) -> dict[str, Any]:
    """Time and memory that the queue takes for so many blocks, beside what vLLM's own pool takes for them."""
    tracemalloc.start()
    started = time.perf_counter()
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    pool_seconds, pool_bytes = time.perf_counter() - started, tracemalloc.get_traced_memory()[0]
    started = time.perf_counter()
    queue = ElasticFreeQueue(pool, BLOCK_TOKENS)
    seconds, num_bytes = time.perf_counter() - started, tracemalloc.get_traced_memory()[0] - pool_bytes
    pool.free_block_queue = queue
    queue.arrived(queue.take_absent(queue.extents.num_extents))
    resident_bytes = tracemalloc.get_traced_memory()[0] - pool_bytes
    tracemalloc.stop()
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    started = time.perf_counter()
    ElasticFreeQueue(pool, BLOCK_TOKENS)
    seconds = time.perf_counter() - started
    return {
        "blocks": num_blocks,
        "start_seconds": round(seconds, 3),
        "queue_bytes": num_bytes,
        "queue_bytes_all_resident": resident_bytes,
        "vllm_pool_bytes": pool_bytes,
        "vllm_pool_start_seconds_traced": round(pool_seconds, 3),
    }


def table(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| blocks | stock p50 us | stock p99 | added p50 us | added p99 | noise p50 | noise p99 | goal |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in results:
        verdict = "met" if row["added_us_p99"] <= GOAL_US else "missed"
        figures = ("stock_us_p50", "stock_us_p99", "added_us_p50", "added_us_p99", "noise_us_p50", "noise_us_p99")
        yield f"| {row['blocks']:,} | " + " | ".join(f"{row[name]:.1f}" for name in figures) + f" | {verdict} |"


def main() -> int:
    """Measure every pool size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--replays", type=int, default=12)
    parser.add_argument("--blocks", type=int, nargs="+", default=list(POOL_SIZES))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        model = Path(scratch, "model")
        make_shape(model)
        with closing(Schedulers(model, Path(scratch))) as schedulers:
            for num_blocks in arguments.blocks:
                results.append(measure(schedulers, num_blocks, arguments.steps, arguments.replays))
    (out / "step.json").write_text(json.dumps(results, indent=1))
    blocks = cost_of_blocks()
    (out / "queue.json").write_text(json.dumps(blocks, indent=1))
    print("\n".join(table(results)))
    ours, theirs = (blocks[name] / 1e6 for name in ("queue_bytes_all_resident", "vllm_pool_bytes"))
    print(
        f"A million blocks: the queue starts in {blocks['start_seconds']:.2f} s and takes {ours:.1f} MB; vLLM's own "
        f"pool takes {theirs:.0f} MB."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
