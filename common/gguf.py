"""GGUF, read without a copy: header, metadata, tensor table, and one view of the mapped file per tensor.

Compiled kernels do not check bounds, so this module is where memory safety is decided: every count, length, dimension
and offset is compared with the file, as an exact integer, before anything is allocated or viewed. What `read` returns
can be used without further checks. Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. The answer takes about
50 ms at most, and about 0.15 s more for each million strings, which are stepped over one by one.

The map follows the file: truncating or overwriting a file while it is in use crashes or corrupts its reader, and no
check can prevent that. Replace a model file by renaming a new one over it.
"""

import hashlib
import math
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ALIGNMENT = 32  # bytes, where general.alignment is absent
MAX_HEADER = 32 << 20  # bytes before the data; the largest vocabularies in use need about 16 MB
MAX_ITEMS = 4096  # metadata pairs, and tensors; files in use have about a hundred and at most two thousand
MAX_STRINGS = 1 << 20  # in all arrays together, 0.1 s to step over; vocabularies in use have up to 800,000 with merges
MAX_NAME = 64  # bytes of a tensor's name
MAX_KEY = 65535  # bytes of a metadata key
MAX_KEYS = 1 << 20  # bytes of all metadata keys: decoded, one odd character makes text four times as wide
MAX_DIMS = 4
MAX_SETTING = 1 << 20  # bytes of a text that are decoded to be judged; chat templates in use have up to 20,000
MAX_REASON = 400  # characters of an error that are shown; a file's own text may stand in it
LEAST_PAIR = 14  # bytes: key length 8, key 1, type 4, value 1
LEAST_TENSOR = 25  # bytes: name length 8, name 1, dimension count 4, type 4, offset 8


class GGUFError(Exception):
    """A file that is not a model we can trust: `path`, `offset` (byte in the file, or None), `reason`."""

    exit_code = 3

    def __init__(self, path, offset: int | None, reason: str):
        super().__init__(path, offset, reason)
        self.path, self.offset, self.reason = os.fsdecode(path), offset, reason

    def __str__(self) -> str:
        where = "" if self.offset is None else f" (at byte {self.offset})"
        reason = self.reason if len(self.reason) <= MAX_REASON else self.reason[: MAX_REASON - 1] + "…"
        return f"{printable(self.path)}: {printable(reason)}{where}"


class Type(NamedTuple):
    """A tensor type: a row is stored in blocks of `block` weights, each `bytes` bytes."""

    name: str
    id: int
    block: int
    bytes: int


# Sizes from ggml-common.h: scales, minima and packed weights of one block, in bytes.
TYPES = {
    name: Type(name, kind, block, size)
    for name, kind, block, size in [
        ("F32", 0, 1, 4),
        ("F16", 1, 1, 2),
        ("Q4_0", 2, 32, 18),
        ("Q4_1", 3, 32, 20),
        ("Q5_0", 6, 32, 22),
        ("Q5_1", 7, 32, 24),
        ("Q8_0", 8, 32, 34),
        ("Q8_1", 9, 32, 36),
        ("Q2_K", 10, 256, 84),
        ("Q3_K", 11, 256, 110),
        ("Q4_K", 12, 256, 144),
        ("Q5_K", 13, 256, 176),
        ("Q6_K", 14, 256, 210),
        ("Q8_K", 15, 256, 292),
        ("IQ2_XXS", 16, 256, 66),
        ("IQ2_XS", 17, 256, 74),
        ("IQ3_XXS", 18, 256, 98),
        ("IQ1_S", 19, 256, 50),
        ("IQ4_NL", 20, 32, 18),
        ("IQ3_S", 21, 256, 110),
        ("IQ2_S", 22, 256, 82),
        ("IQ4_XS", 23, 256, 136),
        ("I8", 24, 1, 1),
        ("I16", 25, 1, 2),
        ("I32", 26, 1, 4),
        ("I64", 27, 1, 8),
        ("F64", 28, 1, 8),
        ("IQ1_M", 29, 256, 56),
        ("BF16", 30, 1, 2),
        ("TQ1_0", 34, 256, 54),
        ("TQ2_0", 35, 256, 66),
        ("MXFP4", 39, 32, 17),
        ("NVFP4", 40, 64, 36),
        ("Q1_0", 41, 128, 18),
    ]
}
TYPE_BY_ID = {kind.id: kind for kind in TYPES.values()}

# BF16 has no numpy type: its bits are seen as 16-bit integers.
DTYPES = {
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}

# A metadata value's type, named after its numpy type; the number in the file is the place in this list.
VALUE_TYPES = ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64"]
FORMATS = zip(VALUE_TYPES, "BbHhIifB--Qqd", strict=True)
STRUCTS = {name: struct.Struct("<" + letter) for name, letter in FORMATS if letter != "-"}
NUMBERS = {name: np.dtype(f"<{'u' if name == 'bool' else name[0]}{form.size}") for name, form in STRUCTS.items()}


class Strings(Sequence):
    """An array of strings left in the file, each decoded when asked for: str, or bytes where it is not UTF-8.

    Each string is 8 bytes of length and its bytes, one after the other; `ends` holds where each ends in the file.
    """

    def __init__(self, data, start: int, ends: array):
        self.data, self.start, self.ends = data, start, ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        i = range(len(self))[i]
        start = self.ends[i - 1] if i else self.start
        return decoded(self.data[start + 8 : self.ends[i]])

    def __iter__(self):
        start = self.start
        for end in self.ends:
            yield decoded(self.data[start + 8 : end])
            start = end

    def tolist(self) -> list:
        return list(self)

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"

    def longest(self) -> int:
        """Bytes of the longest string, 0 where there is none."""
        return int(np.diff(self.ends, prepend=self.start).max(initial=8)) - 8


class Tensor:
    """A weight in the mapped file.

    `shape` is in numpy order, rows first: (N, K) for a matmul weight. `offset` counts from the start of the file and
    `nbytes` is the exact size. `strides` are in bytes, from one item of `array` to the next along each axis.
    """

    __slots__ = ("name", "type", "shape", "offset", "nbytes", "file")

    def __init__(self, name: str, type: Type, shape: tuple, offset: int, file: np.ndarray):
        self.name, self.type, self.shape, self.offset, self.file = name, type, shape, offset, file
        self.nbytes = math.prod(shape) // type.block * type.bytes

    @property
    def raw(self) -> np.ndarray:
        """The tensor's bytes, read-only, in the map: (nbytes,) uint8."""
        return self.file[self.offset : self.offset + self.nbytes]

    @property
    def blocks(self) -> np.ndarray:
        """The same bytes, one row a block: (*shape[:-1], K // block, bytes) uint8."""
        return self.raw.reshape(*self.shape[:-1], self.row_blocks, self.type.bytes)

    @property
    def array(self) -> np.ndarray:
        """The same bytes, one item a number, (*shape), or an opaque block, (*shape[:-1], K // block)."""
        dtype = DTYPES.get(self.type.name, f"V{self.type.bytes}")
        return self.raw.view(dtype).reshape((*self.shape[:-1], self.row_blocks) if self.shape else ())

    @property
    def row_blocks(self) -> int:
        return (self.shape[-1] if self.shape else 1) // self.type.block

    @property
    def strides(self) -> tuple:
        return self.array.strides

    @property
    def T(self) -> np.ndarray:
        """`array` with its axes reversed: the same bytes, so walking down a column strides through the file."""
        return self.array.T

    def broadcast_to(self, shape: tuple) -> np.ndarray:
        """`array` repeated to `shape` with strides of 0: the same bytes, read many times."""
        return np.broadcast_to(self.array, shape)

    def __getitem__(self, rows) -> "Tensor":
        """The tensor of some rows: an index, or a slice without a step. ValueError where a block would be cut."""
        if not self.shape:
            raise IndexError(f"{self.name} has no rows")
        if isinstance(rows, slice):
            first, last, step = rows.indices(self.shape[0])
            if step != 1:
                raise ValueError(f"{self.name}: rows with a step are not contiguous; slice .array instead")
            shape = (max(0, last - first), *self.shape[1:])
        else:
            first, shape = range(self.shape[0])[rows], self.shape[1:]
        before, size = first * math.prod(self.shape[1:]), math.prod(shape)
        if before % self.type.block or size % self.type.block:
            raise ValueError(f"{self.name}: the slice cuts a block of {self.type.block} weights")
        return Tensor(self.name, self.type, shape, self.offset + before // self.type.block * self.type.bytes, self.file)

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.type.name}, {self.shape})"


class Metadata(Mapping):
    """A file's metadata, in its order: key -> int, float, bool, text, a numpy view, or `Strings`.

    Text stays in the file and is decoded when asked for: str, or bytes where it is not UTF-8.
    """

    def __init__(self, data):
        self.data, self.types, self.entries = data, {}, {}

    def __getitem__(self, key: str):
        value = self.entries[key]
        return decoded(self.data[value]) if isinstance(value, slice) else value

    def setting(self, key: str, default=None):
        """The value, text cut to MAX_SETTING bytes: no check of a setting lets so much pass, cut or whole."""
        value = self.entries.get(key, default)
        if isinstance(value, slice):
            return decoded(self.data[value.start : min(value.stop, value.start + MAX_SETTING)])
        return value

    def __contains__(self, key) -> bool:
        return key in self.entries

    def __iter__(self):
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class GGUF(NamedTuple):
    """A checked file. What its path names may be another by now; the map is this one for good."""

    path: Path
    version: int
    alignment: int  # bytes
    metadata: Metadata
    tensors: dict  # name -> Tensor, in the file's order
    data_offset: int  # bytes; where tensor data begins
    size: int  # bytes
    file: np.ndarray  # the whole map, (size,) uint8, read-only

    @property
    def value_types(self) -> dict:
        """Each metadata value's type in the file: 'u32', 'str', '[f32]', …"""
        return self.metadata.types

    def sha256(self) -> str:
        """The digest of the mapped bytes; about 1 s a gigabyte."""
        return hashlib.sha256(self.file).hexdigest()


def read(path) -> GGUF:
    """Map a GGUF file and check all of it but the weights' values.

    Raises GGUFError, and nothing else, whatever the path names and whatever the file holds.
    """
    path = os.fsdecode(path)
    data = map_file(path)
    cursor = Cursor(path, data)
    version, tensor_count, pair_count = header(cursor)
    metadata = read_metadata(cursor, pair_count)
    alignment = checked_alignment(cursor, metadata)
    table = [tensor_entry(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.at // alignment) * alignment
    check_layout(cursor, table, alignment, data_offset)
    file = np.frombuffer(data, np.uint8)
    tensors = {e.name: Tensor(e.name, e.type, e.shape, data_offset + e.offset, file) for e in table}
    return GGUF(Path(path), version, alignment, metadata, tensors, data_offset, len(data), file)


def map_file(path) -> mmap.mmap:
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer that may never come.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        raise GGUFError(path, None, f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    try:
        info = os.fstat(handle)
        if stat.S_ISDIR(info.st_mode):
            raise GGUFError(path, None, "is a directory; name the .gguf file inside it")
        if not stat.S_ISREG(info.st_mode):
            raise GGUFError(path, None, "is not a regular file")
        if info.st_size == 0:
            raise GGUFError(path, 0, "is empty, so it is not a GGUF file")
        return mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise GGUFError(path, None, f"cannot be mapped: {error}") from None
    finally:
        os.close(handle)


class Cursor:
    """A position in the mapped file that no read moves past the end, or past MAX_HEADER."""

    def __init__(self, path, data):
        self.path, self.data, self.at = path, data, 0
        self.size = len(data)
        self.limit = min(self.size, MAX_HEADER)

    def fail(self, reason: str, at: int | None = None):
        raise GGUFError(self.path, self.at if at is None else at, reason)

    def need(self, length: int, what: str) -> None:
        if length > self.limit - self.at:
            if length > self.size - self.at:
                self.fail(f"{what} goes past the end of the file ({self.size} bytes); it may be cut short")
            self.fail(f"{what} goes past the first {MAX_HEADER >> 20} MiB, more metadata than any model has")

    def number(self, kind: str, what: str):
        form = STRUCTS[kind]
        self.need(form.size, what)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def span(self, what: str) -> slice:
        """Where a string's bytes lie."""
        length = self.number("u64", what)
        self.need(length, what)
        self.at += length
        return slice(self.at - length, self.at)

    def text(self, what: str, longest: int) -> str:
        """A key or a name: 1 to `longest` bytes of UTF-8."""
        start = self.at
        length = self.number("u64", what)
        if not 0 < length <= longest:
            self.fail(f"{what} is {length} bytes long; 1 to {longest} are allowed", start)
        self.need(length, what)
        self.at += length
        text = decoded(self.data[self.at - length : self.at])
        return text if isinstance(text, str) else self.fail(f"{what} is not UTF-8", start)


def header(cursor: Cursor) -> tuple[int, int, int]:
    """Version, tensor count and metadata count of the 24-byte header."""
    magic = cursor.data[:4]
    if magic != b"GGUF":
        cursor.fail(f"is not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    cursor.at = 4
    version = cursor.number("u32", "the header")
    if version in (1 << 24, 2 << 24, 3 << 24):
        cursor.fail("is a big-endian GGUF file; only little-endian files are read, so please re-convert it", 4)
    if version == 1:
        cursor.fail("is GGUF version 1, whose counts are 32 bits wide; please re-convert the model", 4)
    if version not in (2, 3):
        cursor.fail(f"is GGUF version {version}; versions 2 and 3 are read", 4)
    tensor_count, pair_count = cursor.number("u64", "the header"), cursor.number("u64", "the header")
    room = cursor.size - cursor.at
    if tensor_count * LEAST_TENSOR + pair_count * LEAST_PAIR > room:
        cursor.fail(
            f"declares {tensor_count} tensors and {pair_count} metadata pairs, which {room} bytes can't hold", 8
        )
    if max(tensor_count, pair_count) > MAX_ITEMS:
        cursor.fail(f"declares {tensor_count} tensors and {pair_count} metadata pairs; {MAX_ITEMS} is the limit", 8)
    return version, tensor_count, pair_count


def read_metadata(cursor: Cursor, count: int) -> Metadata:
    metadata, strings_left, keys_left = Metadata(cursor.data), MAX_STRINGS, MAX_KEYS
    for _ in range(count):
        start = cursor.at
        key = cursor.text("a metadata key", MAX_KEY)
        keys_left -= cursor.at - start - 8
        if keys_left < 0:
            cursor.fail(f"the metadata keys take more than {MAX_KEYS >> 20} MiB, more than any model's", start)
        if key in metadata.types:
            cursor.fail(f"metadata key {shown(key)} appears twice", start)
        kind = value_type(cursor, key)
        if kind == "array":
            kind = value_type(cursor, key)
            value = array_value(cursor, key, kind, strings_left)
            strings_left -= len(value) if kind == "str" else 0
            kind = f"[{kind}]"
        else:
            value = scalar_value(cursor, key, kind)
        metadata.types[key], metadata.entries[key] = kind, value
    return metadata


def value_type(cursor: Cursor, key: str) -> str:
    kind = cursor.number("u32", "a metadata type")
    if kind >= len(VALUE_TYPES):
        cursor.fail(f"metadata key {shown(key)} has the unknown value type {kind}", cursor.at - 4)
    return VALUE_TYPES[kind]


def scalar_value(cursor: Cursor, key: str, kind: str):
    if kind == "str":
        return cursor.span(f"the text of metadata key {shown(key)}")
    value = cursor.number(kind, "a metadata value")
    if kind != "bool":
        return value
    if value > 1:
        cursor.fail(f"metadata key {shown(key)} is a bool of {value}; 0 and 1 are allowed", cursor.at - 1)
    return value == 1


def array_value(cursor: Cursor, key: str, kind: str, strings_left: int):
    """A numpy view of numbers, or Strings: an array costs no memory of its own but the strings' ends."""
    what = f"the array of metadata key {shown(key)}"
    start = cursor.at
    if kind == "array":
        cursor.fail(f"{what} holds arrays; nested arrays are not supported", start)
    count = cursor.number("u64", what)
    if kind == "str":
        cursor.need(count * 8, what)
        if count > strings_left:
            cursor.fail(f"{what} declares {count} strings; {MAX_STRINGS} in all are allowed", start)
        return strings_value(cursor, count, what)
    dtype = NUMBERS[kind]
    cursor.need(count * dtype.itemsize, what)
    view = np.frombuffer(cursor.data, dtype, count, cursor.at)
    cursor.at += view.nbytes
    if kind != "bool":
        return view
    if count and view.max() > 1:
        cursor.fail(f"{what} holds a bool that is neither 0 nor 1", start)
    return view.view(np.bool_)


def strings_value(cursor: Cursor, count: int, what: str) -> Strings:
    """Step over `count` strings; this loop runs once per token of a vocabulary, hence its plain locals."""
    at, limit, data, length = cursor.at, cursor.limit, cursor.data, STRUCTS["u64"].unpack_from
    start, ends = at, array("q", bytes(8 * count))
    for i in range(count):
        step = 8 + (length(data, at)[0] if at <= limit - 8 else 0)
        if step > limit - at:
            cursor.at = at
            cursor.need(step, what)
        at += step
        ends[i] = at
    cursor.at = at
    return Strings(data, start, ends)


def checked_alignment(cursor: Cursor, metadata: Metadata) -> int:
    kind = metadata.types.get("general.alignment", "u32")
    if kind != "u32":
        cursor.fail(f"general.alignment is of type {kind}; it must be u32")
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}; it must be a power of two, 8 to 65536")
    return alignment


class Entry(NamedTuple):
    """A row of the tensor table; `offset` counts from the start of the data, `at` is where the row begins."""

    name: str
    type: Type
    shape: tuple
    offset: int
    nbytes: int
    at: int


def tensor_entry(cursor: Cursor) -> Entry:
    at = cursor.at
    name = cursor.text("a tensor name", MAX_NAME)
    count = cursor.number("u32", "the tensor table")
    if count > MAX_DIMS:
        cursor.fail(f"tensor {shown(name)} has {count} dimensions; {MAX_DIMS} is the limit", at)
    # The file lists the fastest-varying dimension first, numpy last.
    shape = tuple([cursor.number("u64", "the tensor table") for _ in range(count)][::-1])
    if 0 in shape:
        cursor.fail(f"tensor {shown(name)} has a dimension of 0", at)
    number, offset = cursor.number("u32", "the tensor table"), cursor.number("u64", "the tensor table")
    kind = TYPE_BY_ID.get(number)
    if kind is None:
        cursor.fail(f"tensor {shown(name)} has the unknown type {number}", at)
    row = shape[-1] if shape else 1
    if row % kind.block:
        cursor.fail(f"tensor {shown(name)} has rows of {row}, not a multiple of {kind.name}'s {kind.block}", at)
    return Entry(name, kind, shape, offset, math.prod(shape) // kind.block * kind.bytes, at)


def check_layout(cursor: Cursor, table: list[Entry], alignment: int, data_offset: int) -> None:
    """Names differ; data is aligned, inside the file, and no byte belongs to two tensors."""
    names = set()
    for entry in table:
        if entry.name in names:
            cursor.fail(f"tensor {shown(entry.name)} appears twice", entry.at)
        names.add(entry.name)
        if entry.offset % alignment:
            cursor.fail(f"tensor {shown(entry.name)} is at {entry.offset}, not a multiple of {alignment}", entry.at)
        end = data_offset + entry.offset + entry.nbytes
        if end > cursor.size:
            cursor.fail(
                f"tensor {shown(entry.name)} ends at byte {end} of a file of {cursor.size}; it may be cut short",
                entry.at,
            )
    ordered = sorted(table, key=lambda entry: entry.offset)
    for one, other in zip(ordered, ordered[1:], strict=False):
        if one.offset + one.nbytes > other.offset:
            cursor.fail(f"tensors {shown(one.name)} and {shown(other.name)} overlap", other.at)


def decoded(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def printable(text: str) -> str:
    """Text from a file made safe for a terminal: whatever is not printable becomes an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(name: str) -> str:
    """A name from a file, for an error message: quoted, escaped, cut to 64 characters."""
    return repr(name if len(name) <= 64 else name[:63] + "…")
