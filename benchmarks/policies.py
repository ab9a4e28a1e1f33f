"""Eviction policies beside each other: one real hour of chat, and nine mixes of it with agents.

The mix is composed here: each session of the agent trace starts at a uniform moment of 12 hours
(seeds 0 to 2), keeps its own gaps, and shares tools and system prompt with sessions of equal
(model, tool tokens, system tokens). Hours 4, 6 and 10 of that run beside the hour of chat. Ids of
64 tokens are made coarser, 8 to 1, to the 512 of the chat trace.
"""

import lzma
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy

from common import DATA, finish, make_parser, needed
from pagemill.bench.replay import find_bounds, replay_cell, sizes
from pagemill.bench.trace_formats import claude_code, mooncake
from pagemill.bench.trace_formats.request import ReadOptions, TraceRequest
from pagemill.bench.traces import Trace, load_trace, make_trace, spread

CONVERSATION = DATA / "traces" / "mooncake_conversation.jsonl.gz"
SESSIONS = DATA / "traces" / "claude_code_sessions.jsonl.xz"
HOUR_S, DAY_HOURS, HOURS, SEEDS, COARSER = 3600.0, 12, (4, 6, 10), (0, 1, 2), 8
CHAT_SIZES, MIX_SIZES = "1%,2%,5%,10%,20%", "2%,5%,10%"
POLICIES = (
    "lru", "fifo", "lfu", "sieve", "s3fifo", "arc", "gdsf", "tlru", "lhd",
    "reuse_rank_plain", "reuse_rank_strict", "reuse_rank",
)  # fmt: skip
QUICK = ("lru", "arc", "reuse_rank")
IDS_BEFORE_AGENTS = 1 << 20


def agent_hour(seed: int, hour: int) -> Iterator[TraceRequest]:
    """What the agents ask in one hour of their day, with times from its start."""
    options = ReadOptions(start_s=spread(DAY_HOURS, seed))
    with lzma.open(SESSIONS, "rt", encoding="utf-8") as file:
        for row in claude_code.read(file, options):
            time_s = row.time_s - hour * HOUR_S
            if 0 <= time_s < HOUR_S:
                ids = numpy.asarray(row.ids[COARSER - 1 :: COARSER]) + IDS_BEFORE_AGENTS
                yield TraceRequest(
                    time_s, ids, row.prompt_tokens, row.output_tokens, row.has_tool_calls
                )


def chat_hour(path: Path = CONVERSATION) -> Iterator[TraceRequest]:
    import gzip

    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from mooncake.read(file, ReadOptions())


def mix(seed: int, hour: int) -> Trace:
    rows = [*chat_hour(), *agent_hour(seed, hour)]
    return make_trace(f"mix_seed{seed}_hour{hour}", 512, False, rows)


def measure(trace: Trace, policies: tuple[str, ...], words: str) -> dict[str, list[float]]:
    """Policy -> hit rate in percent at each size; ``bound`` as well."""
    counts = sizes(words, int(trace.token_ids.max()) + 1)
    bounds = find_bounds(trace, counts, with_work=False)
    rates = {
        name: [100 * replay_cell(trace, "flat", name, size).hit_rate for size in counts]
        for name in policies
    }
    return {**rates, "bound": [100 * bounds.hit_rate[size] for size in counts]}


def measure_mix(what: tuple[int, int, tuple[str, ...]]) -> dict[str, list[float]]:
    seed, hour, policies = what
    return measure(mix(seed, hour), policies, MIX_SIZES)


def show(title: str, words: str, rates: dict[str, list[float]]) -> None:
    print(f"{title}, hit rate in % at {words} of unique blocks")
    for name, row in rates.items():
        print(f"  {name:18}", *(f"{rate:7.2f}" for rate in row))


def mean_rows(rows: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {
        name: [sum(row[name][i] for row in rows) / len(rows) for i in range(len(rows[0][name]))]
        for name in rows[0]
    }


def main() -> None:
    parsed = make_parser(__doc__ or "").parse_args()
    needed(CONVERSATION, "the conversation trace of kvcache-ai/Mooncake, packed with gzip")
    needed(SESSIONS, "the sessions of callanjfox/kv-cache-tester, one a line")
    policies = QUICK if parsed.quick else POLICIES
    begin = time.monotonic()
    chat = measure(load_trace(CONVERSATION), policies, CHAT_SIZES)
    show("conversation", CHAT_SIZES, chat)
    seeds = SEEDS[:1] if parsed.quick else SEEDS
    cells = [(seed, hour, policies) for seed in seeds for hour in HOURS]
    with ProcessPoolExecutor(2) as pool:
        mixes = list(pool.map(measure_mix, cells))
    mean = mean_rows(mixes)
    show(f"mean of {len(mixes)} mixes", MIX_SIZES, mean)
    gains = [ours - lru for ours, lru in zip(mean["reuse_rank"], mean["lru"], strict=True)]
    figures = {
        "conversation": chat,
        "mixes": {f"seed {s} hour {h}": row for (s, h, _), row in zip(cells, mixes, strict=True)},
        "mix_mean": mean,
        "lru_conv_5": chat["lru"][2],
        "reuse_rank_conv_1": chat["reuse_rank"][0],
        "reuse_rank_conv_2": chat["reuse_rank"][1],
        "mix_gain_2": gains[0],
        "mix_gain_5": gains[1],
        "mix_gain_10": gains[2],
        "worst_vs_lru": min(
            ours - lru
            for row in (chat, *mixes)
            for ours, lru in zip(row["reuse_rank"], row["lru"], strict=True)
        ),
        "seconds": time.monotonic() - begin,
    }
    finish(figures, tuple(k for k in figures if k not in ("conversation", "mixes", "mix_mean")),
           parsed.json)  # fmt: skip


if __name__ == "__main__":
    main()
