"""Writing, copying and the description of tiles."""

import pytest
import torch

from model.kv_case import ISAS
from pagemill import _native
from pagemill.core.errors import ConfigError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.layout import KvLayout

GROUPS = (LayerGroup("full", (0, 2)), LayerGroup("window", (1,), 32))


def storage(kv_format: str = "fp32", block_size: int = 32, dim: int = 48) -> KVStorage:
    return KVStorage(CacheConfig(GROUPS, (7, 5), block_size), kv_format, 2, dim)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_format", ["fp32", "bf16"])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_what_is_written_is_read(isa: str, kv_format: str, block_size: int) -> None:
    before = _native.isa_name()
    _native.set_isa(isa)
    kv = storage(kv_format, block_size)
    num_slots = 7 * block_size
    slots = torch.randperm(num_slots)
    wide = torch.randn(num_slots, 2 * 2 * 48)
    k, v = wide[:, :96].view(-1, 2, 48), wide[:, 96:].view(-1, 2, 48)
    kv.write_kv(2, k, v, slots.int())
    keys, values = kv.layouts[2].decode_tiles(kv.tiles(2))
    rounded = torch.float32 if kv_format == "fp32" else torch.bfloat16
    assert torch.equal(keys.flatten(0, 1)[slots], k.to(rounded).float())
    assert torch.equal(values.flatten(0, 1)[slots], v.to(rounded).float())
    assert not kv.tiles(0).any()
    assert not kv.tiles(1).any()
    _native.set_isa(before)


def test_bf16_rounds_as_torch_does() -> None:
    kv = storage("bf16", 16, 16)
    bits = torch.randint(-(2**31), 2**31, (16, 2, 16), dtype=torch.int64).to(torch.int32)
    k = bits.view(torch.float32)
    k[0, 0, :5] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    kv.write_kv(1, k, k, torch.arange(16) + 32)
    keys, _ = kv.layouts[1].decode_tiles(kv.tiles(1)[2:3])
    want = k.bfloat16().float()
    assert torch.equal(keys[0].isnan(), want.isnan())
    assert torch.equal(keys[0].nan_to_num(7.0), want.nan_to_num(7.0))


def test_blocks_are_copied_in_all_layers_of_the_group() -> None:
    kv = storage()
    for layer in range(3):
        kv.tiles(layer).copy_(torch.randint(0, 256, kv.tiles(layer).shape, dtype=torch.uint8))
    before = [kv.tiles(layer).clone() for layer in range(3)]
    kv.copy_blocks(0, [(1, 4), (4, 6)])
    for layer in (0, 2):
        now, rest = kv.tiles(layer), [0, 1, 2, 3, 5]
        assert torch.equal(now[4], before[layer][1]) and torch.equal(now[6], before[layer][1])
        assert torch.equal(now[rest], before[layer][rest])
    assert torch.equal(kv.read_block(0, 4), torch.cat([before[0][1], before[2][1]]))
    assert torch.equal(kv.tiles(1), before[1])
    kv.copy_blocks(1, [])
    with pytest.raises(ValueError, match="outside of the pool"):
        kv.copy_blocks(0, [(1, 7)])


def test_blocks_are_read_and_written_as_bytes() -> None:
    kv = storage()
    tile_bytes = kv.layouts[0].tile_bytes
    assert kv.block_bytes(0) == 2 * tile_bytes
    assert kv.block_bytes(1) == tile_bytes == 2 * 2 * 16 * 48 * 2 * 4
    tiles = torch.randint(0, 256, (2 * tile_bytes,), dtype=torch.uint8)
    kv.write_block(0, 3, tiles)
    assert torch.equal(kv.read_block(0, 3), tiles)
    assert not kv.read_block(0, 2).any()
    with pytest.raises(ValueError, match="outside"):
        kv.read_block(1, 5)
    with pytest.raises(ValueError, match="outside"):
        kv.write_block(0, -1, tiles)


def test_wrong_slots_and_shapes_are_refused() -> None:
    kv = storage()
    k = torch.zeros(2, 2, 48)
    for slots in ([0, 7 * 32], [-1, 0]):
        with pytest.raises(ValueError, match="outside of the pool"):
            kv.write_kv(0, k, k, torch.tensor(slots))
    with pytest.raises(ValueError, match="shape"):
        kv.write_kv(0, k[:, :1], k, torch.tensor([1, 2]))
    with pytest.raises(TypeError):
        kv.write_kv(0, k.half(), k, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="side by side"):
        kv.write_kv(0, torch.zeros(2, 2, 96)[:, :, ::2], k, torch.tensor([1, 2]))


def test_too_much_memory_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot get .* GiB .* lower --kv-memory"):
        KVStorage(CacheConfig(GROUPS[:1], (1 << 36,)), "fp32", 2, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fp16", 16, 2, 64), "KV format"),
        (("fp32", 24, 2, 64), "block size"),
        (("fp32", 16, 2, 40), "multiple of 16"),
        (("fp32", 16, 0, 64), "KV heads"),
    ],
)
def test_layouts_that_do_not_exist(arguments: tuple[str, int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KvLayout(*arguments)
