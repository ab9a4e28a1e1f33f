"""Reader of GGUF files, the model format of ggml (its docs/gguf.md; versions 2 and 3).

    magic "GGUF" | version u32 | num_tensors u64 | num_keys u64
    keys:    name string | value type u32 | value
    tensors: name string | num_dims u32 | dims u64... | type u32 | offset u64
    padding to `general.alignment` | tensor data, offsets count from here

Nothing in the file is believed: counts, lengths and offsets are checked against its size first.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagemill import _native
from pagemill.core.errors import ModelError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. ``shape`` in numpy order (rows first), ``type`` as ggml names it.

    ``offset`` counts bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    offset: int


class _Reader:
    """A position in the bytes of a file; never reads beyond them."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.position = 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}; the file is damaged or cut off: get it again")

    def scalar(self, form: str, what: str) -> int | float | bool:
        end = self.position + struct.calcsize(form)
        if end > self.size:
            raise self.fail(f"the file ends inside {what}")
        (value,) = struct.unpack_from(form, self.data, self.position)
        self.position = end
        assert isinstance(value, int | float)
        return value

    def integer(self, form: str, what: str) -> int:
        return int(self.scalar(form, what))

    def strings(self, count: int, what: str) -> list[str]:
        try:
            texts, self.position = _native.gguf_strings(self.data, self.position, count)
        except ValueError as error:
            raise self.fail(f"{what}: {error}") from None
        return texts

    def count(self, form: str, least_bytes: int, what: str) -> int:
        """A number of things of ``least_bytes`` or more, which the rest of the file can hold."""
        count = self.integer(form, what)
        if count > (self.size - self.position) // least_bytes:
            raise self.fail(f"{what} says {count}, more than the file can hold")
        return count

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.strings(1, what)[0]
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}")
        if depth == _MAX_ARRAY_DEPTH:
            raise self.fail(f"{what}: arrays of arrays deeper than {_MAX_ARRAY_DEPTH}")
        return self.array(what, depth)

    def array(self, what: str, depth: int) -> list[object] | list[str]:
        kind = self.integer("<I", what)
        form = _SCALARS.get(kind)
        least_bytes = struct.calcsize(form) if form else 8
        count = self.count("<Q", least_bytes, f"the length of {what}")
        if kind == _STRING:
            return self.strings(count, what)
        if form is None:
            return [self.value(kind, what, depth + 1) for _ in range(count)]
        values = np.frombuffer(self.data, np.dtype(form), count, self.position)
        self.position += values.nbytes
        numbers: list[object] = values.tolist()
        return numbers


class GgufFile:
    """A GGUF file, mapped. ModelError where it is none, is damaged, or asks for the unknown.

    ``metadata``: str, int, float, bool; arrays as lists.
    ``tensors``: by name, in the order of the file. Usable as a context manager.
    """

    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{self.path}: cannot be read as a GGUF file: {error}") from error
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        reader = _Reader(self.path, self._data)
        _check_start(reader)
        num_tensors = reader.count("<Q", _MIN_TENSOR_BYTES, "the number of tensors")
        num_keys = reader.count("<Q", _MIN_KEY_BYTES, "the number of metadata keys")
        self.metadata = _read_metadata(reader, num_keys)
        heads = [_read_tensor(reader) for _ in range(num_tensors)]
        start = _data_start(reader, self.metadata.get("general.alignment", 32))
        self.tensors = {}
        for name, shape, kind, offset in heads:
            if name in self.tensors:
                raise reader.fail(f"there are two tensors named {name}")
            self.tensors[name] = _place(reader, name, shape, kind, start + offset)

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor as they lie in the file; release it before ``close``."""
        tensor = self._tensor(name)
        return memoryview(self._data)[tensor.offset : tensor.offset + tensor.nbytes]

    def load(self, name: str) -> NDArray[np.float32]:
        """A tensor decoded to float32, in its numpy shape. ModelError: no such tensor or type."""
        tensor = self._tensor(name)
        if _native.gguf_block(tensor.type) is None:
            raise ModelError(
                f"{self.path}: tensor {name} has type {tensor.type}, which has no decoder here;"
                " use a file quantized as Q4_K_M, Q4_0, Q4_1, Q5_K_M, Q6_K, Q8_0, F16 or BF16"
            )
        out = np.empty(prod(tensor.shape), np.float32)
        with self.raw(name) as data:
            _native.gguf_decode(tensor.type, data, out)
        return out.reshape(tensor.shape)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path}: there is no tensor {name}; the model may be incomplete")
        return self.tensors[name]

    def close(self) -> None:
        """Unmap the file. Arrays from ``load`` stay valid."""
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _check_start(reader: _Reader) -> None:
    if reader.data[:4] != b"GGUF":
        raise ModelError(f"{reader.path}: this is not a GGUF file (it does not start with 'GGUF')")
    reader.position = 4
    version = reader.integer("<I", "the version")
    if version in (2 << 24, 3 << 24):
        raise ModelError(f"{reader.path}: a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise ModelError(
            f"{reader.path}: GGUF version {version} is not 2 or 3; convert the model anew"
        )


def _read_metadata(reader: _Reader, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for number in range(num_keys):
        key = reader.strings(1, f"the name of metadata key {number}")[0]
        if key in metadata:
            raise reader.fail(f"metadata key {key} appears twice")
        metadata[key] = reader.value(reader.integer("<I", key), key)
    return metadata


def _read_tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (rows first), type number, offset within the data."""
    name = reader.strings(1, "the name of a tensor")[0]
    num_dims = reader.integer("<I", name)
    if num_dims > _MAX_DIMS:
        raise reader.fail(f"tensor {name} has {num_dims} dimensions, at most {_MAX_DIMS} exist")
    dims = [reader.integer("<Q", name) for _ in range(num_dims)]
    kind = reader.integer("<I", name)
    return name, tuple(reversed(dims)), kind, reader.integer("<Q", name)


def _data_start(reader: _Reader, alignment: object) -> int:
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= 1 << 20
        or alignment & (alignment - 1)
    ):
        raise reader.fail(f"general.alignment is {alignment!r}, not a power of two")
    return -(-reader.position // alignment) * alignment


def _place(
    reader: _Reader, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    """The tensor with its bytes, which must lie inside the file. Unknown types fail at ``load``."""
    type_name = _TYPE_NAMES.get(kind)
    if type_name is None:
        raise ModelError(
            f"{reader.path}: tensor {name} has the unknown type {kind}; the file needs a newer"
            " pagemill, or use another quantization of the model"
        )
    if 0 in shape:
        raise reader.fail(f"tensor {name} has an empty dimension")
    block_values, block_bytes = _native.gguf_block(type_name) or (1, 0)
    if shape and shape[-1] % block_values:
        raise reader.fail(f"rows of tensor {name} hold {shape[-1]} values, not whole blocks")
    nbytes = prod(shape) // block_values * block_bytes
    if offset + nbytes > reader.size:
        raise reader.fail(f"tensor {name} ends at byte {offset + nbytes}, beyond {reader.size}")
    return GgufTensor(name, shape, type_name, nbytes, offset)
