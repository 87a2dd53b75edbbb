"""Random models have the right shape, types, spread and tokenizer, are the same everywhere, and are written whole."""

import errno
import hashlib
from collections import Counter
from types import SimpleNamespace

import gguf as oracle
import numpy as np
import pytest

from common import gguf_writer, reference, sources, synth
from common.gguf import TYPES, GGUFError, read
from common.model import open_model
from common.sources import SourceError
from common.tokenizer import Tokenizer
from tests.helpers import Settings

# If this changes on purpose, raise sources.RECIPE with it.
DIGESTS = {1: "c4b6c05b46caad1b38c46d12382a852070b9f2fcd311513621aeb3cf6831c9c1"}


def types_of(shape: str, quant: str) -> dict[str, str]:
    dims = synth.SHAPES[shape]
    return {n: synth.type_name(n, rows, quant, dims.L, dims.tied) for n, rows in synth._tensors(dims)}


@pytest.mark.parametrize("quant", synth.QUANTS)
def test_weights_as_another_reader_sees_them(tiny_of, quant):
    model = open_model(tiny_of(quant))
    assert model.config.L == 2 and model.config.V == 512 and not model.config.tied
    for tensor in oracle.GGUFReader(tiny_of(quant)).tensors:
        weights = oracle.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        expected = synth.type_name(tensor.name, weights.shape, quant, 2, False)
        assert tensor.tensor_type.name == expected == model.gguf.tensors[tensor.name].type.name
        if weights.ndim == 1:
            assert 0.8 < weights.min() < 0.9 and 1.1 < weights.max() < 1.2
        else:
            scaled = weights * weights.shape[1] ** 0.5
            # 128 super-blocks in the smallest matrix, each with a scale of its own: 6 % is two deviations
            assert np.sqrt((scaled**2).mean()) == pytest.approx(1, abs=0.08), tensor.name
            assert abs(scaled.mean()) < 0.06, tensor.name
        assert np.isfinite(weights).all()


@pytest.mark.parametrize("quant", ["q4_k_m", "q4_0", "q2_k", "f16"])
def test_activations_stay_healthy(tiny_of, quant):
    answer = reference.compute(open_model(tiny_of(quant)), list(range(259, 291)))
    spread = answer.residual.std(axis=-1)
    assert np.isfinite(answer.logits).all() and 0.02 < spread.min() <= spread.max() < 5
    assert 0.5 < answer.logits.std() < 2
    # a matrix that leans would send every token the same way
    assert len(set(answer.logits.argmax(axis=-1))) > 10


def test_the_mix_of_tinyllama_is_that_of_the_published_file():
    types = types_of("tinyllama", "q4_k_m")
    assert Counter(types.values()) == {"Q4_K": 135, "Q6_K": 21, "F32": 45}
    shapes = dict(synth._tensors(synth.SHAPES["tinyllama"]))
    assert sum(gguf_writer.size(TYPES[types[n]], shape) for n, shape in shapes.items()) == 667_078_656
    finer = sorted(int(n.split(".")[1]) for n, kind in types.items() if n.endswith("attn_v.weight") and kind == "Q6_K")
    assert finer == [0, 1, 4, 7, 10, 13, 16, 19, 20, 21]


def test_the_shape_of_smollm2_is_that_of_the_real_file(smollm2):
    real = read(smollm2)
    types = types_of("smollm2", "q4_1")
    made = {name: (shape, types[name]) for name, shape in synth._tensors(synth.SHAPES["smollm2"])}
    assert made == {name: (tensor.shape, tensor.type.name) for name, tensor in real.tensors.items()}
    made = synth._dimensions(synth.SHAPES["smollm2"])
    assert made == {key: pytest.approx(real.metadata[key]) for key in made}


def test_rows_that_fill_no_super_block_fall_back():
    types = types_of("smollm2", "q4_k_m")  # rows of 576; only ffn_down's 1536 are a multiple of 256
    assert types["token_embd.weight"] == "Q8_0" and types["blk.3.attn_q.weight"] == "Q5_0"
    assert types["blk.0.attn_v.weight"] == "Q8_0" and types["blk.4.attn_v.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K" and types["blk.4.ffn_down.weight"] == "Q4_K"
    assert types_of("smollm2", "q5_k")["blk.0.attn_q.weight"] == "Q5_1"
    assert types_of("smollm2", "iq4_xs")["blk.0.attn_q.weight"] == "IQ4_NL"
    assert synth.type_name("blk.0.attn_q.weight", (8, 40), "q4_k", 1, False) == "F16"


def test_a_seed_means_the_same_bytes_everywhere(tiny, tmp_path):
    assert hashlib.sha256(tiny.read_bytes()).hexdigest() == DIGESTS[sources.RECIPE]
    other = synth.synth("tiny", "q4_k_m", tmp_path / "other.gguf", seed=1)
    assert other.stat().st_size == tiny.stat().st_size and other.read_bytes() != tiny.read_bytes()


def test_layers_and_big_shapes(tmp_path):
    config = open_model(synth.synth("tinyllama", "Q4_0", tmp_path / "one.gguf", layers=1)).config
    assert (config.L, config.D, config.F, config.H, config.G, config.V) == (1, 2048, 5632, 32, 4, 32000)
    assert (config.context, config.rope_base, config.hd) == (2048, 10000.0, 64)
    config = open_model(synth.synth("tiny", "f16", tmp_path / "one.gguf", layers=5)).config
    assert config.L == 5


# Tokenizers

ENGLISH = "Once upon a time, there was a little girl.\n\tShe said: “naïve cafés” — 42 漢字 🙂  "


def tokenizer_of(kind: str, size: int) -> tuple[Tokenizer, dict]:
    metadata = synth.tokenizer(kind, size)
    return Tokenizer.from_gguf(SimpleNamespace(path="made.gguf", metadata=Settings(metadata), tensors={})), metadata


@pytest.mark.parametrize("kind, size, space", [("llama", 512, "▁"), ("llama", 32000, "▁"), ("gpt2", 49152, "Ġ")])
def test_tokenizers_have_their_size_and_reach_every_piece(kind, size, space):
    tokenizer, metadata = tokenizer_of(kind, size)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == size == len(metadata["tokenizer.ggml.token_type"])
    assert tokenizer.decode(tokenizer.encode(ENGLISH)) == ENGLISH
    # What begins with a space is a whole word; SPM gives a text one of its own.
    words = {i: token.replace(space, " ") for i, token in enumerate(tokens) if token[0] == space and token != space}
    unreached = [w for i, w in words.items() if tokenizer.encode(w[kind == "llama" :], bos=False) != [i]]
    assert len(words) > size * 0.15 and unreached == []


@pytest.mark.parametrize("kind, size", [("llama", 32000), ("gpt2", 49152)])
def test_english_takes_few_tokens_and_chats(kind, size):
    tokenizer, metadata = tokenizer_of(kind, size)
    assert len(tokenizer.encode(" there was a little world in the state of memory", bos=False)) <= 11
    ids = tokenizer.chat([{"role": "user", "content": "hello"}])
    assert metadata["tokenizer.ggml.eos_token_id"] in ids
    assert tokenizer.decode(ids).endswith("assistant\n" if kind == "gpt2" else "<|assistant|>\n")


# Requantizing


def test_what_is_already_of_the_type_is_copied(smollm2, tmp_path):
    made = synth.requantize(smollm2, "q4_1", tmp_path / "same.gguf")
    assert sources.sha256_of(made) == sources.sha256_of(smollm2)


@pytest.mark.parametrize("quant, error", [("q8_0", 1e-4), ("q4_0", 2e-2), ("q4_k_m", 2e-2), ("bf16", 1e-5)])
def test_requantizing_keeps_all_but_the_matrices(tiny_of, tmp_path, monkeypatch, quant, error):
    monkeypatch.setattr(synth, "CHUNK", 10_000)  # several chunks a matrix, as in a large model
    before = oracle.GGUFReader(tiny_of("f32"))
    made = synth.requantize(tiny_of("f32"), quant, tmp_path / "made.gguf")
    metadata, kept = dict(read(made).metadata), dict(read(tiny_of("f32")).metadata)
    assert metadata.pop("general.file_type") == synth.QUANTS[quant][1] != kept.pop("general.file_type")
    assert list(metadata) == list(kept)
    assert all(np.array_equal(value, kept[key]) for key, value in metadata.items())
    for old, new in zip(before.tensors, oracle.GGUFReader(made).tensors, strict=True):
        was, now = (oracle.dequantize(t.data, t.tensor_type).astype(np.float64) for t in (old, new))
        assert new.tensor_type.name == synth.type_name(old.name, was.shape, quant, 2, False)
        assert ((now - was) ** 2).mean() <= (error * (was**2).mean() if was.ndim == 2 else 0), old.name


def test_norms_of_another_type_stay_so(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(synth, "type_name", lambda *args: "F16")
        source = synth.synth("tiny", "f16", tmp_path / "half.gguf")
    made = read(synth.requantize(source, "q8_0", tmp_path / "made.gguf")).tensors
    assert made["output_norm.weight"].raw.tobytes() == read(source).tensors["output_norm.weight"].raw.tobytes()
    assert made["blk.0.attn_q.weight"].type.name == "Q8_0"


def test_a_type_that_cannot_be_written(tiny, tmp_path):
    with pytest.raises(SourceError, match="IQ4_XS.*only read.*q4_k_m") as caught:
        synth.requantize(tiny, "iq4_xs", tmp_path / "made.gguf")
    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())


def test_requantizing_no_model(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"PNG")
    with pytest.raises(GGUFError):
        synth.requantize(tmp_path / "no.gguf", "q4_0", tmp_path / "made.gguf")


# Whole or not at all


def test_a_disk_that_fills_up_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "out.gguf"
    path.write_bytes(b"before")
    draw = synth._random_blocks
    left = [3]

    def fill(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return draw(*args)

    monkeypatch.setattr(synth, "_random_blocks", fill)
    with pytest.raises(SourceError, match="No space left") as caught:
        synth.synth("tiny", "q4_0", path)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == b"before" and [p.name for p in tmp_path.iterdir()] == ["out.gguf"]


def test_too_little_disk_is_seen_first(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(SourceError, match="free"):
        synth.synth("tinyllama", "q4_k_m", tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "shape, quant, layers, words",
    [("tinylama", "q4_0", None, "tinyllama"), ("tiny", "q4_7", None, "q4_0"), ("tiny", "q4_0", 0, "1 or more")],
)
def test_usage(tmp_path, shape, quant, layers, words):
    with pytest.raises(SourceError, match=words) as caught:
        synth.synth(shape, quant, tmp_path / "out.gguf", layers=layers)
    assert caught.value.exit_code == 2


def test_a_folder_is_not_overwritten(tmp_path):
    with pytest.raises(SourceError, match="is a folder") as caught:
        synth.synth("tiny", "q4_0", tmp_path)
    assert caught.value.exit_code == 2
