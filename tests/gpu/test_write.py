"""What the Triton kernels write is what the CPU's write, bit for bit, in every format."""

import pytest
import torch
from torch import Tensor

from model.gpu_case import DEVICE, hard_rows, next_step, sequences, storages, write_in_host
from pagemill.kernels.codec import FORMATS, decode_group
from pagemill.kernels.triton.storage import TritonStorage

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter on NaN and inf
BY_TOKEN = [name for name, entry in FORMATS.items() if not entry.codes_whole_groups]
SHAPES = [(64, 2, 32), (80, 1, 16), (16, 3, 64)]  # head dim, KV heads, block size


@pytest.mark.parametrize(("dim", "num_kv_heads", "block_size"), SHAPES)
@pytest.mark.parametrize("kv_format", BY_TOKEN)
def test_bytes_of_tokens(kv_format: str, dim: int, num_kv_heads: int, block_size: int) -> None:
    """Hard numbers, less a center; in two steps that part a group, so that bytes which two tokens
    share are written twice."""
    k, v = hard_rows(45, num_kv_heads, dim)
    centers = torch.randn(1, num_kv_heads, dim)
    host, device = storages(
        kv_format, dim, num_kv_heads=num_kv_heads, block_size=block_size, centers=centers
    )
    slots = torch.arange(block_size + 3, block_size + 48)
    for low, high in ((0, 22), (22, 45)):
        host.write_kv(0, k[low:high], v[low:high], slots[low:high])
        rows = k[low:high].to(DEVICE), v[low:high].to(DEVICE)
        device.write_kv(0, *rows, slots[low:high])
    assert host.tiles(0).any()
    assert torch.equal(device.tiles(0).cpu(), host.tiles(0))


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("kv_format", list(FORMATS))
def test_bytes_of_wide_heads(kv_format: str, dim: int) -> None:
    k, v = hard_rows(20, 1, dim)
    batch, num_blocks = sequences([(0, 20)], 16)
    host, device = storages(kv_format, dim, num_kv_heads=1, num_blocks=num_blocks, block_size=16)
    write_in_host(host, k, v, batch)
    device.write_step(0, k.to(DEVICE), v.to(DEVICE), batch)
    assert torch.equal(device.tiles(0).cpu(), host.tiles(0))


@pytest.mark.parametrize(("dim", "num_kv_heads", "block_size"), SHAPES)
def test_bytes_of_whole_groups(dim: int, num_kv_heads: int, block_size: int) -> None:
    """i4c in uneven chunks of three sequences: tiles, and the raw tokens of unfilled groups."""
    counts = [[7, 16, 1], [9, 30, 1], [1, 5, 16]]
    lengths = [sum(column) for column in zip(*counts, strict=True)]
    table, num_blocks = sequences([(0, length) for length in lengths], block_size)
    host, device = storages(
        "i4c", dim, num_kv_heads=num_kv_heads, block_size=block_size, num_blocks=num_blocks
    )
    assert isinstance(device, TritonStorage)
    starts = [0, 0, 0]
    for step in counts:
        batch = next_step(table, starts, step)
        k, v = hard_rows(sum(step), num_kv_heads, dim)
        host.write_step(0, k, v, batch)
        device.write_step(0, k.to(DEVICE), v.to(DEVICE), batch)
        assert torch.equal(device.tiles(0).cpu(), host.tiles(0))
        starts = [a + b for a, b in zip(starts, step, strict=True)]
        kept = raw_tokens(host._tails[0].view(3, -1), starts, num_kv_heads, dim)
        assert torch.equal(raw_tokens(device.tails(0).cpu(), starts, num_kv_heads, dim), kept)


def raw_tokens(tails: Tensor, lengths: list[int], num_kv_heads: int, dim: int) -> Tensor:
    """bf16 bits of the unfilled group of each sequence."""
    k, v = decode_group("bf16", tails.view(3, num_kv_heads, -1), dim)
    rows = [x[i, :, : n % 16] for x in (k, v) for i, n in enumerate(lengths)]
    return torch.cat([row.flatten() for row in rows]).nan_to_num(1.5)


@pytest.mark.parametrize("kv_format", list(FORMATS))
def test_pages_go_to_the_device_and_back(kv_format: str) -> None:
    """Read in host memory, written on the device, copied there, and back: the same bytes."""
    host, device = storages(kv_format, 64)
    page = torch.randint(0, 256, (host.block_bytes(0),), dtype=torch.uint8)
    host.write_block(0, 2, page)
    device.write_block(0, 1, host.read_block(0, 2))
    device.copy_blocks(0, [(1, 3), (3, 4)])
    back = device.read_block(0, 4)
    assert back.device.type == "cpu"
    assert torch.equal(back, page)
    assert not device.read_block(0, 2).any()


def test_what_points_outside_is_refused() -> None:
    _, device = storages("i8", 64)
    k = torch.zeros(3, 2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="slot"):
        device.write_kv(0, k, k, torch.arange(5 * 32 - 1, 5 * 32 + 2))
    batch, _ = sequences([(300, 3)], 32)
    with pytest.raises(ValueError, match="block id"):
        device.write_step(0, k, k, batch)
    _, coded = storages("i4c", 64)
    batch, _ = sequences([(0, 3)], 32)
    bad = type(batch)(batch.query_start, batch.context_start, batch.block_ids, batch.indptr)
    with pytest.raises(ValueError, match="tail slot"):
        coded.write_step(0, k, k, bad)
    with pytest.raises(ValueError, match="whole groups"):
        coded.write_kv(0, k, k, torch.arange(32, 35))
    with pytest.raises(ValueError, match="pool"):
        device.read_block(0, 5)
