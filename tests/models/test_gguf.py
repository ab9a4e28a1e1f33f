"""The GGUF reader: equal to the reference decoder bit for bit, and firm against damaged files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill import _native
from pagemill.core.errors import ModelError
from pagemill.models.gguf import GgufFile

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
HALF_FIELDS = {
    "Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q4_K": [0, 2],
    "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def random_blocks(type_name: str, num_blocks: int, seed: int) -> np.ndarray:
    """Random bytes with finite scales: uint8 [num_blocks, block bytes]."""
    rng = np.random.default_rng(seed)
    _, num_bytes = gguf.GGML_QUANT_SIZES[Kind[type_name]]
    if type_name in ("F32", "F16", "BF16"):
        numbers = rng.standard_normal(num_blocks).astype(np.float32)
        if type_name == "BF16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:, None]
        return numbers.astype(type_name.replace("F", "<f").replace("32", "4").replace("16", "2"))
    blocks = rng.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for offset in HALF_FIELDS[type_name]:
        scales = rng.standard_normal(num_blocks).astype(np.float16)
        scales[::7] *= np.float16(1e-5)  # subnormal halves too
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("type_name", TYPES)
def test_decode_equals_the_reference(type_name: str) -> None:
    blocks = random_blocks(type_name, 3001, 5)
    expected = gguf.dequantize(blocks.reshape(-1).view(np.uint8), Kind[type_name]).reshape(-1)
    out = np.empty(expected.size, np.float32)
    _native.gguf_decode(type_name, blocks.tobytes(), out)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


def test_all_halves_decode_exactly() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    finite = halves[np.isfinite(halves.view(np.float16))]
    out = np.empty(finite.size, np.float32)
    _native.gguf_decode("F16", finite.tobytes(), out)
    np.testing.assert_array_equal(out, finite.view(np.float16).astype(np.float32))


def test_decode_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="unknown GGUF type"):
        _native.gguf_decode("Q1_X", b"", np.empty(0, np.float32))
    with pytest.raises(ValueError, match="same number of blocks"):
        _native.gguf_decode("Q8_0", bytes(33), np.empty(32, np.float32))


def write_model(path: Path) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_float32("a.eps", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüß dich")
    writer.add_array("a.words", ["one", "", "drei"])
    writer.add_array("a.numbers", [1, 2, 3])
    plain = np.arange(10, dtype=np.float32).reshape(2, 5)
    coded = random_blocks("Q4_1", 6, 1).reshape(3, -1)
    writer.add_tensor("plain", plain)
    writer.add_tensor("coded", coded, raw_dtype=Kind.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"plain": plain, "coded": gguf.dequantize(coded, Kind.Q4_1)}


def test_reads_what_the_reference_writes(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "m.gguf")
    with GgufFile(tmp_path / "m.gguf") as file:
        assert file.metadata["a.count"] == 7
        assert file.metadata["a.eps"] == 0.5
        assert file.metadata["a.flag"] is True
        assert file.metadata["a.text"] == "grüß dich"
        assert file.metadata["a.words"] == ["one", "", "drei"]
        assert file.metadata["a.numbers"] == [1, 2, 3]
        assert [t.type for t in file.tensors.values()] == ["F32", "Q4_1"]
        assert file.tensors["coded"].shape == (3, 64)
        assert file.tensors["coded"].nbytes == 6 * 20
        for name, expected in tensors.items():
            np.testing.assert_array_equal(file.load(name), expected)
        with pytest.raises(ModelError, match="there is no tensor"):
            file.load("absent")


def test_every_cut_file_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    with GgufFile(tmp_path / "m.gguf") as file:
        end = max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, end, 3), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            GgufFile(cut)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 10_000), value=st.integers(0, 2**64 - 1))
def test_a_damaged_file_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "base.gguf").exists():
        write_model(folder / "base.gguf")
    data = bytearray((folder / "base.gguf").read_bytes())
    position %= len(data) - 8
    data[position : position + 8] = struct.pack("<Q", value)
    (folder / "damaged.gguf").write_bytes(data)
    try:
        with GgufFile(folder / "damaged.gguf") as file:
            for name in file.tensors:
                file.load(name)
    except ModelError:
        pass


def head(num_tensors: int, num_keys: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (head(0, 0, 1), "version 1"),
        (head(0, 0, 3 << 24), "big-endian"),
        (head(2**60, 0), "more than the file can hold"),
        (head(0, 2**60), "more than the file can hold"),
        (head(0, 1) + struct.pack("<Q", 2**63) + bytes(20), "cut off"),
        (head(0, 1) + struct.pack("<Q1sI", 1, b"k", 99) + bytes(20), "unknown value type"),
        (
            head(0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**62) + bytes(20),
            "more than the file can hold",
        ),
        (head(1, 0) + struct.pack("<Q1sI", 1, b"t", 9) + bytes(90), "dimensions"),
        (head(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 77, 0) + bytes(90), "unknown type"),
        (head(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 33, 8, 0) + bytes(90), "whole blocks"),
        (head(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 2**60, 0, 0) + bytes(90), "beyond"),
        (head(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 2**63) + bytes(90), "beyond"),
    ],
)
def test_foreign_and_absurd_files_are_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=words):
        GgufFile(tmp_path / "bad.gguf")


def test_types_without_decoder_fail_at_load_only(tmp_path: Path) -> None:
    data = head(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 256, 10, 0) + bytes(200)
    (tmp_path / "q2.gguf").write_bytes(data)
    with GgufFile(tmp_path / "q2.gguf") as file, pytest.raises(ModelError, match="Q2_K"):
        file.load("t")


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")
