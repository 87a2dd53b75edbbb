"""A model file's vocabulary: which piece of text each token is, and how a word is put together from pieces.

Two kinds: `llama` (SentencePiece: pieces have scores) and `gpt2` (byte-level byte-pair encoding: merges have ranks).
Both do the same thing: start from single characters and join the best neighbouring pair until none is left.
"""

import heapq
from collections.abc import Iterable
from enum import IntEnum
from numbers import Integral

import numpy as np
import regex

from common.gguf import GGUFError, Strings

SPACE = "\u2581"  # how SentencePiece writes a space: ▁

CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
LLAMA3 = (  # of which only the number of digits in a group varies
    rf"(?i:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,GROUP}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut into words before any merge, by tokenizer.ggml.pre; published with GPT-2, Llama 3, Qwen2 and SmolLM.
WORDS = {
    "gpt-2": rf"{CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",
    # Every digit alone, then GPT-2's rule on what lies between: spaces before a digit end a text of their own.
    "smollm": rf"\p{{N}}|{CONTRACTION}| ?\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+",
    "llama-bpe": LLAMA3.replace("GROUP", "3"),
    "qwen2": LLAMA3.replace("GROUP", "1"),  # Qwen2 also normalizes to NFC; here the text's own characters are kept
}
WHOLE_WORDS = {"llama-bpe"}  # a word that is itself a piece takes no merges
ADDS_BOS = {"llama-bpe"}  # where the file doesn't say
MAX_PIECE = 1 << 14  # bytes of a token or of a merge; those in use have up to a few hundred
ITEMS = {"i": int, "u": int, "f": float}  # by numpy's kind


class Kind(IntEnum):
    """tokenizer.ggml.token_type, numbered as in the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER = 4
    UNUSED = 5
    BYTE = 6


class Metadata:
    """The file's tokenizer keys, each checked for its type. Raises GGUFError."""

    def __init__(self, gguf):
        self.path, self.values = gguf.path, gguf.metadata

    def fail(self, reason: str):
        raise GGUFError(self.path, None, reason)

    def get(self, key: str, kind: type, default=None):
        value = self.values.setting(f"tokenizer.{key}")
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is Integral and isinstance(value, bool)):
            self.fail(f"tokenizer.{key} has the wrong type ({type(value).__name__})")
        return value

    def view(self, key: str, of: type, length: int | None = None) -> Strings | np.ndarray:
        """An array of str, int or float in the file, of `length` where one is given; no item is decoded yet."""
        value = self.values.setting(f"tokenizer.{key}")
        if value is None:
            self.fail(f"tokenizer.{key} is missing")
        if not isinstance(value, Strings | np.ndarray):
            self.fail(f"tokenizer.{key} is not an array")
        found = str if isinstance(value, Strings) else ITEMS.get(value.dtype.kind)
        if found is not of:
            self.fail(f"tokenizer.{key} is not an array of {of.__name__}")
        if length is not None and len(value) != length:
            self.fail(f"tokenizer.{key} has {len(value)} entries, but there are {length} tokens")
        if found is str and value.longest() > MAX_PIECE:
            self.fail(f"tokenizer.{key} holds a text of {value.longest()} bytes; {MAX_PIECE} is the limit")
        return value

    def array(self, key: str, of: type, length: int | None = None) -> list:
        """The items of `view`."""
        items = self.view(key, of, length).tolist()
        if of is str and bytes in set(map(type, items)):
            i = next(i for i, item in enumerate(items) if isinstance(item, bytes))
            self.fail(f"tokenizer.{key}: entry {i} is not valid UTF-8")
        return items


def merge(word: Iterable[str], ranks: dict[str, int], glue: str) -> list[str]:
    """Join neighbours of `word`, lowest rank first and leftmost among equals, until no pair has a rank.

    The pair (a, b) has the rank `ranks[a + glue + b]`. A heap of candidates over a linked list: O(n log n) in the
    word's length, where joining the best pair of a rescanned list would take O(n²).
    """
    symbols = list(word)
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    pairs = ((ranks.get(symbols[i] + glue + symbols[i + 1]), i) for i in range(n - 1))
    heap = [rank * n + i for rank, i in pairs if rank is not None]  # one integer orders by rank, then by place
    heapq.heapify(heap)
    while heap:
        rank, i = divmod(heapq.heappop(heap), n)
        j = after[i]
        if not symbols[i] or j == n or ranks.get(symbols[i] + glue + symbols[j]) != rank:
            continue  # an earlier merge took one of the two
        symbols[i] += symbols[j]
        symbols[j] = ""
        h, k = before[i], after[j]
        after[i] = k
        if k < n:
            before[k] = i
            if (rank := ranks.get(symbols[i] + glue + symbols[k])) is not None:
                heapq.heappush(heap, rank * n + i)
        if h >= 0 and (rank := ranks.get(symbols[h] + glue + symbols[i])) is not None:
            heapq.heappush(heap, rank * n + h)
    return [symbol for symbol in symbols if symbol]


class BytePairs:
    """`gpt2`: text is UTF-8 bytes, each written as a printable character; merges are listed, best first."""

    spaced = False  # no space is put before a text

    @staticmethod
    def check(metadata: Metadata, size: int) -> None:
        """What can be told without a text of the file's `size` tokens."""
        pre = metadata.get("ggml.pre", str)
        if pre not in WORDS:
            named = f"the pre-tokenizer {pre[:80]!r}" if pre else "no pre-tokenizer (tokenizer.ggml.pre)"
            metadata.fail(f"names {named}; known are {', '.join(WORDS)}")
        metadata.view("ggml.merges", str)

    def __init__(self, metadata: Metadata, pieces: list[str], ids: dict[str, int], kinds: list[int]):
        pre = metadata.get("ggml.pre", str)
        self.ids, self.whole_words = ids, pre in WHOLE_WORDS
        self.words = regex.compile(WORDS[pre]).findall
        self.ranks = self.checked_ranks(metadata, set(pieces))
        characters = byte_characters()
        self.byte_of = {character: byte for byte, character in enumerate(characters)}
        # Training drops byte values it never saw; such a byte then has no token and leaves no trace in the ids.
        self.table = {byte: char if char in ids else None for byte, char in enumerate(characters)}

    def checked_ranks(self, metadata: Metadata, known: set[str]) -> dict[str, int]:
        ranks = {}
        for rank, pair in enumerate(metadata.array("ggml.merges", str)):
            left, _, right = pair.partition(" ")
            joined = left + right
            if not left or not right or left not in known or right not in known or joined not in known:
                metadata.fail(f"merge {rank} ({pair[:80]!r}) names a piece that is not in the vocabulary")
            if pair in ranks:
                metadata.fail(f"merge {rank} ({pair[:80]!r}) is listed twice")
            if joined in self.ids:  # never make a control token out of text
                ranks[pair] = rank
        return ranks

    def written(self, text: str) -> str:
        return text

    def word_ids(self, word: str) -> list[int]:
        symbols = word.encode().decode("latin-1").translate(self.table)
        if self.whole_words and symbols in self.ids:
            return [self.ids[symbols]]
        return [self.ids[piece] for piece in merge(symbols, self.ranks, " ")]

    def piece_bytes(self, piece: str, kind: int) -> bytes:
        if kind != Kind.NORMAL:  # an added token is written as it reads
            return piece.encode()
        return b"".join([bytes((self.byte_of[c],)) if c in self.byte_of else c.encode() for c in piece])


class SentencePieces:
    """`llama`: text is characters, a space written as ▁; the pair whose joined piece scores best is joined first."""

    @staticmethod
    def check(metadata: Metadata, size: int) -> None:
        """What can be told without a text of the file's `size` tokens."""
        if np.isnan(metadata.view("ggml.scores", float, size)).any():
            metadata.fail("tokenizer.ggml.scores holds a value that is not a number")
        metadata.get("ggml.add_space_prefix", bool)
        metadata.get("ggml.unknown_token_id", Integral)

    def __init__(self, metadata: Metadata, pieces: list[str], ids: dict[str, int], kinds: list[int]):
        self.ids = ids
        self.spaced = metadata.get("ggml.add_space_prefix", bool, True)
        scores = metadata.array("ggml.scores", float)
        order = {score: rank for rank, score in enumerate(sorted(set(scores), reverse=True))}
        self.ranks = {piece: order[scores[i]] for piece, i in ids.items()}
        # Where no piece has ▁ after another character, no merge crosses into the next word: words can go one by one.
        crossing = any(SPACE in piece.lstrip(SPACE) for piece in ids)
        self.words = regex.compile(r"(?s).+" if crossing else rf"{SPACE}*[^{SPACE}]+|{SPACE}+").findall
        self.byte_ids = self.checked_bytes(metadata, pieces, kinds)
        self.unknown = metadata.get("ggml.unknown_token_id", Integral, 0)
        if not self.byte_ids and not 0 <= self.unknown < len(pieces):
            metadata.fail("the vocabulary has neither byte tokens nor an unknown token")

    def checked_bytes(self, metadata: Metadata, pieces: list[str], kinds: list[int]) -> list[int]:
        """The ids of the 256 byte tokens in order, or an empty list where the vocabulary has none."""
        found = {pieces[i]: i for i, kind in enumerate(kinds) if kind == Kind.BYTE}
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        if found and set(found) != set(names):
            metadata.fail(f"the byte tokens are not <0x00> to <0xFF> ({len(found)} tokens are of type byte)")
        return [found[name] for name in names] if found else []

    def written(self, text: str) -> str:
        return (" " * self.spaced + text).replace(" ", SPACE)

    def word_ids(self, word: str) -> list[int]:
        ids = []
        for piece in merge(word, self.ranks, ""):
            if piece in self.ids:
                ids.append(self.ids[piece])
            elif self.byte_ids:
                ids += [self.byte_ids[byte] for byte in piece.encode()]
            elif ids[-1:] != [self.unknown]:  # a run of unknown characters is one unknown token
                ids.append(self.unknown)
        return ids

    def piece_bytes(self, piece: str, kind: int) -> bytes:
        if kind == Kind.BYTE:
            return bytes((int(piece[3:5], 16),))
        return piece.replace(SPACE, " ").encode()


MODELS = {"llama": SentencePieces, "gpt2": BytePairs}  # by tokenizer.ggml.model


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, as published with GPT-2.

    Visible Latin-1 characters stand for themselves; the other bytes, in order, take the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
