"""Text to token ids and back, with the vocabulary that the model file carries.

A special token (BOS, end of turn, …) never comes from a reader's text: plain text has no way to one, and in a
conversation the model's own chat template alone may name them.
"""

import codecs
from collections.abc import Iterable, Iterator
from numbers import Integral

import numpy as np
import regex

from common import template
from common.gguf import printable
from common.vocabulary import ADDS_BOS, MODELS, Kind, Metadata

CACHE_WORDS = 1 << 16  # words whose ids are remembered; English text repeats nearly all of its words
CACHE_LETTERS = 64  # a longer word is not remembered: it hardly comes again
ROLES = ("system", "user", "assistant", "tool")
# A turn ends at any of these, whatever the file calls its end: models differ in which one they emit.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>")


class TokenizerError(ValueError):
    """Text, ids or messages that this vocabulary can't take; the message is one sentence."""

    exit_code = 2


class Tokenizer:
    """Text to ids and back: `bos` and `eos` are ids or None, and any of `stop_ids` ends a turn."""

    def __init__(self, gguf):
        """Read and check the vocabulary of an open file (anything with `path` and `metadata`). Raises GGUFError.

        What is wrong with the tokens' own texts or merges shows once they are decoded: about 2 s and 250 MB a million.
        """
        metadata = Metadata(gguf)
        name = metadata.get("ggml.model", str)
        if name not in MODELS:
            named = f"a tokenizer of type {name[:80]!r}" if name else "no tokenizer (tokenizer.ggml.model)"
            metadata.fail(f"has {named}; known are {', '.join(MODELS)}")
        # All that can be told from counts and numbers comes before a million tokens are decoded.
        self.size = len(metadata.view("ggml.tokens", str))
        kinds = metadata.view("ggml.token_type", int, self.size)
        for i in np.flatnonzero((kinds < Kind.NORMAL) | (kinds > Kind.BYTE)):
            metadata.fail(f"token {i} has the unknown type {kinds[i]}")
        MODELS[name].check(metadata, self.size)
        ends = {self.special_id(metadata, what) for what in ("eot", "eom")}
        self.bos = self.special_id(metadata, "bos", 1 if name == "llama" else None)
        self.eos = self.special_id(metadata, "eos", 2 if name == "llama" else None)
        adds_bos = name == "llama" or metadata.get("ggml.pre", str) in ADDS_BOS
        self.add_bos = metadata.get("ggml.add_bos_token", bool, adds_bos)
        self.add_eos = metadata.get("ggml.add_eos_token", bool, False)
        if (self.add_bos and self.bos is None) or (self.add_eos and self.eos is None):
            metadata.fail("wants a BOS or EOS token added, but names none")
        self.template = metadata.get("chat_template", str)
        self.kinds = kinds.tolist()
        self.texts = metadata.array("ggml.tokens", str)
        every: dict[str, int] = {}
        for i, text in enumerate(self.texts):
            if every.setdefault(text, i) != i:
                metadata.fail(f"tokens {every[text]} and {i} are both {text[:80]!r}")
        # The only pieces that plain text can become.
        plain = {text: i for text, i in every.items() if self.kinds[i] == Kind.NORMAL and text}
        self.model = MODELS[name](metadata, self.texts, plain, self.kinds)
        self.cache: dict[str, list[int]] = {}

        # Names of one letter, or with a space at either end, could not be kept out of a message (see `chat`).
        named = (Kind.CONTROL, Kind.USER, Kind.UNKNOWN)
        self.specials = {
            text: i for text, i in every.items() if self.kinds[i] in named and len(text) > 1 and text == text.strip()
        }
        ends |= {self.eos} | {self.specials.get(text) for text in ENDS}
        self.stop_ids = frozenset(ends - {None})

    @classmethod
    def from_gguf(cls, gguf) -> "Tokenizer":
        """The tokenizer of an open file. Raises GGUFError."""
        return cls(gguf)

    def special_id(self, metadata: Metadata, what: str, default: int | None = None) -> int | None:
        i = metadata.get(f"ggml.{what}_token_id", Integral)
        if i is None:
            return default if default is not None and default < self.size else None
        if not 0 <= i < self.size:
            metadata.fail(f"tokenizer.ggml.{what}_token_id is {i}, but there are {self.size} tokens")
        return int(i)

    def encode(self, text: str, special: bool = False, bos: bool | None = None) -> list[int]:
        """The ids of `text`. Only with `special` do the names of special tokens in it become those tokens.

        `bos` puts the BOS token first or leaves it out; None does as the file says. Raises TokenizerError.
        """
        first = [self.bos] if (self.add_bos if bos is None else bos) else []
        if None in first:
            raise TokenizerError("This vocabulary has no BOS token to begin with.")
        return first + self.ids(self.cut(text) if special else [text]) + [self.eos] * self.add_eos

    def cut(self, text: str) -> Iterator[str | int]:
        """`text` as plain fragments and ids of special tokens, longest name first."""
        parts = regex.split(r"(\L<names>)", text, names=list(self.specials)) if self.specials else [text]
        return (self.specials[part] if i % 2 else part for i, part in enumerate(parts))

    def ids(self, fragments: Iterable[str | int]) -> list[int]:
        found: list[int] = []
        for fragment in fragments:
            if isinstance(fragment, int):
                found.append(fragment)
            elif fragment:
                for word in self.model.words(self.model.written(fragment)):
                    found += self.word_ids(word)
        return found

    def word_ids(self, word: str) -> list[int]:
        if word in self.cache:
            return self.cache[word]
        try:
            found = self.model.word_ids(word)
        except UnicodeEncodeError:
            raise TokenizerError("The text is not valid Unicode: it holds half of a surrogate pair.") from None
        if len(word) <= CACHE_LETTERS:
            if len(self.cache) >= CACHE_WORDS:
                self.cache.clear()
            self.cache[word] = found
        return found

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a conversation, laid out by the file's chat template. Raises TokenizerError.

        `messages` are {"role": one of ROLES, "content": str}. Special tokens come from the template alone: in the
        contents every letter stands between two marks, characters found nowhere else, so that no name of a special
        token can hold one; the marks go once the names have been found. Spaces stay bare, because templates trim.
        """
        if not self.template:
            raise TokenizerError("This model file has no chat template, so it can't chat; give it plain text instead.")
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if len(message) != 2 or role not in ROLES or not isinstance(content, str):
                raise TokenizerError(f"A message is a role ({', '.join(ROLES)}) and a text as its content, no more.")
        everything = self.template + "".join(message["content"] for message in messages)
        mark = next(c for c in map(chr, range(0xF0000, 0xFFFFE)) if c not in everything)  # private-use characters
        variables = {
            "messages": [{**m, "content": regex.sub(r"(\S)", rf"{mark}\1{mark}", m["content"])} for m in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": "" if self.bos is None else self.texts[self.bos],
            "eos_token": "" if self.eos is None else self.texts[self.eos],
        }
        try:
            text = template.render(self.template, variables)
        except template.TemplateFailure as failure:
            raise TokenizerError(f"The model's chat template failed: {printable(str(failure))}.") from None
        found = self.ids(part if isinstance(part, int) else part.replace(mark, "") for part in self.cut(text))
        return [self.bos] * (self.add_bos and found[:1] != [self.bos]) + found

    def token_bytes(self, i: int) -> bytes:
        """What the token `i` adds to the text: nothing for a control token."""
        if not 0 <= i < self.size:
            raise TokenizerError(f"Token id {i} is not in the vocabulary of {self.size} tokens.")
        if self.kinds[i] == Kind.CONTROL:
            return b""
        if self.kinds[i] == Kind.UNKNOWN:
            return "\ufffd".encode()
        return self.model.piece_bytes(self.texts[i], self.kinds[i])

    def stream(self, after: Iterable[int] = ()) -> "Stream":
        """A Stream of the text that follows the ids `after`, which it doesn't repeat."""
        return Stream(self, after)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises TokenizerError."""
        stream = self.stream()
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token by itself, to be looked at: its text, its name if special, `<0xF0>` for bytes that are no text."""
        return [self.piece(i) for i in ids]

    def piece(self, i: int) -> str:
        data = self.token_bytes(i)
        if self.kinds[i] in (Kind.CONTROL, Kind.UNKNOWN):
            return self.texts[i]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "".join([f"<0x{byte:02X}>" for byte in data])


class Stream:
    """Text as its tokens arrive, never half a character: bytes wait until the character is whole."""

    def __init__(self, tokenizer: Tokenizer, after: Iterable[int] = ()):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.at_start = tokenizer.model.spaced  # the space that encoding put before the text is not part of it
        for i in after:
            self.push(i)

    def push(self, i: int) -> str:
        """The text that token `i` completes, often all of its own. Raises TokenizerError."""
        data = self.tokenizer.token_bytes(i)
        if self.at_start and data:
            data, self.at_start = data.removeprefix(b" "), False
        return self.utf8.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character whose end never came, or nothing."""
        return self.utf8.decode(b"", True)


def report(tokenizer: Tokenizer, text: str, special: bool = False, bos: bool | None = None) -> dict:
    """What `lesson tokenize` shows: {"schema", "ids", "pieces"}. Raises TokenizerError."""
    ids = tokenizer.encode(text, special, bos)
    return {"schema": 1, "ids": ids, "pieces": tokenizer.pieces(ids)}


def report_text(tokenizer: Tokenizer, text: str, found: dict) -> str:
    """A report as lines of id and quoted piece, with a note where the ids don't give the text back."""
    lines = [f"{i:>8}  {piece!r}" for i, piece in zip(found["ids"], found["pieces"], strict=True)]
    lines.append(f"{len(found['ids'])} tokens for {len(text)} characters")
    if tokenizer.decode(found["ids"]) != text:
        lines.append("The ids don't give back exactly this text: the vocabulary lacks a token for part of it.")
    return "\n".join(lines)
