"""The memory-safety boundary: a file is either refused with a GGUFError, or every view of it lies inside the map."""

import hashlib
import io
import json
import os
import pickle
import socket
import struct
import tracemalloc
from pathlib import Path

import gguf as peer
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from common import inspect
from common.gguf import MAX_HEADER, MAX_ITEMS, MAX_SETTING, MAX_STRINGS, TYPES, VALUE_TYPES, GGUFError, read
from common.gguf_writer import write
from common.model import open_model
from tests.test_model import llama, tensor

CASES = Path(__file__).parent / "cases" / "gguf"
VERDICTS = json.loads((CASES / "verdicts.json").read_text())
MEMORY = 50_000_000  # bytes a file may cost, whatever it declares

# A second author of files: nothing here comes from the writer under test.


def text(value) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def pair(key, kind: str, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", VALUE_TYPES.index(kind)) + value


def array(kind: str, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", VALUE_TYPES.index(kind), count) + items


def entry(name, dims=(8,), kind=0, offset=0, count=None) -> bytes:
    dims = struct.pack(f"<I{len(dims)}Q", len(dims) if count is None else count, *dims)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def built(pairs=(), entries=(), data=b"", version=3, magic=b"GGUF", counts=None, alignment=32) -> bytes:
    tensors, keys = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % alignment) + data


def u32(key, value):
    return pair(key, "u32", struct.pack("<I", value))


BOTH_ENDS = array("bool", 3, b"\1\0\1")

ACCEPTED = {
    "nothing in it": built(),
    "header only": built()[:24],
    "version 2": built([u32("a", 1)], [entry("t")], bytes(32), version=2),
    "no padding after the last tensor": built([], [entry("t", (3,))], bytes(12)),
    "bytes after the last tensor": built([], [entry("t")], bytes(999)),
    "a number": built([], [entry("t", ())], bytes(4)),
    "four dimensions": built([], [entry("t", (2, 3, 4, 5))], bytes(480)),
    "name of 64 bytes": built([], [entry("x" * 64)], bytes(32)),
    "name of 32 two-byte letters": built([], [entry("é" * 32)], bytes(32)),
    "key of 65535 bytes": built([u32("k" * 65535, 1)]),
    "alignment 8": built(
        [u32("general.alignment", 8)], [entry("t", (2,)), entry("u", offset=8)], bytes(40), alignment=8
    ),
    "alignment 65536": built([u32("general.alignment", 65536)], [entry("t")], bytes(32), alignment=65536),
    "order of the data differs": built([], [entry("t", offset=32), entry("u")], bytes(64)),
    "empty arrays": built([pair(f"k{i}", "array", array(kind, 0, b"")) for i, kind in enumerate(["u8", "str", "f64"])]),
    "bools": built([pair("k", "array", BOTH_ENDS), pair("b", "bool", b"\0")]),
    "not UTF-8": built(
        [pair("k", "str", text(b"\xff")), pair("l", "array", array("str", 2, text(b"\xfe") + text("é")))]
    ),
    "empty text": built([pair("k", "str", text(""))]),
    "NaN": built([pair("k", "f32", struct.pack("<f", float("nan")))]),
}

REJECTED = {
    "empty": b"",
    "PNG": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "half a magic": b"GG",
    "older format": b"tjgg" + bytes(100),
    "half a header": built()[:23],
    "version 1": built(version=1),
    "version 4": built(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "big-endian version 2": b"GGUF" + struct.pack(">IQQ", 2, 0, 0),
    "huge tensor count": built(counts=(2**63, 0)),
    "huge counts that wrap to small ones": built(counts=(2**64 - 1, 2**64 - 1)),
    "4000 pairs in a few bytes": built([u32("a", 1)], counts=(0, 4000)),
    "a million strings in a few bytes": built([pair("k", "array", array("str", 1_000_000, text("a")))]),
    "one tensor too few": built([], [entry("t")], bytes(32), counts=(2, 0)),
    "one pair too few": built([u32("a", 1)], counts=(0, 2)),
    "a million pairs": built([u32(f"{i}", 1) for i in range(100_000)]),
    "too many tensors": built(
        [], [entry(f"{i}", (8,), 0, 32 * i) for i in range(MAX_ITEMS + 1)], bytes(32 * MAX_ITEMS + 32)
    ),
    "key twice": built([u32("a", 1), u32("a", 1)]),
    "key of 65536 bytes": built([u32("k" * 65536, 1)]),
    "megabytes of keys": built([u32(f"{i}" + "é" * 32000, 1) for i in range(40)]),
    "key not UTF-8": built([u32(b"\xff\xfe", 1)]),
    "key of 2^64 - 1 bytes": built([struct.pack("<Q", 2**64 - 1) + b"k"], counts=(0, 1), data=bytes(64)),
    "name not UTF-8": built([], [entry(b"\xff")], bytes(32)),
    "name twice, apart": built([], [entry("t"), entry("t", offset=32)], bytes(64)),
    "unknown array type": built([pair("k", "array", struct.pack("<IQ", 13, 1) + bytes(64))]),
    "array of arrays": built([pair("k", "array", array("array", 1, array("u8", 1, b"\1")))]),
    "empty array of arrays": built([pair("k", "array", array("array", 0, b""))]),
    "array that wraps to a small one": built([pair("k", "array", array("u64", 2**61 + 1, bytes(64)))]),
    "strings that wrap to a few": built([pair("k", "array", array("str", 2**61 + 1, bytes(64)))]),
    "string of 2^64 - 8 bytes in an array": built(
        [pair("k", "array", array("str", 2, struct.pack("<Q", 2**64 - 8) * 2))]
    ),
    "string of 2^63 bytes": built([pair("k", "str", struct.pack("<Q", 2**63) + bytes(64))]),
    "last string cut short": built(
        [pair("k", "array", array("str", 2, text("a") + struct.pack("<Q", 1)))], alignment=1
    ),
    "more strings than any vocabulary": built(
        [pair("k", "array", array("str", MAX_STRINGS + 1, text("") * (MAX_STRINGS + 1)))]
    ),
    "bool of 255": built([pair("k", "bool", b"\xff")]),
    "bool of 2 in an array": built([pair("k", "array", array("bool", 3, b"\1\2\1"))]),
    "alignment is text": built([pair("general.alignment", "str", text("32"))]),
    "alignment is u64": built([pair("general.alignment", "u64", struct.pack("<Q", 32))]),
    "alignment is a float": built([pair("general.alignment", "f32", struct.pack("<f", 32))]),
    "alignment is a list": built([pair("general.alignment", "array", array("u32", 1, struct.pack("<I", 32)))]),
    "alignment 4": built([u32("general.alignment", 4)]),
    "alignment 131072": built([u32("general.alignment", 131072)]),
    "alignment 48": built([u32("general.alignment", 48)]),
    "five dimensions": built([], [entry("t", (1,) * 5)], bytes(32)),
    "2^32 - 1 dimensions": built([], [entry("t", (1,), count=2**32 - 1)], bytes(32)),
    "dimension of 0": built([], [entry("t", (8, 0))], bytes(32)),
    "dimensions of 0 and 2^63": built([], [entry("t", (0, 2**63))], bytes(32)),
    "dimensions that wrap to 0": built([], [entry("t", (2**32, 2**32))], bytes(32)),
    "dimensions that wrap to 1": built([], [entry("t", (2**63 + 1, 2**63 + 1))], bytes(32)),
    "bytes that wrap to 4": built([], [entry("t", (2**62 + 1,))], bytes(32)),
    "removed type": built([], [entry("t", (32,), 4)], bytes(32)),
    "type 2^32 - 1": built([], [entry("t", (32,), 2**32 - 1)], bytes(32)),
    "block across two rows": built([], [entry("t", (128, 2), TYPES["Q4_K"].id)], bytes(999)),
    "block cut": built([], [entry("t", (255, 2), TYPES["Q4_K"].id)], bytes(999)),
    "a number of blocks": built([], [entry("t", (), TYPES["Q8_0"].id)], bytes(99)),
    "offset that wraps": built([], [entry("t", offset=2**64 - 32)], bytes(64)),
    "offset in front of the end": built([], [entry("t", offset=32)], bytes(63)),
    "one byte missing": built([], [entry("t")], bytes(31)),
    "no data at all": built([], [entry("t")])[:60],
    "overlap by a byte": built([], [entry("t", (9,)), entry("u", offset=32)], bytes(64)),
    "same place": built([], [entry("t"), entry("u")], bytes(64)),
    "one inside another": built([], [entry("t", (64,)), entry("u", offset=96), entry("v", offset=288)], bytes(320)),
    "metadata without end": built([pair("k", "array", array("u8", MAX_HEADER, bytes(MAX_HEADER)))]),
}


def touch(gguf) -> None:
    """Read every byte that the loader handed out, and check where it lies."""
    taken = []
    for view in gguf.tensors.values():
        assert gguf.data_offset <= view.offset
        assert view.offset + view.nbytes <= gguf.size
        assert view.raw.nbytes == view.nbytes
        assert view.blocks.nbytes == view.array.nbytes == view.nbytes
        assert view.offset % 8 == 0
        view.raw.sum()
        taken.append((view.offset, view.offset + view.nbytes))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
    for value in gguf.metadata.values():
        if hasattr(value, "tolist"):
            assert len(value.tolist()) == len(value)
    json.dumps(inspect.document(gguf), allow_nan=False)


def attempt(path) -> GGUFError | None:
    """Read a file and all that it gives; the error, or None where it was accepted."""
    try:
        gguf = read(path)
    except GGUFError as error:
        assert str(error).startswith(f"{path}: ")
        return error
    touch(gguf)
    return None


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.gguf"


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    assert (attempt(CASES / f"{name}.gguf") is None) == (VERDICTS[name]["verdict"] == "accept")


@pytest.mark.parametrize("name", ACCEPTED)
def test_well_formed_files_are_accepted(file, name):
    file.write_bytes(ACCEPTED[name])
    assert attempt(file) is None


@pytest.mark.parametrize("name", REJECTED)
def test_malformed_files_are_refused_in_little_memory(file, name):
    file.write_bytes(REJECTED[name])
    tracemalloc.start()
    error = attempt(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error is not None
    assert error.offset is None or 0 <= error.offset <= len(REJECTED[name])
    assert "\n" not in str(error)
    assert peak < 200_000 + 2 * len(REJECTED[name])


STRINGS = pair("k", "array", array("str", 3, text("abcdefghijkl") * 3))
WHOLE = [
    # One pair each, so that the counts alone do not tell that the file is short.
    built([STRINGS], alignment=1),
    built([pair("s", "str", text("a" * 40))], alignment=1),
    built([pair("k", "array", array("u16", 20, bytes(40)))], alignment=1),
    built([], [entry("t", (1, 1, 1, 2))], bytes(8)),
    built([u32("a", 1), STRINGS], [entry("t", (2, 3), 1), entry("u", offset=32)], bytes(64)),
]


@pytest.mark.parametrize("whole", WHOLE)
def test_a_file_cut_anywhere_is_refused(file, whole):
    for size in range(len(whole)):
        file.unlink(missing_ok=True)
        file.write_bytes(whole[:size])
        assert attempt(file), f"{size} bytes of {len(whole)}"
    file.write_bytes(whole)
    assert attempt(file) is None


def test_the_strings_of_all_arrays_count_together(file):
    half = MAX_STRINGS // 2 + 1
    file.write_bytes(built([pair(key, "array", array("str", half, text("") * half)) for key in "ab"]))
    assert "the array of metadata key 'b' declares" in attempt(file).reason


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "is empty"),
        ("PNG", r"not a GGUF file: it begins with b'\x89PNG'"),
        ("version 1", "please re-convert"),
        ("version 4", "version 4; versions 2 and 3"),
        ("big-endian", "big-endian"),
        ("big-endian version 2", "big-endian"),
        ("4000 pairs in a few bytes", "which 40 bytes can't hold"),
        ("one byte missing", "ends at byte 96 of a file of 95"),
        ("key twice", "'a' appears twice"),
        ("overlap by a byte", "'t' and 'u' overlap"),
        ("megabytes of keys", "keys take more than 1 MiB"),
        ("array of arrays", "nested"),
        ("alignment is u64", "general.alignment is of type u64"),
        ("one inside another", "'t' and 'u' overlap"),
    ],
)
def test_the_reason_names_the_cause(file, name, words):
    file.write_bytes(REJECTED[name])
    assert words in attempt(file).reason


def test_an_error_says_where_and_survives_a_process_boundary(file):
    file.write_bytes(built([u32("a", 1), u32("a", 1)]))
    error = attempt(file)
    again = pickle.loads(pickle.dumps(error))
    assert (again.path, again.offset, again.reason) == (str(file), 41, error.reason)
    assert str(again) == str(error) == f"{file}: metadata key 'a' appears twice (at byte 41)"


def test_names_in_errors_are_safe_for_a_terminal_and_short(file):
    file.write_bytes(built([u32("\x1b[2J\n" + "k" * 60000, 1)] * 2))
    message = str(attempt(file))
    assert "\x1b" not in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_reason_is_safe_for_a_terminal_and_cut():
    told = str(GGUFError("a.gguf", 7, "\x1b[2J\n" + "k" * 60_000))
    assert told.isprintable()
    assert len(told) < 500
    assert told.endswith("(at byte 7)")


@pytest.mark.parametrize("value", [text("\U0001f600" + "a" * 20_000_000), text(b"\xff" + b"a" * 20_000_000)])
def test_an_alignment_of_megabytes_of_text_is_not_decoded(file, value):
    file.write_bytes(built([pair("general.alignment", "str", value)]))
    tracemalloc.start()
    assert "general.alignment is of type str" in attempt(file).reason
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_setting_is_cut_and_a_value_is_not(file):
    file.write_bytes(built([pair("k", "str", text("a" * (MAX_SETTING + 5))), u32("n", 3)]))
    metadata = read(file).metadata
    assert metadata.setting("k") == "a" * MAX_SETTING
    assert len(metadata["k"]) == MAX_SETTING + 5
    assert (metadata.setting("n"), metadata.setting("none"), metadata.setting("none", 4)) == (3, None, 4)


@pytest.mark.parametrize(("items", "longest"), [([], 0), (["", "a"], 1), (["é", "abc", "ab"], 3)])
def test_the_longest_string_is_known_undecoded(file, items, longest):
    file.write_bytes(built([u32("n", 3), pair("k", "array", array("str", len(items), b"".join(map(text, items))))]))
    assert read(file).metadata["k"].longest() == longest


def test_the_digest_is_of_the_map(file):
    file.write_bytes(built([u32("a", 1)]))
    gguf, before = read(file), hashlib.sha256(file.read_bytes()).hexdigest()
    file.unlink()  # as a rename over it does
    file.write_bytes(built([u32("a", 2)]))
    assert gguf.sha256() == before != read(file).sha256()


def test_paths_that_hold_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    # A socket's own path may be at most about a hundred bytes long.
    here = os.getcwd()
    os.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket.gguf")
        os.chdir(here)
        (tmp_path / "loop.gguf").symlink_to("loop.gguf")
        for path, words in [
            (tmp_path / "none.gguf", "No such file"),
            (tmp_path, "is a directory"),
            (tmp_path / "pipe.gguf", "not a regular file"),
            (tmp_path / "socket.gguf", "cannot be opened"),
            (tmp_path / "loop.gguf", "cannot be opened"),
            ("/dev/zero", "not a regular file"),
            ("/proc/self/status", "is empty"),
            (f"{tmp_path}/a\0b", "cannot be opened"),
            (f"{tmp_path}/{'x' * 5000}", "cannot be opened"),
            (os.fsencode(tmp_path) + b"/\xff.gguf", "No such file"),
            ("", "cannot be opened"),
        ]:
            with pytest.raises(GGUFError, match=words) as caught:
                read(path)
            str(caught.value).encode()
            with pytest.raises(GGUFError):
                open_model(path)


def test_an_unreadable_file(file, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")

    file.write_bytes(built())
    monkeypatch.setattr(os, "open", denied)  # root may read a file of any mode
    with pytest.raises(GGUFError, match="cannot be opened: Permission denied"):
        read(file)


def test_arrays_cost_no_memory_of_their_own(file):
    count = 10_000_000
    file.write_bytes(built([pair("k", "array", array("bool", count, b"\1" * count))]))
    tracemalloc.start()
    value = read(file).metadata["k"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (value.dtype, len(value), value.all()) == (np.bool_, count, True)
    assert not value.flags.writeable
    assert peak < 1_000_000


def test_text_costs_no_memory_until_it_is_asked_for(file):
    # One astral character makes Python keep 4 bytes for each of the others.
    file.write_bytes(built([pair("k", "str", text("a" * 20_000_000 + "\U0001f600"))]))
    tracemalloc.start()
    gguf = read(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert gguf.metadata["k"].endswith("a\U0001f600")


def test_strings_cost_no_more_than_where_they_end(file):
    count = MAX_STRINGS // 16
    file.write_bytes(built([pair("k", "array", array("str", count, text("ab") * count))]))
    tracemalloc.start()
    gguf = read(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY / 16
    assert gguf.metadata["k"][count - 1] == "ab"


def test_metadata_values(file):
    numbers = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31)}
    numbers |= {"u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1}
    letters = dict(zip(VALUE_TYPES, "BbHhIifBxxQqd", strict=True))
    pairs = [pair(kind, kind, struct.pack("<" + letters[kind], value)) for kind, value in numbers.items()]
    arrays = [
        pair(f"[{kind}]", "array", array(kind, 2, struct.pack(f"<2{letters[kind]}", value, 1)))
        for kind, value in numbers.items()
    ]
    strings = [pair("[str]", "array", array("str", 3, text("a") + text("") + text("é")))]
    file.write_bytes(built([*pairs, *arrays, *strings, pair("bool", "bool", b"\1"), pair("str", "str", text("x"))]))
    gguf = read(file)
    for kind, value in numbers.items():
        assert gguf.metadata[kind] == value
        assert type(gguf.metadata[kind]) is type(value)
        assert gguf.metadata[f"[{kind}]"].tolist() == [value, 1]
        assert gguf.metadata[f"[{kind}]"].dtype == np.dtype(letters[kind].replace("Q", "u8").replace("q", "i8"))
    strings = gguf.metadata["[str]"]
    assert list(strings) == strings.tolist() == ["a", "", "é"]
    assert (strings[-1], strings[1:], len(strings), "é" in strings) == ("é", ["", "é"], 3, True)
    with pytest.raises(IndexError):
        strings[3]
    assert gguf.metadata["bool"] is True
    assert gguf.metadata["str"] == "x"
    assert all(key == kind for key, kind in gguf.value_types.items())
    assert "none" not in gguf.metadata


def test_text_that_is_not_utf8_stays_bytes(file):
    file.write_bytes(ACCEPTED["not UTF-8"])
    gguf = read(file)
    assert gguf.metadata["k"] == b"\xff"
    assert gguf.metadata["l"].tolist() == [b"\xfe", "é"]


def test_views_share_the_map(file):
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, 144), np.uint8)
    tensors = [("f", TYPES["F32"], (4, 6), [rows]), ("q", TYPES["Q4_K"], (3, 512), [blocks])]
    write(file, {}, tensors)
    gguf = read(file)
    f, q = gguf.tensors.values()
    np.testing.assert_array_equal(f.array, rows)
    np.testing.assert_array_equal(q.blocks, blocks)
    np.testing.assert_array_equal(f.T, rows.T)
    np.testing.assert_array_equal(f[1:3].array, rows[1:3])
    np.testing.assert_array_equal(f[-1].array, rows[-1])
    np.testing.assert_array_equal(q[2].raw, blocks[2].ravel())
    np.testing.assert_array_equal(f.broadcast_to((2, 4, 6)), np.broadcast_to(rows, (2, 4, 6)))
    assert (f.strides, f.T.strides, f.broadcast_to((2, 4, 6)).strides) == ((24, 4), (4, 24), (0, 24, 4))
    assert (q.strides, q.T.strides, q.shape, q.array.shape) == ((288, 144), (144, 288), (3, 512), (3, 2))
    views = [f.raw, f.blocks, f.array, f.T, f[1:3].raw, f[-1].T, f.broadcast_to((2, 4, 6))]
    views += [q.raw, q.blocks, q.array, q.T, q[1:].array, q.broadcast_to((5, 3, 2))]
    for view in views:
        assert np.shares_memory(view, gguf.file)
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            view.flags.writeable = True
    assert not np.shares_memory(f.raw, q.raw)


def test_rows_that_cannot_be_a_tensor(file):
    blocks = [("q", TYPES["Q8_0"], (2, 64), [bytes(136)]), ("v", TYPES["Q8_0"], (64,), [bytes(68)])]
    write(file, {}, [*blocks, ("n", TYPES["F32"], (), [bytes(4)])])
    q, v, n = read(file).tensors.values()
    assert [row.shape for row in q] == [(64,), (64,)]
    assert (v[32:].nbytes, v[32:].offset - v.offset, q[5:].nbytes, q[5:].raw.size) == (34, 34, 0, 0)
    for view, rows, error in [(q, 2, IndexError), (q, slice(0, 2, 2), ValueError), (n, 0, IndexError)]:
        with pytest.raises(error):
            view[rows]
    for rows in (3, slice(0, 33), slice(16, 48)):
        with pytest.raises(ValueError, match="cuts a block of 32"):
            v[rows]


def test_every_type_has_the_size_the_gguf_package_gives():
    sizes = dict(peer.GGML_QUANT_SIZES)
    # Its two scales are half floats since 2023 (block_q8_1 in ggml-common.h); the package still counts floats.
    sizes[peer.GGMLQuantizationType.Q8_1] = (32, 36)
    for kind, (block, size) in sizes.items():
        assert (TYPES[kind.name].id, TYPES[kind.name].block, TYPES[kind.name].bytes) == (kind.value, block, size)


def test_files_we_write_are_read_by_the_gguf_package(file):
    metadata = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "int": 7,
        "negative": -7,
        "big": 2**40,
        "float": 0.25,
        "double": np.float64(0.1),
        "byte": np.uint8(200),
        "bool": True,
        "words": ["a", "é", ""],
        "bytes": [b"\xff", "x"],
        "ints": [1, -2],
        "floats": np.array([0.5, 2], np.float32),
        "bools": [True, False],
    }
    rng = np.random.default_rng(1)
    table = [tensor("q", "Q4_K", (3, 512)), tensor("f", "F32", (5, 7), rng.random((5, 7), np.float32).tobytes())]
    write(file, metadata, table)
    fields = peer.GGUFReader(file).fields
    assert fields["general.alignment"].types == [peer.GGUFValueType.UINT32]
    for key in ("general.architecture", "int", "negative", "big", "float", "double", "byte", "bool", "words", "ints"):
        assert fields[key].contents() == metadata[key]
    assert fields["floats"].contents() == [0.5, 2]
    assert fields["bools"].contents() == [True, False]
    assert fields["double"].types == [peer.GGUFValueType.FLOAT64]
    assert fields["byte"].types == [peer.GGUFValueType.UINT8]
    theirs, ours = {t.name: t for t in peer.GGUFReader(file).tensors}, read(file).tensors
    for name, kind, shape, chunks in table:
        assert (theirs[name].tensor_type.name, tuple(theirs[name].shape.tolist())) == (kind.name, shape[::-1])
        assert theirs[name].data_offset == ours[name].offset
        assert theirs[name].data_offset % 64 == 0
        assert theirs[name].data.tobytes() == ours[name].raw.tobytes() == chunks[0]
    assert read(file).metadata["bytes"].tolist() == [b"\xff", "x"]


def test_files_the_gguf_package_writes_are_read(file):
    writer = peer.GGUFWriter(file, "llama")
    writer.add_custom_alignment(128)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, -1.0])
    writer.add_int64("long", -(2**40))
    weights = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("f", weights)
    writer.add_tensor("h", weights.astype(np.float16))
    packed = peer.quants.quantize(weights, peer.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=peer.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf = read(file)
    assert (gguf.version, gguf.alignment) == (3, 128)
    assert gguf.metadata["llama.block_count"] == 3
    assert gguf.metadata["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)
    assert gguf.metadata["tokenizer.ggml.tokens"].tolist() == ["a", "b"]
    assert gguf.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0]
    assert gguf.metadata["long"] == -(2**40)
    np.testing.assert_array_equal(gguf.tensors["f"].array, weights)
    np.testing.assert_array_equal(gguf.tensors["h"].array, weights)
    assert (gguf.tensors["q"].type.name, gguf.tensors["q"].shape) == ("Q8_0", (3, 32))
    np.testing.assert_array_equal(gguf.tensors["q"].raw, packed.ravel())


def test_a_file_read_and_written_is_the_same_file(tmp_path):
    one, two = llama(tmp_path / "one.gguf"), tmp_path / "two.gguf"
    gguf = read(one)
    table = [(t.name, t.type, t.shape, [t.raw]) for t in gguf.tensors.values()]
    write(two, gguf.metadata, table, gguf.value_types)
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.parametrize(
    ("metadata", "table", "error"),
    [
        ({}, [("t", TYPES["F32"], (2,), [b"1234", b"123"])], "t: 7 bytes given, 8 needed"),
        ({}, [("t", TYPES["F32"], (2,), [bytes(9)])], "t: 9 bytes given"),
        ({"k": None}, [], "metadata key 'k'"),
        ({"k": []}, [], "metadata key 'k'"),
        ({"k": [1, "a"]}, [], "metadata key 'k'"),
        ({"k": 2**64}, [], "metadata key 'k'"),
        ({"k": 1e39}, [], "metadata key 'k'"),
        ({"k": np.zeros((2, 2))}, [], "metadata key 'k'"),
        ({"k": 1j}, [], "metadata key 'k'"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_file(file, metadata, table, error):
    file.write_bytes(b"old")
    with pytest.raises(ValueError, match=error):
        write(file, metadata, table)
    assert file.read_bytes() == b"old"
    assert os.listdir(file.parent) == [file.name]


def test_a_file_the_loader_would_refuse_is_not_written(file):
    with pytest.raises(GGUFError, match="65 bytes long"):
        write(file, {}, [tensor("x" * 65, "F32", (8,))])
    assert os.listdir(file.parent) == []


def test_writing_streams(file):
    count, piece = 64, bytes(1 << 20)
    tracemalloc.start()
    write(file, {}, [("t", TYPES["I8"], (count, 1 << 20), (piece for _ in range(count)))])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read(file).tensors["t"].nbytes == count << 20
    assert peak < 4 << 20


def test_inspect_shows_the_three_regions(file):
    pairs = [u32("a", 7), pair("[b]evil[/b]\x1b[2J", "str", text("[red]x[/red]\x1b]0;title\x07\u202e"))]
    pairs += [pair("bytes", "str", text(b"\xffz")), pair("nan", "f32", struct.pack("<f", float("nan")))]
    pairs += [pair("many", "array", array("str", 500, text("tok") * 500)), pair("bools", "array", BOTH_ENDS)]
    pairs += [pair("long", "str", text("y" * 5000))]
    file.write_bytes(built(pairs, [entry("[i]t[/i]", (64, 2), TYPES["Q8_0"].id)], bytes(136)))
    gguf = read(file)
    doc = json.loads(json.dumps(inspect.document(gguf), allow_nan=False))
    assert doc["schema"] == 1
    assert doc["header"] == {
        "version": 3, "metadata": 7, "tensors": 1, "alignment": 32, "data_offset": gguf.data_offset, "size": gguf.size
    }  # fmt: skip
    values = {row["key"]: (row["type"], row["value"]) for row in doc["metadata"]}
    assert values["a"] == ("u32", 7)
    assert values["bytes"] == ("str", "\\xffz")
    assert values["nan"] == ("f32", "nan")
    assert values["many"] == ("[str]", {"count": 500, "first": ["tok"] * 8})
    assert values["bools"] == ("[bool]", {"count": 3, "first": [True, False, True]})
    assert values["long"] == ("str", "y" * 5000)
    row = {"name": "[i]t[/i]", "type": "Q8_0", "shape": [2, 64], "strides": [68, 34], "offset": gguf.data_offset}
    assert doc["tensors"] == [{**row, "block": {"weights": 32, "bytes": 34}, "nbytes": 136}]

    out = io.StringIO()
    inspect.show(gguf, Console(file=out, width=200, force_terminal=False))
    shown = out.getvalue()
    for words in ("[b]evil[/b]\\x1b[2J", "[red]x[/red]\\x1b]0;title\\x07\\u202e", "\\xffz", "[i]t[/i]", "(2, 64)"):
        assert words in shown
    assert "500: tok, tok" in shown
    assert "(5000 characters)" in shown
    assert not set(shown) & set("\x1b\x07\u202e")
    assert shown.index("Header") < shown.index("Metadata") < shown.index("Tensors")


# Fuzzing: what is read from a file that was valid and is no longer.

EDGES = [0, 1, 2, 7, 8, 9, 31, 32, 64, 65, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
EDGES += [2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1]
PLACE = st.integers(0, 2**16 - 1)  # how far into the bytes
MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("byte"), PLACE, st.integers(0, 255)),
        st.tuples(st.just("u32"), PLACE, st.sampled_from([edge % 2**32 for edge in EDGES])),
        st.tuples(st.just("u64"), PLACE, st.sampled_from(EDGES)),
        st.tuples(st.just("add"), PLACE, st.integers(-40, 40)),
        st.tuples(st.just("cut"), PLACE, st.none()),
        st.tuples(st.just("drop"), PLACE, st.integers(1, 64)),
        st.tuples(st.just("repeat"), PLACE, st.integers(1, 64)),
        st.tuples(st.just("splice"), PLACE, st.tuples(st.integers(0, 9), PLACE, st.integers(1, 200))),
    ),
    min_size=1,
    max_size=4,
)


def mutated(data: bytes, others: list[bytes], mutations) -> bytes:
    data = bytearray(data)
    for what, place, value in mutations:
        at = place * len(data) >> 16
        if what == "byte":
            data[at : at + 1] = bytes([value])
        elif what in ("u32", "u64"):
            size = 4 if what == "u32" else 8
            data[at : at + size] = value.to_bytes(size, "little")
        elif what == "add":
            data[at : at + 1] = bytes([(data[at] + value) % 256]) if data else b""
        elif what == "cut":
            del data[at:]
        elif what == "drop":
            del data[at : at + value]
        elif what == "repeat":
            data[at:at] = data[at : at + value]
        else:
            number, start, length = value
            other = others[number % len(others)]
            start = start * len(other) >> 16
            data[at : at + length] = other[start : start + length]
    return bytes(data)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Valid files in which nearly every byte is structure: the tiny model's header, and small containers."""
    path = tmp_path_factory.mktemp("valid") / "model.gguf"
    model = llama(path).read_bytes()
    small = llama(path, {"tokenizer.ggml.tokens": None}, {"token_embd.weight": ("F32", (3, 64))}).read_bytes()
    return [model, small, *(data for data in ACCEPTED.values() if len(data) < 4096)]


EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 2500))  # more for a long run now and then


def fuzz(share: float):
    return settings(
        max_examples=int(EXAMPLES * share),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def check(path: Path, data: bytes) -> None:
    """Refused, as a container or as a model, or safe to touch everywhere."""
    path.unlink(missing_ok=True)  # the file of the example before is still mapped: it must not be written to
    path.write_bytes(data)
    if attempt(path) is None:
        try:
            model = open_model(path)
        except GGUFError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            total = model.weights.map(lambda tensor: int(tensor.raw.sum()))
            assert len(total.layers) == model.config.L == model.config.file_layers
            assert np.isfinite(model.config.rope_freqs).all()


# Most examples keep the magic, or the whole header: a fault there hides whatever comes after it.
@fuzz(1)
@given(number=st.integers(0, 99), kept=st.sampled_from([24, 8, 4, 0]), whole=st.booleans(), mutations=MUTATIONS)
def test_mutated_files_are_refused_or_safe(valid, tmp_path, number, kept, whole, mutations):
    data = valid[number % 2 if number < 50 else number % len(valid)]
    # A model is mostly weights, which nothing can make malformed: half of the time only what is before them changes.
    end = len(data) if whole else min(len(data), 3072)
    check(tmp_path / "fuzzed.gguf", data[:kept] + mutated(data[kept:end], valid, mutations) + data[end:])


SIZE = st.integers(0, 40) | st.sampled_from(EDGES)
BYTES = st.binary(max_size=40)
WORD = st.sampled_from([b"a", b"b", b"general.alignment", b"x" * 64, b"\xff", b""])
COUNTED = st.builds(lambda data, length: struct.pack("<Q", length) + data, BYTES, SIZE) | BYTES.map(text)
SCALAR = st.builds(lambda kind, data: struct.pack("<I", kind) + data, st.integers(0, 13), COUNTED | BYTES)
ARRAY = st.builds(
    lambda kind, count, items: struct.pack("<IIQ", 9, kind, count) + b"".join(items),
    st.integers(0, 13),
    SIZE,
    st.lists(COUNTED, max_size=6),
)
NUMBER = st.integers(0, 2**32 - 1).map(lambda value: struct.pack("<II", 4, value))
PAIR = st.builds(lambda key, value: text(key) + value, WORD, SCALAR | ARRAY | NUMBER)
ENTRY = st.builds(
    entry,
    WORD,
    st.lists(SIZE, max_size=5),
    st.sampled_from([*(kind.id for kind in TYPES.values()), 4, 2**32 - 1]),
    st.integers(0, 8).map(lambda i: 32 * i) | SIZE,
)


@fuzz(0.5)
@given(
    st.lists(PAIR, max_size=4), st.lists(ENTRY, max_size=4), st.sampled_from([2048, 64, 0]), st.sampled_from([32, 8])
)
def test_files_of_random_fields_are_refused_or_safe(tmp_path, pairs, entries, size, alignment):
    check(tmp_path / "fuzzed.gguf", built(pairs, entries, bytes(size), alignment=alignment))
