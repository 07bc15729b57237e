"""What the tick decides, on one rank."""

from __future__ import annotations

import threading

import pytest
from kvcached_core.orders import Map, Retire
from kvcached_sglang.demand import IDLE, Demand
from kvcached_sglang.tick import AGREEMENT_TICKS, REPORT_SECONDS, STEADY_SECONDS, UNDER_WAY_SECONDS
from kvcached_sglang.trimming import CachePolicy

from tests.sglang.fakes import NO_LIMIT, FakeHands, kinds
from tests.sglang.scene import EXTENT_BYTES, EXTENT_TOKENS, Lockstep, Scene, demand, make_space

FREE_AT_START = EXTENT_TOKENS - 1


def test_an_idle_engine_orders_nothing():
    scene = Scene()
    scene.settle()
    assert scene.hands.log == []


def test_what_the_next_step_needs_is_there_before_the_tick_ends():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    assert scene.space.free_tokens >= 1000


def test_growth_takes_the_lowest_extents_in_one_order():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    [order] = scene.hands.log
    assert isinstance(order, Map)
    assert order.block_ranges == ((1, 16),)


def test_steps_ahead_are_mapped_without_waiting():
    scene = Scene()
    scene.tick(demand(10, ahead=1000, running=10))
    assert kinds(scene.hands.log) == "m"
    assert scene.hands.waits == 0
    assert scene.num_resident == 1
    scene.settle(demand(10, ahead=1000, running=10), ticks=2)
    assert scene.space.free_tokens >= 1010


def test_a_wait_for_memory_that_does_not_come_ends():
    scene = Scene()
    scene.hands.on_wait = lambda: None
    scene.cache.held.append(range(1, 64))  # evicting covers the step
    scene.tick(demand(100, running=10))
    assert scene.ticker.statistics.waited_seconds == pytest.approx(UNDER_WAY_SECONDS, abs=0.01)
    assert scene.space.free_tokens == FREE_AT_START


def test_a_neighbour_gets_time_to_trim_before_running_requests_are_retracted():
    scene = Scene(FakeHands(room_bytes=0))

    def trim_after(seconds: float):
        def wait() -> None:
            if scene.clock.seconds > 1000.01 + seconds:
                scene.hands.room_bytes = NO_LIMIT
            scene.hands.carry_out()

        return wait

    scene.hands.on_wait = trim_after(0.08)
    scene.tick(demand(100, running=10))
    assert scene.space.free_tokens >= 100
    assert scene.ticker.statistics.waited_seconds == pytest.approx(0.09, abs=0.02)


def test_requests_are_retracted_when_the_neighbour_does_not_trim():
    scene = Scene(FakeHands(room_bytes=0))
    scene.hands.on_wait = lambda: None
    scene.tick(demand(100, running=10))
    assert scene.ticker.statistics.waited_seconds == pytest.approx(0.1, abs=0.02)
    assert scene.space.credit_tokens == 0


def test_the_last_request_and_a_prompt_half_prefilled_wait_longer():
    for wanted in (demand(100, running=1), demand(pledged=100)):
        scene = Scene(FakeHands(room_bytes=0))

        def wait(scene: Scene = scene) -> None:
            scene.clock.seconds += 0.5
            if scene.clock.seconds > 1005:
                scene.hands.room_bytes = NO_LIMIT
            scene.hands.carry_out()

        scene.hands.on_wait = wait
        scene.tick(wanted)
        assert scene.space.free_tokens >= 100


def test_at_its_own_ceiling_an_engine_does_not_wait():
    scene = Scene(FakeHands(room_bytes=0, ceiling_bytes=EXTENT_BYTES))
    scene.tick(demand(100, running=10))
    assert scene.hands.waits == 0


def test_a_shortage_that_growth_cannot_end_is_looked_at_now_and_then():
    agreement = Lockstep(threading.Barrier(1), [])  # as with several ranks, who do not act on news of their own
    scene = Scene(FakeHands(room_bytes=0, ceiling_bytes=EXTENT_BYTES), agreement=agreement)
    for _ in range(160):
        scene.tick(demand(100, running=10))
    assert scene.ticker.statistics.agreements <= 12


def test_growth_is_ordered_as_soon_as_it_is_short_though_nothing_was_at_the_last_agreement():
    """A prompt had filled its extents to the last tokens: 16 ticks later its answer would have been out of memory."""
    scene = Scene(agreement=Lockstep(threading.Barrier(1), []))
    for _ in range(AGREEMENT_TICKS):
        scene.tick(demand(10, running=1))
    assert kinds(scene.hands.log) == ""
    scene.tick(demand(10, ahead=100, running=1))
    assert kinds(scene.hands.log) == "m"


def test_a_step_waits_for_a_neighbour_though_growing_ahead_has_been_refused():
    scene = Scene(FakeHands(room_bytes=0), agreement=Lockstep(threading.Barrier(1), []))

    def trim() -> None:
        scene.hands.room_bytes = NO_LIMIT
        scene.hands.carry_out()

    scene.hands.on_wait = trim
    for _ in range(3):
        scene.tick(demand(10, ahead=100, running=10))
    assert scene.hands.waits == 0
    scene.tick(demand(100, running=10))
    assert scene.space.free_tokens >= 100


def test_admission_may_count_on_what_the_ledger_would_grant():
    scene = Scene(FakeHands(room_bytes=5 * EXTENT_BYTES))
    scene.tick(demand(10, running=1))
    assert scene.space.free_list.available_size() == FREE_AT_START + 5 * EXTENT_TOKENS


def test_admission_counts_on_nothing_while_a_step_could_use_up_what_is_resident():
    scene = Scene(FakeHands(room_bytes=5 * EXTENT_BYTES))
    scene.hands.on_wait = lambda: None
    scene.tick(demand(1000, running=10))
    assert scene.space.free_tokens < 1000
    assert scene.space.free_list.available_size() == scene.space.free_tokens


def test_growth_under_way_is_not_counted_twice():
    scene = Scene(FakeHands(room_bytes=5 * EXTENT_BYTES))
    scene.tick(demand(10, ahead=200, running=1))
    assert kinds(scene.hands.log) == "m"
    assert scene.ticker.growable_bytes == 2 * EXTENT_BYTES


def test_the_first_request_is_let_in_whatever_it_may_generate():
    """SGLang clipped it to the virtual capacity; the ledger lets this engine have less."""
    scene = Scene(FakeHands(room_bytes=0, ceiling_bytes=EXTENT_BYTES))
    scene.tick(Demand(prefill=40, chunk=40, head_prompt=40, head_total=40 + 1000, waiting=1))
    assert scene.space.free_list.available_size() > 1040
    scene.tick(Demand(prefill=100, chunk=100, head_prompt=100, head_total=1100, waiting=1))
    assert scene.space.free_list.available_size() == FREE_AT_START


def test_what_is_cached_makes_room_for_the_first_prompt_before_anything_is_lent():
    """SGLang evicts only where less is available than it allocates; what is lent would count, and it would end."""
    scene = Scene(FakeHands(room_bytes=0, ceiling_bytes=EXTENT_BYTES))
    scene.tick()
    fill_cache(scene, 60)
    scene.tick(Demand(prefill=40, chunk=40, head_prompt=40, head_total=40 + 1000, waiting=1))
    assert scene.space.free_list.available_size() > 1000
    assert scene.space.free_tokens >= 40
    assert scene.space.free_list.alloc(40) is not None


def test_what_admission_counts_on_is_never_more_than_the_capacity():
    """SGLang asserts it wherever sliding-window attention frees pages; the last extent is 23 tokens."""
    scene = Scene(spaces=[make_space(32, short_by=41), make_space(32, name="swa", window_tokens=100, short_by=41)])
    scene.tick(demand(10, running=1))
    for space in scene.spaces:
        assert space.free_list.available_size() == space.free_list.size == space.num_usable_tokens
    scene.tick(Demand(prefill=40, chunk=40, head_prompt=40, head_total=40 + 5000, waiting=1))
    assert all(space.free_list.available_size() <= space.free_list.size for space in scene.spaces)


def test_growth_within_a_step_does_not_count_twice():
    scene = Scene(spaces=[make_space(4)])
    scene.tick(demand(10, running=1))
    pages = scene.space.free_list.alloc(150)
    scene.space.free_list.free(pages)
    assert scene.space.free_list.available_size() <= scene.space.free_list.size


def test_an_order_that_failed_leaves_everything_as_it_was():
    scene = Scene()
    scene.hands.fail_next = "no page"
    scene.tick(demand(10, ahead=100, running=1))
    scene.hands.carry_out()
    scene.tick(demand(10, ahead=100, running=1))
    assert scene.space.free_tokens == FREE_AT_START
    assert scene.ticker.statistics.failed_orders == 1
    scene.settle(demand(10, ahead=100, running=1), ticks=5)
    assert scene.space.free_tokens >= 110


def test_growth_pauses_after_a_failure():
    scene = Scene()
    scene.hands.fail_next = "no page"
    wanted = demand(10, ahead=100, running=1)
    scene.tick(wanted)
    scene.hands.carry_out()
    for _ in range(5):
        scene.tick(wanted, after_seconds=0.001)
        scene.hands.carry_out()
    assert kinds(scene.hands.log) == "m"
    scene.tick(wanted, after_seconds=0.03)
    assert kinds(scene.hands.log) == "mm"


def test_surplus_leaves_after_a_quiet_moment():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.hands.carry_out()
    scene.tick(after_seconds=0.1)
    assert kinds(scene.hands.log) == "m"
    scene.settle()
    assert scene.num_resident == 1
    assert scene.space.extents.num_absent == 31


def test_a_busy_engine_keeps_one_extent_more_than_it_needs():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.settle(demand(10, running=1))
    assert scene.num_resident == 2


def test_extents_in_use_stay():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    held = scene.space.free_list.alloc(300)
    scene.settle()
    assert scene.num_resident == 5
    scene.space.free_list.free(held)
    scene.settle()
    assert scene.num_resident == 1


def test_what_is_owed_leaves_at_once_and_only_that():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.hands.owed_bytes = 3 * EXTENT_BYTES
    scene.hands.say()
    scene.tick(demand(10, running=1))
    retire = scene.hands.log[-1]
    assert isinstance(retire, Retire)
    assert retire.block_ranges == ((13, 16),)
    scene.tick(demand(10, running=1))
    assert kinds(scene.hands.log) == "mr"  # what is on its way out counts


def test_retired_extents_are_absent_only_once_they_are_unmapped():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.hands.owed_bytes = 3 * EXTENT_BYTES
    scene.hands.say()
    scene.tick()
    assert scene.space.extents.num_moving == 3
    scene.hands.owed_bytes = 0
    scene.hands.carry_out()
    scene.tick()
    assert scene.space.extents.num_moving == 0


def test_an_idle_engine_leaves_the_interpreter_to_what_is_being_unmapped():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.hands.on_wait = lambda: None
    scene.hands.owed_bytes = 3 * EXTENT_BYTES
    scene.hands.say()
    for wanted, waits in ((demand(10, running=1), 0), (demand(0), 1)):  # work is not held up
        before = scene.hands.waits
        scene.tick(wanted)
        assert scene.space.departures
        assert scene.hands.waits == before + waits
    scene.hands.owed_bytes = 0
    scene.hands.carry_out()
    before = scene.hands.waits
    scene.tick()
    assert scene.hands.waits == before


def fill_cache(scene: Scene, num_tokens: int) -> None:
    """Resident pages whose content is cached, oldest first."""
    pages = scene.space.free_list.alloc(num_tokens).tolist()
    scene.cache.held.extend(pages[i : i + 32] for i in range(0, len(pages), 32))


def test_what_is_owed_comes_from_the_cache_where_nothing_is_free():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    fill_cache(scene, scene.space.free_tokens)
    scene.hands.owed_bytes = 2 * EXTENT_BYTES
    scene.hands.say()
    scene.tick()
    assert kinds(scene.hands.log) == "mr"
    assert scene.ticker.statistics.evicted_tokens >= 2 * EXTENT_TOKENS


def test_the_cache_is_kept_down_to_its_floor():
    scene = Scene(policy=CachePolicy(floor_bytes=4 * EXTENT_BYTES))
    scene.tick(demand(1000, running=10))
    fill_cache(scene, scene.space.free_tokens)
    scene.hands.owed_bytes = 15 * EXTENT_BYTES
    for _ in range(20):
        scene.hands.say()
        scene.tick()
    assert (
        scene.cache.evictable(scene.space) > 4 * EXTENT_TOKENS - 32
    )  # what one eviction may take beyond what it is asked
    assert scene.cache.evictable(scene.space) < 5 * EXTENT_TOKENS


def test_cached_content_stays_while_nobody_wants_the_memory():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    fill_cache(scene, scene.space.free_tokens)
    scene.settle()
    assert scene.num_resident == 16


def test_cached_content_beyond_its_ceiling_leaves():
    scene = Scene(policy=CachePolicy(ceiling_bytes=4 * EXTENT_BYTES))
    scene.tick(demand(1000, running=10))
    fill_cache(scene, scene.space.free_tokens)
    scene.settle()
    assert scene.cache.evictable(scene.space) <= 4 * EXTENT_TOKENS
    assert scene.num_resident <= 6


def scatter_cache(scene: Scene) -> None:
    """All that is free is cached, and what is used least recently lies evenly over all extents."""
    pages = scene.space.free_list.alloc(scene.space.free_tokens).tolist()
    scene.cache.held.extend(pages[i : i + 8] for start in range(0, 64, 8) for i in range(start, len(pages), 64))


def test_cached_content_that_lies_scattered_is_no_more_than_half_as_much_again_as_its_ceiling():
    scene = Scene(policy=CachePolicy(ceiling_bytes=4 * EXTENT_BYTES))
    scene.tick(demand(1000, running=10))
    scatter_cache(scene)
    scene.settle(demand(running=1))
    assert scene.cache.evictable(scene.space) > 3 * EXTENT_TOKENS  # nothing more goes while anything runs
    assert scene.num_resident == 16
    scene.settle()
    assert scene.num_resident <= 6


def test_a_prompt_half_prefilled_keeps_what_it_was_promised():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.hands.owed_bytes = 15 * EXTENT_BYTES
    scene.hands.say()
    scene.tick(demand(pledged=500))
    assert scene.space.free_tokens >= 500


def test_a_flush_gives_everything_back_at_once():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.space.free_list.alloc(900)
    scene.space.free_list.clear()
    assert kinds(scene.hands.log) == "mr"
    assert scene.space.free_tokens == FREE_AT_START
    assert scene.space.free_list.conserved_size() == scene.space.num_usable_tokens


def test_what_is_owed_leaves_the_running_step_its_pages():
    """Cached content goes for it; the pages that running requests write next do not."""
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.space.free_list.alloc(scene.space.free_tokens - 5 * EXTENT_TOKENS)
    scene.hands.owed_bytes = 15 * EXTENT_BYTES
    scene.hands.say()
    scene.tick(demand(100, running=10))
    assert 100 <= scene.space.free_tokens < 100 + EXTENT_TOKENS


def test_evicting_for_what_is_owed_leaves_the_running_step_its_pages():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    fill_cache(scene, scene.space.free_tokens)
    scene.hands.owed_bytes = 15 * EXTENT_BYTES
    for _ in range(20):
        scene.hands.say()
        scene.tick(demand(100, running=10))
    assert scene.space.free_tokens + scene.cache.evictable(scene.space) >= 100


def test_debt_makes_the_engine_retract():
    scene = Scene()
    scene.tick(demand(1000, running=10))
    scene.space.free_list.alloc(scene.space.free_tokens - 50)
    scene.hands.owed_bytes, scene.hands.must = 2 * EXTENT_BYTES, True
    scene.hands.say()
    scene.tick(demand(10, running=10))
    assert scene.space.credit_tokens == -2 * EXTENT_TOKENS
    assert scene.space.free_list.available_size() == 0
    scene.hands.owed_bytes, scene.hands.must = 0, False
    scene.hands.say()
    scene.tick(demand(10, running=10))
    assert scene.space.credit_tokens >= 0


def test_an_allocation_beyond_the_bound_is_still_supplied():
    scene = Scene()
    scene.tick(demand(10, running=1))
    assert scene.space.free_list.alloc(500) is not None


def test_an_allocation_that_cannot_be_supplied_fails_natively_without_waiting():
    scene = Scene(FakeHands(room_bytes=0, ceiling_bytes=EXTENT_BYTES))
    scene.tick(demand(10, running=1))
    assert scene.space.free_list.alloc(500) is None
    assert scene.hands.waits == 0


def test_unmet_demand_is_reported_at_once():
    scene = Scene(FakeHands(room_bytes=2 * EXTENT_BYTES))
    scene.hands.on_wait = lambda: None
    scene.tick(demand(1000, running=10))
    assert scene.hands.reports[-1].unmet_extents >= 12
    assert scene.hands.reports[-1].busy


def test_what_neighbours_shares_depend_on_is_reported_sooner_than_what_only_drifts():
    scene, working = Scene(), demand(1500, running=10)
    scene.settle(working)

    def reports_after(seconds: float, wanted: Demand) -> int:
        before = len(scene.hands.reports)
        scene.clock.seconds += seconds
        scene.settle(wanted, ticks=AGREEMENT_TICKS, after_seconds=0.0)
        return len(scene.hands.reports) - before

    scene.space.free_list.alloc(EXTENT_TOKENS)
    assert reports_after(STEADY_SECONDS, working) == 1
    scene.space.free_list.alloc(EXTENT_TOKENS)
    assert reports_after(REPORT_SECONDS, working) == 0
    assert reports_after(STEADY_SECONDS, working) == 1
    assert reports_after(REPORT_SECONDS, demand(1000, running=10)) == 1
    assert reports_after(REPORT_SECONDS, IDLE) == 1


def test_two_spaces_share_what_the_ledger_grants():
    spaces = [make_space(), make_space(name="swa", window_tokens=100)]
    scene = Scene(FakeHands(room_bytes=8 * EXTENT_BYTES), spaces=spaces)
    scene.tick(Demand(prefill=150, chunk=50, pledged=150))
    assert all(space.free_tokens >= 150 for space in spaces)
    assert sum(space.extents.num_resident for space in spaces) == 6


def test_sliding_window_needs_its_window_and_a_chunk_of_a_prompt():
    swa = make_space(name="swa", window_tokens=100)
    assert swa.step_tokens(Demand(decode=5, prefill=1000, chunk=50)) == 155
    assert make_space().step_tokens(Demand(decode=5, prefill=1000, chunk=50)) == 1005


def test_a_request_may_take_what_the_ceiling_leaves():
    scene = Scene(FakeHands(ceiling_bytes=4 * EXTENT_BYTES))
    scene.tick()
    assert scene.ticker.ceiling_tokens == 4 * EXTENT_TOKENS - 1  # one is padding
    scene.hands.ceiling_bytes = NO_LIMIT
    scene.hands.say()
    scene.tick()
    assert scene.ticker.ceiling_tokens == 32 * EXTENT_TOKENS - 1


def test_one_space_makes_room_for_another_under_one_ceiling():
    """What is cached of full attention kept every extent, and a prompt waited for its window for ever."""
    hands = FakeHands(room_bytes=8 * EXTENT_BYTES, ceiling_bytes=10 * EXTENT_BYTES)
    scene = Scene(hands, spaces=[make_space(), make_space(name="swa", window_tokens=100)], chunk_tokens=50)
    scene.settle(demand(500, running=10), ticks=3)
    full, swa = scene.spaces
    pages = full.free_list.alloc(full.free_tokens).tolist()
    scene.cache.held.extend(pages[i : i + 32] for i in range(0, len(pages), 32))
    scene.cache.space = full
    swa.free_list.alloc(swa.free_tokens)
    first = Demand(prefill=200, chunk=50, head_prompt=200, head_total=300, waiting=1)
    scene.settle(first, ticks=60)
    assert swa.free_tokens >= 150
    assert full.free_tokens + scene.cache.evictable(full) >= 200


def windowed(hands: FakeHands) -> Scene:
    """A window pool of 4 extents beside a full one of 32; a step prefills 50 tokens."""
    spaces = [make_space(), make_space(4, name="swa", window_tokens=100)]
    return Scene(hands, spaces=spaces, chunk_tokens=50)


def test_a_prompt_longer_than_the_window_pool_is_served():
    scene = windowed(FakeHands())
    scene.tick()
    assert scene.ticker.ceiling_tokens == 32 * EXTENT_TOKENS - 1


def test_under_a_ceiling_the_window_and_a_chunk_come_off_once():
    scene = windowed(FakeHands(ceiling_bytes=8 * EXTENT_BYTES))
    scene.tick()
    assert scene.ticker.ceiling_tokens == (8 - 3) * EXTENT_TOKENS - 1  # 151 tokens take three extents


def test_a_first_prompt_longer_than_the_window_pool_is_let_in():
    """Nothing is left to grow into: four extents more for its 300 tokens, two for a window and a chunk."""
    scene = windowed(FakeHands(room_bytes=6 * EXTENT_BYTES))
    scene.settle(Demand(prefill=300, chunk=50, waiting=1, head_prompt=300, head_total=1500), ticks=3)
    assert scene.spaces[0].free_list.available_size() > 1500
    assert scene.spaces[1].free_list.available_size() == scene.spaces[1].num_usable_tokens


def test_a_prompt_beyond_what_the_device_has_beside_weights_has_no_room():
    """A ceiling is of the KV cache alone, and by default all of the device: weights and activations come off."""
    scene = Scene(attainable_bytes=4 * EXTENT_BYTES)
    scene.tick()
    assert scene.ticker.ceiling_tokens == 4 * EXTENT_TOKENS - 1


def starve(scene: Scene, seconds: float) -> None:
    wanted = Demand(prefill=100, chunk=100, head_prompt=100, head_total=200, waiting=1)
    for _ in range(round(seconds)):
        scene.tick(wanted, after_seconds=1.0)


def test_a_request_that_finds_no_room_is_spoken_of_once_with_the_figures(caplog):
    scene = Scene(FakeHands(room_bytes=0))
    scene.hands.on_wait = lambda: None
    starve(scene, 4)
    assert "for want of memory" not in caplog.text
    assert not scene.ticker.starves
    starve(scene, 20)
    assert scene.ticker.starves
    assert caplog.text.count("for want of memory") == 1
    assert "needs 100 tokens of KV cache, 63 are free and 0 cached, and this engine could grow by 0 B" in caplog.text


def test_what_runs_ends_the_wait(caplog):
    scene = Scene(FakeHands(room_bytes=0))
    scene.hands.on_wait = lambda: None
    for _ in range(4):
        starve(scene, 3)
        scene.tick(demand(10, running=1))
    assert "for want of memory" not in caplog.text
    assert not scene.ticker.starves
