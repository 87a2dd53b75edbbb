"""Models of an exact shape with random weights, and a real model in another quantization.

Speed and memory depend on shapes and types, not on what the weights say, so a random model measures as well as a real
one that cannot be fetched. Blocks are drawn as random bits with only their scales chosen, so that no weight ever exists
as a float here. The bits are raw PCG64 output, which NumPy keeps stable, and the arithmetic is exact or IEEE: a seed
means the same file on every machine.
"""

import itertools
import math
import operator
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.progress import bar
from common.sources import USAGE, SourceError, work_folder

CHUNK = 4 << 20  # bytes of blocks at a time; the random bits depend on it


class Shape(NamedTuple):
    """A llama model's dimensions, in the alphabet of common/model.py."""

    L: int
    D: int
    F: int
    H: int
    G: int
    V: int
    context: int
    rope_base: float
    tied: bool
    tokenizer: str  # "llama" (SPM) or "gpt2" (byte-level BPE)


SHAPES = {
    "tinyllama": Shape(22, 2048, 5632, 32, 4, 32000, 2048, 1e4, False, "llama"),
    "smollm2": Shape(30, 576, 1536, 9, 3, 49152, 8192, 1e5, True, "gpt2"),
    # D a multiple of 256, so that every type of block fits
    "tiny": Shape(2, 256, 512, 4, 2, 512, 1024, 1e4, False, "llama"),
    # F and V are multiples of nothing that a tile or a register holds
    "odd": Shape(3, 192, 141, 3, 1, 517, 1024, 1e4, False, "llama"),
}
HEAD = 64  # values a head, in all of them

# name -> (type of most matrices, llama.cpp's number for such a file)
QUANTS = {
    "f32": ("F32", 0),
    "f16": ("F16", 1),
    "bf16": ("BF16", 32),
    "q4_0": ("Q4_0", 2),
    "q4_1": ("Q4_1", 3),
    "q5_0": ("Q5_0", 8),
    "q5_1": ("Q5_1", 9),
    "q8_0": ("Q8_0", 7),
    "q2_k": ("Q2_K", 10),
    "q3_k": ("Q3_K", 11),
    "q4_k": ("Q4_K", 14),
    "q4_k_m": ("Q4_K", 15),
    "q5_k": ("Q5_K", 16),
    "q6_k": ("Q6_K", 18),
    "iq4_nl": ("IQ4_NL", 25),
    "iq4_xs": ("IQ4_XS", 30),
}
FLOATS = ("F32", "F16", "BF16")
# What takes the place of a 256-weight super-block where rows are no multiple of 256.
FALLBACK = {"Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def type_name(name: str, shape: tuple[int, ...], quant: str, layers: int, tied: bool) -> str:
    """The type that llama.cpp's mix `quant` gives a weight of this name and shape in a model of so many layers."""
    from common.gguf import TYPES

    base = QUANTS[quant][0]
    if len(shape) != 2 or name.endswith("norm.weight"):
        return "F32"
    if base in FLOATS:
        return base
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        base = "Q8_0" if base == "Q8_0" else "Q6_K"
    elif quant == "q4_k_m" and name.endswith(("attn_v.weight", "ffn_down.weight")):
        base = "Q6_K" if _more_bits(int(name.split(".")[1]), layers) else base
    if shape[-1] % TYPES[base].block:
        base = FALLBACK.get(base, base)
    return base if shape[-1] % TYPES[base].block == 0 else "F16"


def _more_bits(i: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between, lose most when squeezed."""
    return i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2


def synth(shape: str, quant: str, path: Path, layers: int | None = None, seed: int = 0) -> Path:
    """Writes a GGUF of this shape: random weights of deviation 1/sqrt(K), norms near 1, a tokenizer of its own.

    `layers` cuts or extends the model. An existing file is replaced only by a whole one. Raises SourceError.
    """
    if shape not in SHAPES:
        raise SourceError(f"no shape is called {shape!r}: use one of {', '.join(SHAPES)}", USAGE)
    quant = _quant(quant)
    dims = SHAPES[shape]
    if layers is not None:
        if layers < 1:
            raise SourceError(f"a model of {layers} layers cannot run: give 1 or more", USAGE)
        dims = dims._replace(L=layers)
    plan = [
        (name, rows, type_name(name, rows, quant, dims.L, dims.tied), _draw(name, seed))
        for name, rows in _tensors(dims)
    ]
    metadata = {"general.architecture": "llama", "general.name": f"{shape} shape, random weights"}
    metadata |= {"general.file_type": QUANTS[quant][1], "general.quantization_version": 2}
    metadata |= _dimensions(dims) | tokenizer(dims.tokenizer, dims.V)
    types = {"tokenizer.ggml.token_type": "[i32]"}
    return _write(path, metadata, types, plan, f"synthesizing {shape} as {quant}")


def requantize(source: Path, quant: str, path: Path) -> Path:
    """Writes the model of `source` with its matrices in `quant`; metadata, tokenizer and norms are kept.

    A type already held is copied, not rounded again. Raises SourceError, and GGUFError where `source` is no model that
    can be run.
    """
    from common.model import open_model

    quant = _quant(quant)
    model = open_model(source)
    plan = []
    for name, tensor in model.gguf.tensors.items():
        kind = type_name(name, tensor.shape, quant, model.config.file_layers, model.config.tied)
        kept = len(tensor.shape) != 2 or kind == tensor.type.name
        plan.append(
            (name, tensor.shape, tensor.type.name if kept else kind, _copy(tensor) if kept else _convert(tensor))
        )
    _can_quantize({kind for _, _, kind, _ in plan}, quant)
    metadata = dict(model.gguf.metadata) | {"general.file_type": QUANTS[quant][1], "general.quantization_version": 2}
    return _write(path, metadata, model.gguf.value_types, plan, f"writing {Path(source).name} as {quant}")


def _can_quantize(kinds: set[str], quant: str) -> None:
    from common.packing import PACKED

    if missing := kinds - {"F32", *PACKED}:
        able = [name for name, (base, _) in QUANTS.items() if base in PACKED]
        raise SourceError(
            f"{quant} needs {missing.pop()}, which is only read here: use one of {', '.join(able)}", USAGE
        )


def _convert(tensor) -> Callable:
    def chunks(type_, shape, step):
        from common.packing import quantize
        from common.quants import dequantize

        for at in range(0, shape[0], step):
            floats = dequantize(tensor[at : at + step])
            yield quantize(type_.name, floats).reshape(-1)

    return chunks


def _copy(tensor) -> Callable:
    return lambda type_, shape, step: iter([tensor.raw])


def _quant(quant: str) -> str:
    if quant.lower() not in QUANTS:
        raise SourceError(f"no quantization is called {quant!r}: use one of {', '.join(QUANTS)}", USAGE)
    return quant.lower()


# One file: `plan` lists (name, shape, type name, draw), where draw(type, shape, rows at a time) yields bytes.


def _write(path: Path, metadata: dict, types: dict, plan: list, title: str) -> Path:
    from common import gguf_writer
    from common.gguf import TYPES

    path = Path(path)
    if path.is_dir():
        raise SourceError(f"{path} is a folder: name the file to write in it", USAGE)
    total = sum(gguf_writer.size(TYPES[kind], shape) for _, shape, kind, _ in plan)
    with work_folder(path.parent, total + CHUNK) as work, bar(title, total) as advance:
        tensors = (
            (name, TYPES[kind], shape, _counted(draw(TYPES[kind], shape, _step(TYPES[kind], shape)), advance))
            for name, shape, kind, draw in plan
        )
        gguf_writer.write(work / path.name, metadata, tensors, types)
        os.replace(work / path.name, path)
    return path


def _step(type_, shape: tuple[int, ...]) -> int:
    """Rows whose blocks make up about CHUNK bytes."""
    row = math.prod(shape[1:]) * type_.bytes // type_.block
    return max(1, CHUNK // row)


def _counted(chunks: Iterator[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        advance(len(chunk))


# Random weights. For a scale of 1 a block of random bits has a mean near 0 and this root mean square.


class Bits(NamedTuple):
    """Where a block's float16 scale and minimum lie (bytes), what minimum centres it (in scales), and its RMS."""

    scale_at: int
    min_at: int | None
    centre: float
    rms: float


# RMS from the uniform integers each format holds: n-bit q about its centre, times 6- or 8-bit sub-scales, less minima.
BITS = {
    "Q4_0": Bits(0, None, 0, 4.637),
    "Q4_1": Bits(0, 2, -7.5, 4.610),
    "Q5_0": Bits(0, None, 0, 9.247),
    "Q5_1": Bits(0, 2, -15.5, 9.233),
    "Q8_0": Bits(0, None, 0, 73.9),
    "Q2_K": Bits(80, 82, 1.5, 13.87),
    "Q3_K": Bits(108, None, 0, 43.34),
    "Q4_K": Bits(0, 2, 7.5, 258.3),
    "Q5_K": Bits(0, 2, 15.5, 526.9),
    "Q6_K": Bits(208, None, 0, 1366.0),
    "IQ4_NL": Bits(0, None, 0, 67.44),
    "IQ4_XS": Bits(0, None, 0, 1246.0),
}
SPREAD = math.sqrt(1 + 1 / 12)  # RMS of scales drawn evenly from 0.5 to 1.5


def _draw(name: str, seed: int) -> Callable:
    """Random rows of one tensor; the stream depends on the seed and the tensor's name alone."""

    def chunks(type_, shape, step):
        import numpy as np

        stream = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
        deviation = 1 / math.sqrt(shape[-1])
        for at in range(0, shape[0], step):
            rows = min(step, shape[0] - at)
            count = math.prod(shape[1:], start=rows)
            if type_.name not in FLOATS:
                yield _random_blocks(stream, type_, count // type_.block, deviation)
            elif len(shape) == 1:
                yield _random_floats(stream, type_, count, 0.1, 1.0)
            else:
                yield _random_floats(stream, type_, count, deviation, 0.0)

    return chunks


def _random_bytes(stream, count: int):  # -> (count,) uint8
    import numpy as np

    return stream.random_raw(-(-count // 8)).astype("<u8", copy=False).view(np.uint8)[:count]


def _random_floats(stream, type_, count: int, deviation: float, mean: float) -> bytes:
    """Even floats: 16 random bits each, which float32 holds exactly before they are scaled."""
    import numpy as np

    bits = _random_bytes(stream, 2 * count).view("<u2").astype(np.float32)
    floats = (bits - np.float32(32767.5)) * np.float32(deviation * math.sqrt(3) / 32768) + np.float32(mean)
    if type_.name == "BF16":
        return (floats.view(np.uint32) >> 16).astype("<u2").tobytes()
    return floats.astype("<f2" if type_.name == "F16" else "<f4").tobytes()


def _random_blocks(stream, type_, count: int, deviation: float) -> bytes:
    """Random bits, then the scale of each block set; its own two random bytes say how far from the mean, and its sign.

    Without the sign, formats whose codes reach further down than up (-8 … 7) would all lean one way, and a matrix that
    leans amplifies the mean of its input by sqrt(K)/9, layer after layer.
    """
    import numpy as np

    bits = BITS[type_.name]
    blocks = _random_bytes(stream, count * type_.bytes).reshape(count, type_.bytes)
    scale = (blocks[:, bits.scale_at] + np.float64(0.5)) / 256 + 0.5
    scale *= np.where(blocks[:, bits.scale_at + 1] & 1, 1.0, -1.0) if bits.min_at is None else 1.0
    scale *= deviation / (bits.rms * SPREAD)
    if type_.name == "Q8_0":
        blocks[blocks == 0x80] = 0x81  # -128 is in no such file: they are rounded from -127 … 127
    blocks[:, bits.scale_at : bits.scale_at + 2] = scale.astype("<f2").view(np.uint8).reshape(count, 2)
    if bits.min_at is not None:
        minimum = (scale * bits.centre).astype("<f2")
        blocks[:, bits.min_at : bits.min_at + 2] = minimum.view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


# The shape, as GGUF names it.


def _tensors(s: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, numpy shape): rows are outputs, so a matrix of K inputs and N outputs is (N, K)."""
    yield "token_embd.weight", (s.V, s.D)
    layer = {"attn_norm": (s.D,), "attn_q": (s.H * HEAD, s.D), "attn_k": (s.G * HEAD, s.D), "attn_v": (s.G * HEAD, s.D)}
    layer |= {"attn_output": (s.D, s.H * HEAD), "ffn_norm": (s.D,), "ffn_gate": (s.F, s.D), "ffn_up": (s.F, s.D)}
    layer |= {"ffn_down": (s.D, s.F)}
    for i, (name, shape) in itertools.product(range(s.L), layer.items()):
        yield f"blk.{i}.{name}.weight", shape
    yield "output_norm.weight", (s.D,)
    if not s.tied:
        yield "output.weight", (s.V, s.D)


def _dimensions(s: Shape) -> dict:
    return {
        "llama.block_count": s.L,
        "llama.context_length": s.context,
        "llama.embedding_length": s.D,
        "llama.feed_forward_length": s.F,
        "llama.attention.head_count": s.H,
        "llama.attention.head_count_kv": s.G,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD,
        "llama.rope.freq_base": s.rope_base,
        "llama.vocab_size": s.V,
    }


# A tokenizer of any size. Common words first, then invented ones.

WORDS = """the of and to in is was that for it with as his on be at by had not are but from or have an they which one
you were her all she there would their we him been has when who will more no if out so said what up its
about into than them can only other new some could time these two may then do first any my now such like our
over man me even most made after also did many before must through back years where much your way well down
should because each just those people how too little state good very make world still own see men work long
get here between both life being under never day same another know while last might us great old year off
come since against go came right used take three once upon hello memory token model cache layer weight
matrix vector thread block float kernel fast slow read write count name file"""
ONSETS = "b c d f g h j k l m n p r s t v w z bl br ch cl cr dr fl fr gl gr pl pr sc sh sl sm sn sp st th tr"
VOWELS = "a e i o u ai ea ee oa ou"
CODAS = " n r s t l m d ck nd st"
CONTROL, UNKNOWN, NORMAL, BYTE = 3, 2, 1, 6  # GGUF's token types
TURN_SPM = "<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n"
TURN_BPE = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"


def tokenizer(kind: str, size: int) -> dict:
    """Metadata of a working tokenizer with exactly `size` tokens: `llama` (SPM) or `gpt2` (byte-level BPE)."""
    return _spm(size) if kind == "llama" else _bpe(size)


def _spm(size: int) -> dict:
    special = ["<unk>", "<s>", "</s>"]
    byte = [f"<0x{b:02X}>" for b in range(256)]
    letters = ["▁", *map(chr, range(33, 127))]
    room = size - len(special) - len(byte) - len(letters)
    pieces, _ = _grow(_words("▁"), room, operator.add)
    tokens = special + byte + letters + pieces
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (size - 259)
    # A piece made earlier merges earlier; single letters are never the result of a merge.
    scores = [0.0] * 259 + [-float(size)] * len(letters) + [-float(i) for i in range(room)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": _template(TURN_SPM, "<|assistant|>\n"),
    }


def _bpe(size: int) -> dict:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # A byte that prints stands for itself; the others take the characters from 256 on (GPT-2's table).
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in prints] + [chr(256 + n) for n in range(256 - len(prints))]
    pieces, merges = _grow(_words("Ġ"), size - len(special) - len(letters), lambda left, right: (left, right))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": special + letters + pieces,
        "tokenizer.ggml.token_type": [CONTROL] * len(special) + [NORMAL] * (size - len(special)),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": _template(TURN_BPE, "<|im_start|>assistant\n"),
    }


def _template(turn: str, answer: str) -> str:
    opening = "{% if add_generation_prompt %}{{ " + repr(answer) + " }}{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + opening


def _words(space: str) -> Iterator[str]:
    """Words in the order in which they deserve a token."""
    for word in WORDS.split():
        yield from (space + word, word)
    syllables = list(map("".join, itertools.product(*(part.split(" ") for part in (ONSETS, VOWELS, CODAS)))))
    step = 7919  # a prime that divides no count of syllables: one walk meets every pair once
    pairs = len(syllables) ** 2
    for i in range(pairs):
        first, second = divmod(i * step % pairs, len(syllables))
        yield space + syllables[first] + syllables[second]


def _grow(words: Iterator[str], room: int, key: Callable) -> tuple[list[str], list[tuple[str, str]]]:
    """Exactly `room` pieces, and the merges that make them, so that every piece is what its own text encodes to.

    Each word is encoded with the merges so far, and what is left of it is joined from the front by new ones. New merges
    rank last, so older pieces keep their encoding. `key(left, right)` is what a merge is known by: the pair (BPE), or
    the joined text (SPM).
    """
    ranks, pieces, merges, known = {}, [], [], set()
    for word in words:
        symbols = list(word)
        while len(symbols) > 1:
            found = [ranks.get(key(*pair), math.inf) for pair in itertools.pairwise(symbols)]
            at = found.index(min(found))
            joined = symbols[at] + symbols[at + 1]
            if math.isinf(found[at]):
                if joined not in known and len(pieces) == room:
                    return pieces, merges
                ranks[key(symbols[0], symbols[1])] = len(ranks)
                merges.append((symbols[0], symbols[1]))
                if joined not in known:
                    known.add(joined)
                    pieces.append(joined)
            symbols[at : at + 2] = [joined]
    raise AssertionError("more words are needed")
