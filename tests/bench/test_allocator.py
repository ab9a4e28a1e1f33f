"""Contiguous buffers waste what blocks do not; the counts are by hand."""

import pytest

from pagemill.bench.allocator import compare
from pagemill.bench.trace_formats.request import TraceRequest
from pagemill.bench.traces import make_trace
from pagemill.core.errors import ConfigError

TRACE = make_trace(
    "t",
    0,
    False,
    [TraceRequest(i, (), p, o) for i, (p, o) in enumerate([(10, 5), (300, 20), (900, 124)])],
)


def test_reserved_used_and_what_fits() -> None:
    contiguous, paged = compare(TRACE, memory_tokens=2100)
    assert contiguous.used_tokens == paged.used_tokens == 15 + 320 + 1024
    assert contiguous.reserved_tokens == 3 * 1024 and contiguous.num_fit == 2
    assert paged.reserved_tokens == 16 + 320 + 1024 and paged.num_fit == 3
    assert paged.waste == pytest.approx(1 / 1360) and paged.waste_long == 0
    assert paged.waste_short == pytest.approx(1 / 16) and paged.num_short == 1


def test_longer_buffers_and_larger_blocks() -> None:
    contiguous, paged = compare(TRACE, block_size=128, max_tokens=4096)
    assert contiguous.reserved_tokens == 3 * 4096 and contiguous.memory_tokens == 16 * 4096
    assert paged.reserved_tokens == 128 + 384 + 1024
    with pytest.raises(ConfigError, match="1024"):
        compare(TRACE, max_tokens=1000)
