"""Random traffic on small pools: outputs equal those without a cache, and every step adds up."""

import random

import pytest

from model.naive_scheduler import NaiveRequest, NaiveScheduler
from model.reading_executor import continuation
from model.scheduler_bench import Bench, output_of
from model.seeds import fuzz_seeds
from pagemill.core.layers import EVICTIONS
from pagemill.core.request import Request

NUM_RUNS = 30


class Traffic:
    """One run: prompts that share prefixes, arrivals and aborts at random steps."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.budget = rng.choice([16, 40, 64, 200])
        self.windows = rng.choice([(None,), (None,), (None, 20), (None, 7, 40), (33,)])
        self.bench = Bench(
            num_blocks=[self._num_blocks(window) for window in self.windows],
            windows=self.windows,
            prefix_index=rng.choice(["flat", "flat", "off"]),
            eviction=rng.choice(["lru", *EVICTIONS]),
            max_num_batched_tokens=self.budget,
            max_num_seqs=rng.choice([1, 4, 16]),
            policy=rng.choice(["fcfs", "priority"]),
            max_model_len=600,
        )
        self.prefixes = [[rng.randrange(1000) for _ in range(90)] for _ in range(3)]
        self.requests: list[tuple[Request, list[int], int]] = []
        self.aborted: set[int] = set()

    def _num_blocks(self, window: int | None) -> int:
        """Small, but a window group holds at least one sequence's window and chunk."""
        least = 12 if window is None else -(-(window - 1 + self.budget) // 16) + 2
        return least + self.rng.randrange(48)

    def arrive(self) -> None:
        rng = self.rng
        shared = rng.choice(self.prefixes)[: rng.randrange(90)]
        prompt = shared + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        capacity = self.bench.scheduler.max_sequence_tokens()
        max_tokens = rng.randrange(1, 60)
        if len(prompt) + max_tokens > capacity:
            return
        request = self.bench.add(
            prompt,
            max_tokens,
            priority=rng.randrange(3),
            salt=rng.choice(["", "", "other"]),
        )
        self.requests.append((request, prompt, max_tokens))

    def abort_one(self) -> None:
        if self.requests:
            request = self.rng.choice(self.requests)[0]
            if self.bench.scheduler.abort(request.sequence_id) is not None:
                self.aborted.add(request.sequence_id)

    def run(self) -> None:
        for _ in range(self.rng.randrange(20, 80)):
            for _ in range(self.rng.choice([0, 0, 1, 3])):
                self.arrive()
            if self.rng.random() < 0.05:
                self.abort_one()
            self.check_step()
        while self.bench.scheduler.has_work:
            self.check_step()

    def check_step(self) -> None:
        had_work = self.bench.scheduler.has_work
        outputs = self.bench.step()
        assert bool(outputs) == had_work, "a step with work computes something"
        if outputs:
            assert self.bench.plans[-1].num_tokens <= self.budget

    def check_end(self) -> None:
        for request, prompt, max_tokens in self.requests:
            if request.sequence_id in self.aborted:
                continue
            assert output_of(request) == continuation(prompt, max_tokens, self.windows), (
                request.request_id
            )
            assert (request.num_cached_tokens or 0) < len(prompt)
        assert self.bench.num_held_blocks() == 0
        if not self.aborted:
            self.check_work()

    def check_work(self) -> None:
        """Every token is computed once, less the hits, and again what a preemption lost."""
        stats = self.bench.scheduler.stats
        needed = sum(len(prompt) + max_tokens - 1 for _, prompt, max_tokens in self.requests)
        computed = sum(plan.num_tokens for plan in self.bench.plans)
        assert computed == needed - stats.num_hit_tokens + stats.num_recomputed_tokens
        assert stats.num_finished == len(self.requests)


@pytest.mark.parametrize("seed", fuzz_seeds(NUM_RUNS))
def test_random_traffic_gives_the_outputs_of_no_cache(seed: int) -> None:
    traffic = Traffic(seed)
    traffic.run()
    traffic.check_end()


def test_the_traffic_reaches_what_it_is_for() -> None:
    """Over a few fixed seeds: preemptions, hits and aborts; else it proves little."""
    runs = [Traffic(seed) for seed in range(12)]
    for traffic in runs:
        traffic.run()
    stats = [traffic.bench.scheduler.stats for traffic in runs]
    assert sum(one.num_preemptions > 0 for one in stats) >= 3
    assert sum(one.num_hit_tokens > 0 for one in stats) >= 3
    assert sum(one.num_aborted > 0 for one in stats) >= 3
    assert sum(not traffic.aborted for traffic in runs) >= 3, "the work of these is counted"
    assert sum(len(traffic.requests) for traffic in runs) > 300


@pytest.mark.parametrize("seed", fuzz_seeds(NUM_RUNS))
def test_plans_equal_those_of_the_naive_scheduler(seed: int) -> None:
    """With blocks for everybody, who gets how many tokens is order, lanes and limits alone."""
    rng = random.Random(seed)
    budget, max_num_seqs = rng.choice([16, 50, 128]), rng.choice([2, 5, 16])
    policy = rng.choice(["fcfs", "priority"])
    bench = Bench(
        num_blocks=4000,
        prefix_index="off",
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        policy=policy,
    )
    naive = NaiveScheduler(budget, max_num_seqs)
    live: dict[int, tuple[Request, NaiveRequest]] = {}
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 2])):
            prompt = [rng.randrange(1000)] * rng.choice([1, 5, 30, rng.randrange(1, 500)])
            request = bench.add(prompt, rng.randrange(1, 12), priority=rng.randrange(3))
            order = (request.priority,) if policy == "priority" else ()
            twin = NaiveRequest(request.sequence_id, (*order, request.arrival_ns), len(prompt))
            naive.requests.append(twin)
            live[request.sequence_id] = (request, twin)
        expected = naive.plan()
        bench.step()
        if expected:
            plan = bench.plans[-1]
            assert {part.sequence_id: part.count for part in plan.sequences} == expected
        for request, twin in live.values():
            twin.missing = request.num_missing_tokens
            twin.is_finished = request.finish_reason is not None
