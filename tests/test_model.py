"""The model boundary: what is run is computed exactly, and everything else is refused by name."""

import tracemalloc

import numpy as np
import pytest

from common.gguf import MAX_SETTING, TYPES, GGUFError, printable
from common.gguf_writer import write
from common.model import Layer, open_model

L, D, H, G, hd, F, V = 3, 64, 4, 2, 16, 96, 10
METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": L,
    "llama.context_length": 128,
    "llama.embedding_length": D,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": H,
    "llama.attention.head_count_kv": G,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e4,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LAYER = {
    "attn_norm": ("F32", (D,)),
    "attn_q": ("Q8_0", (H * hd, D)),
    "attn_k": ("Q4_0", (G * hd, D)),
    "attn_v": ("Q5_1", (G * hd, D)),
    "attn_output": ("Q4_1", (D, H * hd)),
    "ffn_norm": ("F32", (D,)),
    "ffn_gate": ("F16", (F, D)),
    "ffn_up": ("BF16", (F, D)),
    "ffn_down": ("Q5_0", (D, F)),
}
TENSORS = {
    "token_embd.weight": ("Q8_0", (V, D)),
    **{f"blk.{i}.{name}.weight": value for i in range(L) for name, value in LAYER.items()},
    "output_norm.weight": ("F32", (D,)),
    "output.weight": ("Q8_0", (V, D)),
}


def tensor(name, kind, shape, data=None):
    """A row of the writer's table; without data, bytes made from the name alone."""
    size = int(np.prod(shape)) // TYPES[kind].block * TYPES[kind].bytes
    if data is None:
        data = np.random.default_rng(list(name.encode())).integers(0, 128, size, np.uint8).tobytes()
    return name, TYPES[kind], shape, [data]


def llama(path, metadata=None, tensors=None, types=None, data=None):
    """Write the tiny model, with keys and tensors changed, or left out where None."""
    keys = {key: value for key, value in {**METADATA, **(metadata or {})}.items() if value is not None}
    table = {name: value for name, value in {**TENSORS, **(tensors or {})}.items() if value is not None}
    write(path, keys, [tensor(name, *value, (data or {}).get(name)) for name, value in table.items()], types)
    return path


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tiny.gguf"


def test_a_model_opens_with_every_number_and_weight(file):
    model = open_model(llama(file))
    config, weights = model.config, model.weights
    numbers = {"L": L, "D": D, "H": H, "G": G, "hd": hd, "F": F, "V": V, "context": 128, "file_layers": L}
    assert {key: getattr(config, key) for key in numbers} == numbers
    assert (config.arch, config.name, config.bos, config.eos, config.tied) == ("llama", "tiny", 1, 2, False)
    assert config.eps == np.float32(1e-5)
    assert len(weights.layers) == L
    shapes = Layer((D,), (H * hd, D), (G * hd, D), (G * hd, D), (D, H * hd), (D,), (F, D), (F, D), (D, F))
    for i, layer in enumerate(weights.layers):
        assert tuple(tensor.shape for tensor in layer) == shapes
        assert layer.w_q.name == f"blk.{i}.attn_q.weight"
        assert layer.w_down.name == f"blk.{i}.ffn_down.weight"
    assert weights.token_embd.shape == weights.output.shape == (V, D)


def test_without_an_output_matrix_the_embedding_is_tied(file):
    model = open_model(llama(file, tensors={"output.weight": None}))
    assert model.config.tied
    assert model.weights.output is model.weights.token_embd
    calls = []
    mapped = model.weights.map(lambda tensor: calls.append(tensor.name) or [tensor.name])
    assert mapped.output is mapped.token_embd
    assert sorted(calls) == sorted(model.gguf.tensors)
    assert mapped.layers[2].w_up == ["blk.2.ffn_up.weight"]


def test_map_keeps_an_output_matrix_apart(file):
    mapped = open_model(llama(file)).weights.map(lambda tensor: tensor.name)
    assert (mapped.token_embd, mapped.output) == ("token_embd.weight", "output.weight")


def test_layers_keeps_the_first(file):
    model = open_model(llama(file), layers=2)
    assert (model.config.L, model.config.file_layers, len(model.weights.layers)) == (2, L, 2)
    assert model.weights.layers[1].w_q.name == "blk.1.attn_q.weight"
    for layers in (0, -1, L + 1):
        with pytest.raises(ValueError, match=f"{layers} layers asked for; this model has 1 to {L}"):
            open_model(file, layers=layers)


def test_defaults_of_optional_keys(file):
    absent = ["llama.attention.head_count_kv", "llama.rope.freq_base", "general.name", "tokenizer.ggml.bos_token_id"]
    changed = {f"blk.{i}.{name}.weight": ("Q8_0", (H * hd, D)) for i in range(L) for name in ("attn_k", "attn_v")}
    config = open_model(llama(file, dict.fromkeys(absent), changed)).config
    assert (config.G, config.rope_base, config.name, config.bos) == (H, 10000.0, "tiny", None)


def lengths(size):
    return {"llama.attention.key_length": size, "llama.attention.value_length": size}


def test_the_head_size_may_differ_from_the_width_over_the_heads(file):
    heads = {"llama.attention.head_count": 8, "llama.attention.head_count_kv": 4, "llama.rope.dimension_count": 8}
    config = open_model(llama(file, heads | lengths(8))).config
    assert (config.H, config.G, config.hd, config.rope_freqs.shape) == (8, 4, 8, (4,))


def test_a_key_length_alone_is_right_where_it_is_the_usual_one(file):
    assert open_model(llama(file, {"llama.attention.key_length": hd})).config.hd == hd


def frequencies(base=5e4):
    return np.array([base ** (-2 * i / hd) for i in range(hd // 2)])


@pytest.mark.parametrize(
    ("metadata", "divisor"),
    [
        ({}, 1),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4),
        ({"llama.rope.scaling.type": "linear"}, 1),
        ({"llama.rope.scaling.factor": 2.0}, 2),
        ({"llama.rope.scale_linear": 8.0}, 8),
        ({"llama.rope.scaling.attn_factor": 1.0}, 1),
    ],
)
def test_rope_scaling(file, metadata, divisor):
    freqs = open_model(llama(file, metadata)).config.rope_freqs
    assert freqs.dtype == np.float64
    np.testing.assert_allclose(freqs, frequencies() / divisor, rtol=1e-14)


def test_rope_factors_divide_each_pair(file):
    factors = np.linspace(1, 8, hd // 2, dtype=np.float32)
    tensors, data = {"rope_freqs.weight": ("F32", (hd // 2,))}, {"rope_freqs.weight": factors.tobytes()}
    freqs = open_model(llama(file, tensors=tensors, data=data)).config.rope_freqs
    np.testing.assert_allclose(freqs, frequencies() / factors, rtol=1e-14)
    scaled = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    both = open_model(llama(file, scaled, tensors, data=data)).config.rope_freqs
    np.testing.assert_allclose(both, freqs / 2, rtol=1e-14)


REQUIRED = [
    "general.architecture",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(file, key):
    with pytest.raises(GGUFError, match=f"lacks the metadata key {key}$"):
        open_model(llama(file, {key: None}))


@pytest.mark.parametrize("key", [*REQUIRED, "llama.attention.head_count_kv", "llama.rope.freq_base"])
@pytest.mark.parametrize("value", [True, [3, 3], ["a"], b"\xff", "3", 3, 3.0])
def test_a_key_of_another_type_is_named(file, key, value):
    right = {
        "general.architecture": str,
        "llama.attention.layer_norm_rms_epsilon": float,
        "llama.rope.freq_base": float,
    }
    if type(value) is right.get(key, int):
        value = np.zeros(2, np.float32)
    with pytest.raises(GGUFError, match=key):
        open_model(llama(file, {key: value}))


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "qwen2"}, "architecture 'qwen2'"),
        ({"general.architecture": "\x1b[2Jevil"}, r"'\\x1b\[2Jevil'"),
        ({"llama.expert_count": 8}, "llama.expert_count = '8'"),
        ({"llama.expert_count": [8, 8]}, "llama.expert_count"),
        ({"llama.expert_count": ["8", "8"]}, "llama.expert_count = '<2 strings>'"),
        ({"split.count": 3}, "split.count = '3'"),
        ({"split.count": np.uint16(2)}, "split.count = '2'"),
        ({"llama.block_count": 0}, "block_count = 0"),
        ({"llama.block_count": -3}, "block_count = -3"),
        ({"llama.block_count": 2**40}, "block_count = 1099511627776"),
        ({"llama.block_count": 4}, "lacks the tensor blk.3.attn_norm.weight"),
        ({"llama.block_count": 2**31 - 1}, "lacks the tensor blk.3.attn_norm.weight"),
        ({"llama.block_count": 2}, "9 tensors the course does not compute with, 'blk.2.attn_norm.weight' first"),
        ({"llama.context_length": 0}, "context_length = 0"),
        ({"llama.attention.head_count": 0}, "head_count = 0"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads, not a multiple of its 3"),
        ({"llama.attention.head_count": 5, "llama.attention.head_count_kv": 5}, "not a multiple of its 5 attention"),
        (lengths(15), "heads of 15"),
        (lengths(2**30), "heads of 1073741824"),
        (lengths(8), "blk.0.attn_q.weight of shape"),
        ({"llama.attention.key_length": 8}, "keys of 8 and, lacking llama.attention.value_length, values of 16"),
        (
            {"llama.attention.key_length": 8, "llama.attention.head_count": 100, "llama.attention.head_count_kv": 100},
            "values of 0; both",
        ),
        ({"llama.attention.value_length": 8}, "value_length = 8, not the head size 16"),
        ({"llama.rope.dimension_count": 8}, "dimension_count = 8, not the head size 16"),
        ({"llama.embedding_length": 128}, "token_embd.weight of shape"),
        ({"llama.feed_forward_length": 64}, "blk.0.ffn_gate.weight of shape"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "epsilon = 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon = nan"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "epsilon = inf"),
        ({"llama.rope.freq_base": -1.0}, "freq_base = -1.0"),
        ({"llama.rope.freq_base": np.float64(5e-324)}, "rope base"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, "scaling.factor = 0.0"),
        ({"llama.rope.scaling.factor": np.float64(1e-300)}, "rope scaling factors"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor = '2.0'"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"tokenizer.ggml.bos_token_id": V}, "bos_token_id' = 10; the vocabulary has 10 tokens"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id' = -1"),
        ({"tokenizer.ggml.padding_token_id": 2**32 - 1}, "padding_token_id"),
        ({"tokenizer.ggml.eot_token_id": "2"}, "eot_token_id' of type str"),
        ({"tokenizer.ggml.tokens": ["a"] * (V - 1)}, "9 tokens but 10 rows"),
        ({"tokenizer.ggml.tokens": 7}, "tokens of type u32"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens of type str; it must be an array of strings"),
        ({"tokenizer.ggml.tokens": [1] * V}, r"tokens of type \[u32\]; it must be an array of strings"),
        ({"general.type": "adapter"}, "general.type = 'adapter'"),
        ({"general.quantization_version": 1}, "quantization_version = '1'; 2 is unpacked"),
        ({"general.quantization_version": "2"}, "quantization_version"),
        ({"general.quantization_version": [2, 2]}, "quantization_version"),
        ({"llama.vocab_size": V + 1}, "vocab_size = 11 but 10 rows"),
        ({"llama.tensor_data_layout": "hf"}, "tensor_data_layout = 'hf'"),
        ({"llama.attention.sliding_window": 127}, "sliding_window = 127, less than its context of 128"),
        ({"llama.attention.sliding_window": -1}, "sliding_window = -1"),
        ({"llama.attention.sliding_window": [128]}, "sliding_window"),
        ({"llama.expert_used_count": 2}, "expert_used_count = '2'"),
        ({"llama.pooling_type": 1}, "pooling_type = '1'"),
        ({"llama.attention.temperature_scale": 0.1}, "the key 'llama.attention.temperature_scale'"),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "the key 'llama.rope.scaling.yarn_ext_factor'"),
        ({"llama.rope.freq_scale": 0.5}, "the key 'llama.rope.freq_scale'"),
        ({"llama.\x1b[2Jevil": 1}, r"the key 'llama.\\x1b\[2Jevil'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(file, metadata, reason):
    with pytest.raises(GGUFError, match=reason):
        open_model(llama(file, metadata))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"token_embd.weight": None}, "lacks the tensor token_embd.weight"),
        ({"token_embd.weight": ("F32", ())}, "token_embd.weight of shape"),
        ({"token_embd.weight": ("F32", (D,))}, "token_embd.weight of shape"),
        ({"output_norm.weight": None}, "lacks the tensor output_norm.weight"),
        ({"output.weight": ("Q8_0", (V + 1, D))}, "output.weight of shape"),
        ({"blk.1.attn_v.weight": None}, "lacks the tensor blk.1.attn_v.weight"),
        (
            {"blk.2.ffn_down.weight": ("F32", (F, D))},
            r"blk.2.ffn_down.weight of shape \(96, 64\); it must be \(64, 96\)",
        ),
        ({"blk.1.attn_q.weight": ("I8", (D, D))}, "type I8, which is not unpacked here"),
        ({"blk.1.attn_q.weight": ("MXFP4", (D, D))}, "type MXFP4, which is not unpacked here"),
        ({"blk.0.attn_q.bias": ("F32", (D,))}, "'blk.0.attn_q.bias' first"),
        ({"blk.0.ffn_gate_inp.weight": ("F32", (8, D))}, "'blk.0.ffn_gate_inp.weight' first"),
        ({"rope_freqs.weight": ("F32", (hd,))}, "rope_freqs.weight F32"),
        ({"rope_freqs.weight": ("F16", (hd // 2,))}, "rope_freqs.weight F16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(file, tensors, reason):
    with pytest.raises(GGUFError, match=reason):
        open_model(llama(file, tensors=tensors))


@pytest.mark.parametrize("bad", [0, -1, np.nan, np.inf])
def test_rope_factors_that_make_no_angle_are_refused(file, bad):
    factors = np.ones(hd // 2, np.float32)
    factors[3] = bad
    with pytest.raises(GGUFError, match="rope scaling factors"):
        open_model(
            llama(
                file, tensors={"rope_freqs.weight": ("F32", (hd // 2,))}, data={"rope_freqs.weight": factors.tobytes()}
            )
        )


HARMLESS = {
    "general.type": "model",
    "general.quantization_version": 2,
    "llama.vocab_size": V,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.attention.sliding_window": 128,
    "llama.attention.layer_norm_epsilon": 1e-5,
    "llama.rope.scaling.original_context_length": 64,
    "llama.rope.scaling.finetuned": True,
    "llama.expert_count": 0,
    "llama.expert_used_count": 0,
}


def test_keys_that_change_nothing_may_be_there(file):
    assert open_model(llama(file, HARMLESS)).config.V == V
    floats = {name: ("F32", shape) for name, (_, shape) in TENSORS.items()}
    assert open_model(llama(file, {"general.quantization_version": 1}, floats)).config.V == V  # no block to misread


def test_the_real_model_and_the_shapes_hold_no_unknown_key(smollm2, tiny):
    assert open_model(smollm2).config.L == 30
    assert open_model(tiny).config.L == 2


@pytest.mark.parametrize("name", ["a" * 300, "\U0001f600" * 2_000_000, "\x1b]0;title\x07" * 50])
def test_a_name_is_cut_and_safe(file, name):
    found = open_model(llama(file, {"general.name": name})).config.name
    assert found.isprintable()
    assert found.startswith(printable(name[:100]))
    assert len(found) <= 1000


@pytest.mark.parametrize("key", ["general.architecture", "llama.expert_count", "llama.rope.scaling.type"])
def test_no_long_text_is_decoded_to_be_refused(file, key):
    llama(file, {key: "\U0001f600" + "a" * 20_000_000})
    tracemalloc.start()
    with pytest.raises(GGUFError):
        open_model(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * 4 * MAX_SETTING  # four bytes a character


@pytest.mark.parametrize("value", [10**6, "a"])
def test_a_key_in_an_error_is_safe_for_a_terminal_and_short(file, value):
    llama(file, {"tokenizer.ggml.\x1b]0;title\x07\n\u202e" + "x" * 60_000 + "_token_id": value})
    with pytest.raises(GGUFError) as caught:
        open_model(file)
    told = str(caught.value).removeprefix(str(file))
    assert told.isprintable()
    assert len(told) < 500
    assert "tokenizer.ggml" in told and ("the vocabulary has" in told or "it must be an integer" in told)
