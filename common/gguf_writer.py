"""GGUF version 3, written as a stream: no tensor need be in memory, and an unfinished file never has the final name."""

import math
import os
import secrets
import struct
from pathlib import Path

import numpy as np

from common.gguf import ALIGNMENT, NUMBERS, STRUCTS, VALUE_TYPES, Strings, read

HEADER = struct.Struct("<4sIQQ")


def write(path, metadata: dict, tensors, types: dict | None = None) -> None:
    """Write a GGUF file, replacing `path` only once the new file is complete and reads back.

    `tensors` yields (name, Type, shape in numpy order, chunks), where `chunks` is an iterable of bytes-like pieces,
    consumed once and in order. `metadata` values are bool, int, float, str, bytes, numpy scalars and arrays, or lists
    of one kind; an int becomes u32 where it fits, a float f32, unless `types` says otherwise ({key: 'u64'}, as in
    GGUF.value_types). general.alignment, in bytes, is honoured.

    Raises ValueError for a value with no GGUF type or chunks of the wrong total size, GGUFError for a file the loader
    would refuse, OSError where nothing can be written.
    """
    path, tensors, types = Path(path), list(tensors), types or {}
    alignment = metadata.get("general.alignment", ALIGNMENT)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as out:
            out.write(HEADER.pack(b"GGUF", 3, len(tensors), len(metadata)))
            for key, value in metadata.items():
                out.write(text(key) + packed(key, value, types.get(key)))
            offset = 0
            for name, kind, shape, _ in tensors:
                dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
                out.write(text(name) + dims + struct.pack("<IQ", kind.id, offset))
                offset += padded(size(kind, shape), alignment)
            for name, kind, shape, chunks in tensors:
                out.write(bytes(-out.tell() % alignment))
                start = out.tell()
                for chunk in chunks:
                    out.write(chunk)
                if out.tell() - start != size(kind, shape):
                    raise ValueError(f"{name}: {out.tell() - start} bytes given, {size(kind, shape)} needed")
        read(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def size(kind, shape) -> int:
    """Bytes of a tensor's data."""
    return math.prod(shape) // kind.block * kind.bytes


def padded(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def packed(key: str, value, kind: str | None) -> bytes:
    """A value's type and bytes as they stand in the file."""
    kind = kind or kind_of(key, value)
    try:
        if not kind.startswith("["):
            return type_number(kind) + element(kind, value)
        kind = kind[1:-1]
        head = type_number("array") + type_number(kind) + struct.pack("<Q", len(value))
        if kind == "str":
            return head + b"".join(map(text, value))
        return head + np.ascontiguousarray(value, NUMBERS[kind]).tobytes()
    except (struct.error, OverflowError, TypeError) as error:
        raise ValueError(f"metadata key {key!r} does not hold a {kind}: {error}") from None


def type_number(kind: str) -> bytes:
    return struct.pack("<I", VALUE_TYPES.index(kind))


def element(kind: str, value) -> bytes:
    return text(value) if kind == "str" else STRUCTS[kind].pack(value)


def kind_of(key: str, value) -> str:
    """The GGUF type that holds a value: 'u32', 'str', '[f32]', …"""
    if isinstance(value, (np.ndarray, np.generic)):
        name = "bool" if value.dtype == np.bool_ else f"{value.dtype.kind}{value.dtype.itemsize * 8}"
        if name in NUMBERS and value.ndim < 2:
            return f"[{name}]" if value.ndim else name
    elif isinstance(value, bool):
        return "bool"
    elif isinstance(value, int):
        return next((name for name in ("u32", "i32", "u64", "i64") if fits(name, value)), "i64")
    elif isinstance(value, float):
        return "f32"
    elif isinstance(value, (str, bytes)):
        return "str"
    elif isinstance(value, Strings):
        return "[str]"
    elif isinstance(value, (list, tuple)) and value:
        kinds = {kind_of(key, item) for item in value}
        if len(kinds) == 1:
            return f"[{kinds.pop()}]"
        if kinds == {"u32", "i32"}:
            return "[i32]" if fits("i32", max(value)) else "[i64]"
    raise ValueError(
        f"metadata key {key!r}: no GGUF type holds {str(value)[:40]!r}; use a number, text, or one of their arrays"
    )


def fits(kind: str, value: int) -> bool:
    return np.iinfo(NUMBERS[kind]).min <= value <= np.iinfo(NUMBERS[kind]).max
