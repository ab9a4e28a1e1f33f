"""The scheduler as stories: who gets tokens, who waits, who is thrown out and comes back."""

from array import array
from itertools import pairwise

import pytest

from model.reading_executor import continuation
from model.scheduler_bench import Bench, output_of
from pagemill.core.errors import ConfigError, IntegrityError, QueueFullError, TooLongError
from pagemill.core.request import FinishReason, RequestStatus
from pagemill.core.units import ceil_div
from pagemill.sched.values import SchedulerConfig


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 1000 for i in range(length)]


def counts(bench: Bench) -> list[dict[int, int]]:
    return [{p.sequence_id: p.count for p in plan.sequences} for plan in bench.plans]


def test_one_request_computes_its_prompt_then_one_token_a_step() -> None:
    bench = Bench()
    request = bench.add(prompt(20), max_tokens=3)
    assert bench.run() == 3
    assert counts(bench) == [{1: 20}, {1: 1}, {1: 1}]
    assert output_of(request) == continuation(prompt(20), 3)
    assert request.finish_reason is FinishReason.LENGTH
    assert bench.num_held_blocks() == 0


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(max_num_batched_tokens=64)
    request = bench.add(prompt(150), max_tokens=1)
    bench.run()
    assert counts(bench) == [{1: 64}, {1: 64}, {1: 22}]
    assert output_of(request) == continuation(prompt(150), 1)


def test_decodes_ride_in_every_step_of_a_long_prefill() -> None:
    bench = Bench(num_blocks=128, max_num_batched_tokens=64)
    streams = [bench.add(prompt(8, first=100 * i), max_tokens=40) for i in range(4)]
    bench.step()
    bench.add(prompt(600, first=7), max_tokens=1)
    for _ in range(12):
        outputs = bench.step()
        tokens = {o.request.sequence_id for o in outputs if o.token_id is not None}
        assert {stream.sequence_id for stream in streams} <= tokens
        assert bench.plans[-1].num_tokens <= 64


def test_a_second_request_hits_the_blocks_of_the_first() -> None:
    bench = Bench()
    bench.add(prompt(40), max_tokens=1)
    bench.run()
    again = bench.add(prompt(40), max_tokens=2)
    bench.run()
    assert again.num_cached_tokens == 32
    assert bench.plans[-2].sequences[0].start == 32
    assert output_of(again) == continuation(prompt(40), 2)


def test_a_prompt_that_is_cached_whole_still_computes_one_token() -> None:
    bench = Bench()
    for expected in (0, 16):
        request = bench.add(prompt(32), max_tokens=1)
        bench.run()
        assert request.num_cached_tokens == expected


def test_hits_are_real_reads_of_the_cache() -> None:
    """Negative control: with two cached blocks exchanged, the output must differ."""
    bench = Bench()
    bench.add(prompt(40), max_tokens=1)
    bench.run()
    first, second = bench.plans[0].tables[0].block_ids[0], bench.plans[0].tables[0].block_ids[1]
    bench.executor.swap_blocks(first, second)
    again = bench.add(prompt(40), max_tokens=1)
    bench.run()
    assert again.num_cached_tokens == 32
    assert output_of(again) != continuation(prompt(40), 1)


def test_another_salt_shares_nothing() -> None:
    bench = Bench()
    bench.add(prompt(40), max_tokens=1, salt="a")
    bench.run()
    other = bench.add(prompt(40), max_tokens=1, salt="b")
    bench.run()
    assert other.num_cached_tokens == 0


def test_short_behind_long_starts_within_a_few_steps() -> None:
    """A 32-token prompt behind a 100,000-token one does not wait for it."""
    bench = Bench(num_blocks=6400, max_num_batched_tokens=512, max_model_len=200_000)
    bench.add(prompt(100_000), max_tokens=1)
    for _ in range(3):
        bench.step()
    short = bench.add(prompt(32, first=500), max_tokens=1)
    for _ in range(2):
        bench.step()
    assert short.status is RequestStatus.FINISHED
    assert output_of(short) == continuation(prompt(32, first=500), 1)


def test_many_long_prompts_do_not_starve_a_short_one() -> None:
    bench = Bench(num_blocks=2000, max_num_batched_tokens=128, max_model_len=20_000)
    for i in range(5):
        bench.add(prompt(5000, first=i), max_tokens=1)
    bench.step()
    short = bench.add(prompt(16, first=900), max_tokens=1)
    for _ in range(3):
        bench.step()
    assert short.status is RequestStatus.FINISHED


def test_two_giants_grow_into_each_other_and_both_finish() -> None:
    """Both start with 40 % of the pool each and grow to 80 %: one must give way, once."""
    bench = Bench(num_blocks=101, max_num_batched_tokens=256)
    giants = [bench.add(prompt(640, first=i), max_tokens=640) for i in (0, 500)]
    bench.run()
    for giant, first in zip(giants, (0, 500), strict=True):
        assert output_of(giant) == continuation(prompt(640, first=first), 640)
    assert (giants[0].num_preemptions, giants[1].num_preemptions) == (0, 1)
    assert bench.scheduler.stats.num_recomputed_tokens <= 1600 - 640


def test_two_giants_that_never_fit_together_run_one_after_another() -> None:
    """Prompts of 70 % of the pool each: the second starts when the first has ended."""
    bench = Bench(num_blocks=101, max_num_batched_tokens=256)
    giants = [bench.add(prompt(1120, first=i), max_tokens=400) for i in (0, 500)]
    bench.run()
    for giant, first in zip(giants, (0, 500), strict=True):
        assert output_of(giant) == continuation(prompt(1120, first=first), 400)
    assert bench.scheduler.stats.num_preemptions == 0
    assert all(len(plan.sequences) == 1 for plan in bench.plans)


def test_two_growing_requests_preempt_the_newer_one_only() -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=64)
    old = bench.add(prompt(100), max_tokens=180)
    new = bench.add(prompt(100, first=500), max_tokens=180)
    bench.run()
    assert old.num_preemptions == 0
    assert 1 <= new.num_preemptions <= 4
    assert output_of(old) == continuation(prompt(100), 180)
    assert output_of(new) == continuation(prompt(100, first=500), 180)


@pytest.mark.parametrize("prefix_index", ["flat", "off"])
@pytest.mark.parametrize(
    ("num_blocks", "num_requests", "max_tokens"), [(12, 8, 90), (20, 24, 200)], ids=["12", "20"]
)
def test_a_crowd_in_a_tiny_pool_does_little_work_twice(
    prefix_index: str, num_blocks: int, num_requests: int, max_tokens: int
) -> None:
    """Counted, not timed: work done twice is less than the work, and the first loses nothing."""
    bench = Bench(num_blocks=num_blocks, prefix_index=prefix_index)
    firsts = range(0, 7 * num_requests, 7)
    requests = [bench.add(prompt(10, first), max_tokens) for first in firsts]
    bench.run()
    for request, first in zip(requests, firsts, strict=True):
        assert output_of(request) == continuation(prompt(10, first), max_tokens)
    stats = bench.scheduler.stats
    needed = num_requests * (10 + max_tokens - 1)
    computed = sum(plan.num_tokens for plan in bench.plans)
    assert computed == needed + stats.num_recomputed_tokens
    assert 0 < stats.num_recomputed_tokens < needed
    assert stats.num_recomputed_tokens == sum(r.num_recomputed_tokens for r in requests)
    assert requests[0].num_preemptions == 0
    assert max(request.num_preemptions for request in requests) <= 3
    assert 0 < stats.num_preemptions <= 3 * num_requests


def test_each_return_gets_a_fifth_further() -> None:
    """A preempted request waits for more than one block: otherwise it comes back only to be thrown
    out again after 16 tokens, and what it computes twice grows with the square of its length."""
    bench = Bench(num_blocks=201, max_num_seqs=32, prefix_index="off")
    requests = [bench.add(prompt(16, 7 * i), max_tokens=600) for i in range(32)]
    lengths: dict[int, list[int]] = {request.sequence_id: [] for request in requests}
    while bench.scheduler.has_work:
        bench.step()
        for request in requests:
            seen = lengths[request.sequence_id]
            if request.num_preemptions > len(seen):
                seen.append(request.num_tokens)
    gains = [b / a for row in lengths.values() for a, b in pairwise(row)]
    assert len(gains) >= 5, "several came back more than once"
    assert min(gains) >= 1.2
    assert bench.scheduler.stats.num_recomputed_tokens < 32 * 616 / 2


def test_preempted_request_keeps_its_place() -> None:
    """With priorities: a request of lower priority that came meanwhile does not pass it."""
    bench = Bench(num_blocks=21, max_num_batched_tokens=64, policy="priority")
    bench.add(prompt(100), max_tokens=180, priority=1)
    second = bench.add(prompt(100, first=500), max_tokens=180, priority=2)
    while second.num_preemptions == 0:
        bench.step()
    third = bench.add(prompt(10, first=300), max_tokens=5, priority=3)
    num_plans = len(bench.plans)
    bench.run()
    later = [{p.sequence_id for p in plan.sequences} for plan in bench.plans[num_plans:]]
    back, passed = (
        next(i for i, ids in enumerate(later) if request.sequence_id in ids)
        for request in (second, third)
    )
    assert back <= passed
    assert second.finish_reason is third.finish_reason is FinishReason.LENGTH


def test_recomputed_tokens_are_no_hits() -> None:
    """Invariant 10: what a preempted request finds again is not a hit of its prompt."""
    bench = Bench(num_blocks=21, max_num_batched_tokens=64)
    bench.add(prompt(100), max_tokens=180)
    bench.add(prompt(100, first=500), max_tokens=180)
    bench.run()
    stats = bench.scheduler.stats
    assert stats.num_preemptions > 0
    assert stats.num_hit_tokens == 0
    assert stats.num_recomputed_tokens > 0
    assert bench.cache.stats().num_hit_tokens == 0


def test_priority_goes_first_and_is_preempted_last() -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=64, policy="priority")
    low = bench.add(prompt(100), max_tokens=180, priority=5)
    high = bench.add(prompt(100, first=500), max_tokens=180, priority=1)
    bench.run()
    assert high.num_preemptions == 0
    assert low.num_preemptions >= 1
    assert output_of(low) == continuation(prompt(100), 180)


def test_what_can_never_fit_is_refused_at_once() -> None:
    bench = Bench(num_blocks=11, max_model_len=1000)
    with pytest.raises(TooLongError, match="block pool of 160 tokens"):
        bench.add(prompt(150), max_tokens=11)
    with pytest.raises(TooLongError, match="context of 1000 tokens"):
        bench.add(prompt(990), max_tokens=11)
    bench.add(prompt(150), max_tokens=10)
    bench.run()
    assert not bench.scheduler.has_work


def test_the_queue_is_bounded() -> None:
    bench = Bench(max_queue=2)
    for i in range(2):
        bench.add(prompt(10, first=i))
    with pytest.raises(QueueFullError):
        bench.add(prompt(10))
    bench.run()


def test_hits_leave_the_free_list() -> None:
    """The blocks needed are exactly the free ones, and the hit blocks are evictable: not now."""
    bench = Bench(num_blocks=11, max_num_batched_tokens=256, max_model_len=160)
    bench.add(prompt(64), max_tokens=1)
    bench.run()  # 4 blocks of this prompt are cached and evictable
    blocker = bench.add(prompt(16, first=700), max_tokens=60)
    bench.step()
    request = bench.add(prompt(64) + prompt(70, first=300), max_tokens=2)
    bench.step()
    assert request.status is RequestStatus.WAITING, "9 blocks wanted, 5 free beside the 4 hit"
    bench.run()
    assert output_of(request) == continuation(prompt(64) + prompt(70, first=300), 2)
    assert output_of(blocker) == continuation(prompt(16, first=700), 60)


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted"])
def test_abort_at_every_state_gives_all_blocks_back(state: str) -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=64, max_num_seqs=2)
    other = bench.add(prompt(100), max_tokens=180)
    request = bench.add(prompt(100, first=500), max_tokens=180)
    if state == "waiting":
        request = bench.add(prompt(90, first=200), max_tokens=3)
        bench.step()
        assert request.status is RequestStatus.WAITING
    elif state == "prefilling":
        while request.num_computed_tokens == 0:
            bench.step()
        assert 0 < request.num_computed_tokens < 100
    elif state == "decoding":
        while request.num_output_tokens < 3:
            bench.step()
    else:
        while request.status is not RequestStatus.PREEMPTED:
            bench.step()
    assert bench.scheduler.abort(request.sequence_id) is request
    bench.scheduler.check_integrity()
    assert request.finish_reason is FinishReason.ABORT
    assert bench.num_held_blocks() == ceil_div(other.num_computed_tokens, 16)
    assert bench.scheduler.abort(request.sequence_id) is None
    bench.run()
    assert bench.num_held_blocks() == 0
    assert output_of(other) == continuation(prompt(100), 180)


def test_shared_prefix_is_counted_once() -> None:
    """256 requests with one prefix, 64 at once, of different lengths: the pool adds up always."""
    bench = Bench(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512)
    shared = prompt(64)
    requests = [
        bench.add([*shared, i % 7, i % 11, i], max_tokens=1 + (i * 37) % 23) for i in range(256)
    ]
    bench.run()
    for i, request in enumerate(requests):
        expected = continuation([*shared, i % 7, i % 11, i], 1 + (i * 37) % 23)
        assert output_of(request) == expected
    hits = [r.num_cached_tokens for r in requests]
    assert hits.count(64) >= 256 - 64


def test_a_failed_step_ends_its_requests_and_nothing_else() -> None:
    bench = Bench(max_num_seqs=1)
    first = bench.add(prompt(40), max_tokens=3)
    second = bench.add(prompt(40, first=9), max_tokens=3)
    plan = bench.scheduler.plan(1)
    assert plan is not None
    (output,) = bench.scheduler.fail(plan, MemoryError("no memory"))
    assert output.request is first and output.finish_reason is FinishReason.ERROR
    assert "no memory" in (output.error or "")
    assert bench.num_held_blocks() == 0
    bench.run()
    assert output_of(second) == continuation(prompt(40, first=9), 3)


def test_a_prompt_can_be_scored_without_output() -> None:
    bench = Bench()
    request = bench.add(prompt(40), max_tokens=0)
    bench.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == 0


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        SchedulerConfig(max_num_seqs=0)
    with pytest.raises(ConfigError, match="needs one token"):
        SchedulerConfig(max_num_seqs=100, max_num_batched_tokens=64)
    with pytest.raises(ConfigError, match="choose one of fcfs, priority"):
        Bench(policy="random")


def test_a_table_that_nobody_closes_is_noticed() -> None:
    """The cache alone is in order then; only the scheduler knows that no request holds it."""
    bench = Bench()
    bench.add(prompt(20), max_tokens=2)
    bench.run()
    cache = bench.cache
    root = cache.namespace(tenant="", salt="")
    table = cache.open(cache.peek_match(array("I", prompt(20)), root), root)
    cache.check_integrity()
    with pytest.raises(IntegrityError, match="1 tables and 0 copies are open, and 0 requests run"):
        bench.scheduler.check_integrity()
    cache.release(table)
    bench.scheduler.check_integrity()
