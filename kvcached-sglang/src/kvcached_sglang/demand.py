"""What the scheduler's next steps take, read from its queues; the same on every rank of a group.

The bound on one step must hold: an allocation that finds no page ends SGLang's scheduler, and so does one for the
rest of a prompt that was admitted and prefills in chunks. It is never read from anything that another rank could see
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sglang.srt.beam_search.batch_tail import num_beam_member_rows
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

AHEAD_STEPS = 64
"""Decoding steps that free pages are kept for. Growth is ordered once fewer are left, so it has about so many steps'
time; at 10 ms a step that is far more than mapping takes."""

AHEAD_PREFILLS = 4
"""Steps of prefilling, of what waits, that pages are mapped for while the step before computes."""

MAX_REQUESTS = 1024
"""Waiting requests looked at. SGLang serves a longer queue first come, first served, so the others wait behind
these."""


@dataclass(frozen=True)
class Demand:
    """In tokens.

    Attributes:
        decode: What running requests allocate in the next step, at most.
        prefill: Whole prompts that the next step may begin, and the rest of one that is being prefilled.
        chunk: What of ``prefill`` one step allocates.
        pledged: The rest of a prompt that is being prefilled: it has been admitted, so it must find room.
        ahead: What running requests write, and waiting ones prefill, in the steps after the next.
        head_prompt: Prompt of the request that is admitted first; 0 if that is not known.
        head_total: The same with all that it may generate.
        running: Requests decoding.
        waiting: Requests not begun.
    """

    decode: int = 0
    prefill: int = 0
    chunk: int = 0
    pledged: int = 0
    ahead: int = 0
    head_prompt: int = 0
    head_total: int = 0
    running: int = 0
    waiting: int = 0

    @property
    def busy(self) -> bool:
        """Anything runs or waits."""
        return bool(self.running or self.waiting or self.pledged)


IDLE = Demand()


@dataclass(frozen=True)
class _Queue:
    """What matters of the waiting requests."""

    prompts: int = 0
    longest: int = 0
    head_prompt: int = 0
    head_total: int = 0


class DemandReader:
    """Reads one scheduler's demand at every tick.

    Args:
        scheduler: SGLang's ``Scheduler``.
    """

    def __init__(self, scheduler: Any) -> None:
        args = scheduler.server_args
        self._drafts = args.speculative_algorithm is not None
        self._scheduler = scheduler
        self._page_size: int = scheduler.page_size
        self._max_running: int = scheduler.max_running_requests
        chunk = scheduler.chunked_prefill_size
        self._chunked = chunk is not None and chunk > 0
        self._prefill_limit: int = chunk if self._chunked else scheduler.max_prefill_tokens
        self._in_order = args.schedule_policy == "fcfs" and not args.enable_priority_scheduling
        self._queue_seen: tuple[int, int, int] = (0, 0, 0)
        self._queue = _Queue()

    @property
    def chunk_tokens(self) -> int:
        """What one step allocates of a prompt at most; one that is not cut is limited by the capacity alone."""
        return (self._prefill_limit if self._chunked else self._scheduler.max_total_num_tokens) + self.margin_tokens

    @property
    def margin_tokens(self) -> int:
        """What one request takes at most beyond its prompt before it has generated anything."""
        return 2 * (self._page_size + self._per_step)

    @property
    def _per_step(self) -> int:
        """A speculative step allocates for all drafted tokens before it knows how many stay. The bound may change."""
        return int(get_alloc_reserve_per_decode()) if self._drafts else 1

    def read(self, running_batch: Any, last_batch: Any) -> Demand:
        """The demand at this tick.

        Args:
            running_batch, last_batch: As ``get_next_batch_to_run`` gets them; a batch that has just prefilled joins
                the running one in the step to come.
        """
        scheduler = self._scheduler
        waiting, chunked = scheduler.waiting_queue, scheduler.chunked_req
        decoding = running_batch.reqs
        if last_batch is not None and last_batch is not running_batch and last_batch.forward_mode.is_extend():
            decoding = [*decoding, *last_batch.reqs]
        running = len(decoding)
        if not running and not waiting and chunked is None:
            return IDLE
        queue = self._read_queue(waiting)
        starting = min(len(waiting), max(0, self._max_running - running))
        per_step = self._per_step
        rows = num_beam_member_rows(decoding)  # a beam writes a token a step, in pages of one token
        margin = (starting + 1) * (self._page_size + per_step)
        pledged = max(0, _length(chunked) - chunked.kv.kv_allocated_len) + margin if chunked is not None else 0
        begun = min(queue.prompts, self._prefill_limit + queue.longest)
        prompts = begun + margin if starting else 0
        later = min(queue.prompts - begun, AHEAD_PREFILLS * self._prefill_limit) if starting else 0
        prefill = pledged + prompts
        first_is_known = bool(waiting) and chunked is None and (len(waiting) == 1 or self._in_order)
        return Demand(
            decode=running * (self._page_size + per_step) + rows,
            prefill=prefill,
            chunk=min(prefill, self._prefill_limit + margin) if self._chunked else prefill,
            pledged=pledged,
            ahead=(running * per_step + rows) * AHEAD_STEPS + later,
            head_prompt=queue.head_prompt + self.margin_tokens if first_is_known else 0,
            head_total=queue.head_total + self.margin_tokens if first_is_known else 0,
            running=running,
            waiting=len(waiting),
        )

    def _read_queue(self, waiting: Sequence[Any]) -> _Queue:
        """Lengths in the queue; read anew only when it has changed."""
        if not waiting:
            return _Queue()
        seen = (len(waiting), id(waiting[0]), id(waiting[-1]))
        if seen != self._queue_seen:
            lengths = [_length(request) for request in islice(waiting, MAX_REQUESTS)]
            head_new = waiting[0].sampling_params.max_new_tokens
            self._queue_seen = seen
            self._queue = _Queue(sum(lengths), max(lengths), lengths[0], lengths[0] + head_new)
        return self._queue


def _length(request: Any) -> int:
    """Tokens to prefill, cached prefix or not; a request that was retracted has generated some already."""
    return len(request.origin_input_ids) + len(request.output_ids)
