"""From a checked GGUF file to a model the course can run: its numbers, its weights, and every reason to refuse it.

A forward pass that ignores part of a model still prints fluent text, only the wrong one. So whatever the course does
not compute (another architecture, experts, biases, another rope scaling) is refused by name here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.gguf import GGUF, GGUFError, Tensor, printable, read, shown

# The tensor types common/quants.py unpacks.
UNPACKED = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"} | {
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}  # fmt: skip
MAX_HEAD = 65536  # weights; a size from the file sizes an array here, so it is bounded first
ROPE_BASE = 10000.0  # where llama.rope.freq_base is absent, as in the Llama paper
MAX_FREQUENCY = 1e6  # radians per position; the unscaled first pair has 1
ROPE_FACTORS = "rope_freqs.weight"

# Keys that can change the forward pass in ways the course does not compute, and the values that change nothing.
ONLY = {
    "general.type": ("model",),
    "llama.expert_count": (0,),
    "llama.expert_used_count": (0,),
    "llama.attention.causal": (True,),
    "llama.attention.clamp_kqv": (0.0,),
    "llama.attention.max_alibi_bias": (0.0,),
    "llama.attention.scale": (0.0,),
    "llama.attn_logit_softcapping": (0.0,),
    "llama.embedding_scale": (0.0, 1.0),
    "llama.final_logit_softcapping": (0.0,),
    "llama.logit_scale": (0.0, 1.0),
    "llama.pooling_type": (0,),
    "llama.residual_scale": (0.0, 1.0),
    "llama.rope.scaling.attn_factor": (1.0,),
    "llama.tensor_data_layout": ("reference", "Meta AI original pth"),
    "llama.use_parallel_residual": (False,),
    "split.count": (0, 1),
}
# The other keys of this architecture that may be there: what is checked below, then what changes nothing here.
KNOWN = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "attention.layer_norm_epsilon", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip
QUANTIZATION = 2  # the version of the block layouts that common/quants.py unpacks
MAX_MODEL_NAME = 100  # characters


@dataclass(frozen=True, eq=False)
class Config:
    """A model's numbers, in the course's alphabet; L is the number of layers run, file_layers those in the file."""

    arch: str
    name: str
    L: int
    D: int  # model width
    H: int  # attention heads
    G: int  # key/value heads; H is a multiple of G
    hd: int  # head size
    F: int  # feed-forward width
    V: int  # vocabulary
    context: int  # tokens the model was trained for
    eps: float  # of the RMS norms
    rope_base: float
    rope_freqs: np.ndarray  # (hd / 2,) float64: radians per position for each pair, scaling applied
    bos: int | None
    eos: int | None
    tied: bool  # the embedding is also the output matrix
    file_layers: int


class Layer(NamedTuple):
    """One layer's weights; a matmul weight is (N, K): N outputs, each a row of K."""

    attn_norm: Any  # (D,)
    w_q: Any  # (H * hd, D)
    w_k: Any  # (G * hd, D)
    w_v: Any  # (G * hd, D)
    w_o: Any  # (D, H * hd)
    ffn_norm: Any  # (D,)
    w_gate: Any  # (F, D)
    w_up: Any  # (F, D)
    w_down: Any  # (D, F)


LAYER_NAMES = Layer(
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"
)  # as in the file: blk.0.attn_q.weight


class Weights(NamedTuple):
    """All weights: Tensors as opened, anything else after `map`. `output` is `token_embd` itself where tied."""

    token_embd: Any  # (V, D)
    layers: tuple[Layer, ...]
    output_norm: Any  # (D,)
    output: Any  # (V, D)

    def map(self, f: Callable) -> "Weights":
        """The same weights with f applied to each, once."""
        token_embd = f(self.token_embd)
        layers = tuple(Layer(*map(f, layer)) for layer in self.layers)
        output = token_embd if self.output is self.token_embd else f(self.output)
        return Weights(token_embd, layers, f(self.output_norm), output)


class ModelFile(NamedTuple):
    path: Path
    gguf: GGUF
    config: Config
    weights: Weights


def open_model(path, layers: int | None = None) -> ModelFile:
    """Map and check a model; `layers` keeps the first so many. No weight is read.

    Raises GGUFError where the file is not a model the course runs exactly, ValueError where it has no `layers` layers.
    """
    gguf = read(path)
    keys = Keys(gguf)
    arch = keys.text("general.architecture")
    if arch != "llama":
        keys.fail(f"holds a model of architecture {shown(arch)}; only 'llama' is run")
    check_known(keys)
    numbers = dimensions(keys)
    weights = all_weights(gguf, **numbers)
    check_quantization(keys, weights)
    config = config_of(keys, weights, **numbers)
    if layers is not None:
        if not 1 <= layers <= config.L:
            raise ValueError(f"{layers} layers asked for; this model has 1 to {config.L}")
        config = replace(config, L=layers)
        weights = weights._replace(layers=weights.layers[:layers])
    return ModelFile(gguf.path, gguf, config, weights)


def check_known(keys: "Keys") -> None:
    """Every setting of the architecture is one that is computed, or has a value that changes nothing."""
    metadata = keys.gguf.metadata
    for key, allowed in ONLY.items():
        value = metadata.setting(key, allowed[0])
        if not isinstance(value, (int, float, str)) or value not in allowed:
            keys.fail(f"has {key} = {shown(str(value))}, which the course does not compute")
    for key in metadata:
        if key.startswith("llama.") and key.removeprefix("llama.") not in KNOWN and key not in ONLY:
            keys.fail(f"has the key {shown(key)}, which the course does not compute")


def check_quantization(keys: "Keys", weights: "Weights") -> None:
    """Blocks of an older layout have the same sizes and would unpack to other weights."""
    version, types = keys.gguf.metadata.setting("general.quantization_version", QUANTIZATION), set()
    weights.map(lambda tensor: types.add(tensor.type))
    right = isinstance(version, int) and version == QUANTIZATION
    if not right and any(kind.block > 1 for kind in types):
        keys.fail(f"has general.quantization_version = {shown(str(version))}; {QUANTIZATION} is unpacked")


class Keys:
    """Metadata of a given type: a missing key without a default, or one of another type, is a GGUFError naming it."""

    def __init__(self, gguf: GGUF):
        self.gguf = gguf

    def fail(self, reason: str):
        raise GGUFError(self.gguf.path, None, reason)

    def get(self, key: str, kind: type, what: str, default):
        value = self.gguf.metadata.setting(key, default)
        if value is None:
            self.fail(f"lacks the metadata key {key}")
        # A bool is an int to Python, but not to the file.
        if not isinstance(value, kind) or isinstance(value, bool):
            self.fail(f"has {shown(key)} of type {self.gguf.value_types[key]}; it must be {what}")
        return value

    def text(self, key: str) -> str:
        return self.get(key, str, "UTF-8 text", None)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, "an integer", default)
        return value if 0 < value < 2**31 else self.fail(f"has {key} = {value}; it must be 1 to 2147483647")

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, "a float", default)
        return value if 0 < value < math.inf else self.fail(f"has {key} = {value}; it must be positive and finite")

    def token(self, name: str, V: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.gguf.metadata:
            return None
        value = self.get(key, int, "an integer", None)
        return value if 0 <= value < V else self.fail(f"has {shown(key)} = {value}; the vocabulary has {V} tokens")


def dimensions(keys: Keys) -> dict[str, int]:
    """L D H G hd F from the metadata."""
    L, D, F = (keys.integer(f"llama.{key}") for key in ("block_count", "embedding_length", "feed_forward_length"))
    H = keys.integer("llama.attention.head_count")
    G = keys.integer("llama.attention.head_count_kv", H)
    if H % G:
        keys.fail(f"has {H} attention heads, not a multiple of its {G} key/value heads")
    if "llama.attention.key_length" not in keys.gguf.metadata and D % H:
        keys.fail(f"has an embedding of {D}, not a multiple of its {H} attention heads")
    hd = keys.integer("llama.attention.key_length", D // H)
    # A length that is absent is D // H, as llama.cpp has it, whatever the other one is.
    if "llama.attention.value_length" not in keys.gguf.metadata and hd != D // H:
        keys.fail(f"has keys of {hd} and, lacking llama.attention.value_length, values of {D // H}; both must be equal")
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if keys.integer(key, hd) != hd:
            keys.fail(f"has {key} = {keys.integer(key)}, not the head size {hd}; the course does not compute that")
    if hd % 2 or hd > MAX_HEAD:
        keys.fail(f"has heads of {hd}; rope rotates pairs, so the size must be even, and {MAX_HEAD} is the limit")
    return {"L": L, "D": D, "H": H, "G": G, "hd": hd, "F": F}


def all_weights(gguf: GGUF, L: int, D: int, H: int, G: int, hd: int, F: int) -> Weights:
    """Every tensor, its shape and type checked; one the forward pass would ignore is refused."""
    seen = set()

    def weight(name: str, shape: tuple) -> Tensor:
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise GGUFError(gguf.path, None, f"lacks the tensor {name}")
        if tensor.shape != shape:
            raise GGUFError(gguf.path, tensor.offset, f"has {name} of shape {tensor.shape}; it must be {shape}")
        if tensor.type.name not in UNPACKED:
            raise GGUFError(
                gguf.path, tensor.offset, f"has {name} of type {tensor.type.name}, which is not unpacked here"
            )
        seen.add(name)
        return tensor

    embedding = gguf.tensors.get("token_embd.weight")
    V = embedding.shape[0] if embedding is not None and embedding.shape else 0
    token_embd = weight("token_embd.weight", (V, D))
    shapes = Layer((D,), (H * hd, D), (G * hd, D), (G * hd, D), (D, H * hd), (D,), (F, D), (F, D), (D, F))
    layers = tuple(
        Layer(*(weight(f"blk.{i}.{name}.weight", shape) for name, shape in zip(LAYER_NAMES, shapes, strict=True)))
        for i in range(L)
    )
    output_norm = weight("output_norm.weight", (D,))
    output = weight("output.weight", (V, D)) if "output.weight" in gguf.tensors else token_embd
    extra = [name for name in gguf.tensors if name not in seen and name != ROPE_FACTORS]
    if extra:
        raise GGUFError(
            gguf.path,
            gguf.tensors[extra[0]].offset,
            f"has {len(extra)} tensors the course does not compute with, {shown(extra[0])} first",
        )
    return Weights(token_embd, layers, output_norm, output)


def config_of(keys: Keys, weights: Weights, hd: int, **numbers: int) -> Config:
    metadata, V = keys.gguf.metadata, weights.token_embd.shape[0]
    check_vocabulary(keys, V)
    context = keys.integer("llama.context_length")
    window = keys.get("llama.attention.sliding_window", int, "an integer", 0)
    if window != 0 and window < context:
        keys.fail(f"has llama.attention.sliding_window = {window}, less than its context of {context}")
    special = [k.removeprefix("tokenizer.ggml.").removesuffix("_token_id") for k in metadata if k.endswith("_token_id")]
    ids = {name: keys.token(name, V) for name in special}
    name = metadata.setting("general.name")
    rope_base = keys.real("llama.rope.freq_base", ROPE_BASE)
    return Config(
        arch="llama",
        name=printable((name if isinstance(name, str) else keys.gguf.path.stem)[:MAX_MODEL_NAME]),
        hd=hd,
        V=V,
        context=context,
        eps=keys.real("llama.attention.layer_norm_rms_epsilon"),
        rope_base=rope_base,
        rope_freqs=rope_frequencies(keys, rope_base, hd),
        bos=ids.get("bos"),
        eos=ids.get("eos"),
        tied=weights.output is weights.token_embd,
        file_layers=numbers["L"],
        **numbers,
    )


def check_vocabulary(keys: Keys, V: int) -> None:
    """Where the file says how many tokens there are, it says as many as it has rows for."""
    metadata, kind = keys.gguf.metadata, keys.gguf.value_types.get("tokenizer.ggml.tokens")
    if kind not in (None, "[str]"):
        keys.fail(f"has tokenizer.ggml.tokens of type {kind}; it must be an array of strings")
    if kind and len(metadata["tokenizer.ggml.tokens"]) != V:
        keys.fail(f"has {len(metadata['tokenizer.ggml.tokens'])} tokens but {V} rows of token_embd.weight")
    size = keys.integer("llama.vocab_size", V)
    if size != V:
        keys.fail(f"has llama.vocab_size = {size} but {V} rows of token_embd.weight")


def rope_frequencies(keys: Keys, base: float, hd: int) -> np.ndarray:  # (hd / 2,)
    """Radians per position of each pair: base^(-2i/hd) (RoFormer, eq. 15), over the scaling's factor and the file's.

    A scaling without a type is linear, as llama.cpp has it; rope_freqs.weight holds Llama 3's factors, one a pair.
    """
    scaling = keys.get("llama.rope.scaling.type", str, "UTF-8 text", "linear")
    if scaling not in ("none", "linear"):
        keys.fail(f"has rope scaling {shown(scaling)}; none, linear and {ROPE_FACTORS} are computed")
    factor = keys.real("llama.rope.scaling.factor", keys.real("llama.rope.scale_linear", 1.0))
    factors = np.full(hd // 2, factor if scaling == "linear" else 1.0)
    tensor = keys.gguf.tensors.get(ROPE_FACTORS)
    if tensor is not None and (tensor.shape != (hd // 2,) or tensor.type.name != "F32"):
        keys.fail(f"has {ROPE_FACTORS} {tensor.type.name} {tensor.shape}; it must be F32 ({hd // 2},)")
    with np.errstate(all="ignore"):  # what overflows is refused below
        if tensor is not None:
            factors = factors * tensor.array
        freqs = base ** (-np.arange(0, hd, 2) / hd) / factors
    if not ((freqs > 0) & (freqs <= MAX_FREQUENCY)).all():
        keys.fail("has rope scaling factors or a rope base that make angles zero, negative or not finite")
    return freqs
