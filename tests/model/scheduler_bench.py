"""A scheduler over a small pool, and requests for it."""

from array import array
from collections.abc import Sequence
from itertools import count

from model.reading_executor import ReadingExecutor, Windows
from pagemill import CacheConfig, CacheManager, LayerGroup
from pagemill.core.request import Request, SamplingParams, StopParams
from pagemill.core.step import StepPlan
from pagemill.core.types import RequestId, SequenceId
from pagemill.sched.scheduler import Scheduler
from pagemill.sched.values import SchedulerConfig, SequenceOutput


class Bench:
    """Scheduler, cache and reading executor, and the steps they made."""

    def __init__(
        self,
        num_blocks: int | Sequence[int] = 64,
        prefix_index: str = "flat",
        eviction: str = "lru",
        windows: Windows = (None,),
        **config: object,
    ) -> None:
        counts = (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)
        cache_config = CacheConfig(
            groups=tuple(LayerGroup(f"g{i}", (i,), w) for i, w in enumerate(windows)),
            num_blocks=counts,
            prefix_index=prefix_index,
            eviction=eviction,
        )
        self.cache = CacheManager(cache_config, server_key=b"k" * 32)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.cache)
        self.executor = ReadingExecutor(counts, cache_config.block_size, windows)
        self.now_ns = 0
        self._ids = count(1)
        self.plans: list[StepPlan] = []

    def request(
        self, prompt: Sequence[int], max_tokens: int = 4, *, priority: int = 0, salt: str = ""
    ) -> Request:
        number = next(self._ids)
        self.now_ns += 1
        return Request(
            request_id=RequestId(f"r{number}"),
            sequence_id=SequenceId(number),
            token_ids=array("I", prompt),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_tokens=max_tokens),
            namespace=self.cache.namespace(salt=salt),
            arrival_ns=self.now_ns,
            priority=priority,
        )

    def add(self, prompt: Sequence[int], max_tokens: int = 4, **more: object) -> Request:
        request = self.request(prompt, max_tokens, **more)
        self.scheduler.add(request)
        return request

    def step(self) -> list[SequenceOutput]:
        """One step, the whole cache checked after it. Empty where nothing could be computed."""
        self.now_ns += 1
        plan = self.scheduler.plan(self.now_ns)
        if plan is None:
            return []
        self.plans.append(plan)
        result = self.executor.collect(self.executor.submit(plan))
        outputs = self.scheduler.apply(plan, result, self.now_ns)
        self.scheduler.check_integrity()
        return outputs

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; how many steps it took."""
        for number in range(max_steps):
            if not self.scheduler.has_work:
                return number
            assert self.step(), "there is work, and nothing was computed"
        raise AssertionError(f"still not finished after {max_steps} steps")

    def num_held_blocks(self) -> int:
        return sum(group.num_held for group in self.cache.stats().groups)


def output_of(request: Request) -> list[int]:
    return list(request.token_ids[request.num_prompt_tokens :])
