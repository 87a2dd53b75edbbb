"""From flags to a job: what is meant, what is refused, and with which exit code."""

import pytest

from common import job, sources, synth
from common.job import ContextError, UsageError, parse_ids, parse_shape, prepare

V, CONTEXT = 512, 1024  # of the tiny model


def test_a_job_of_ids(tiny):
    found = prepare(str(tiny), ids="3, 1,2", n=5, threads=2)
    assert found.ids == [3, 1, 2]
    assert (found.n, found.context, found.threads, found.shape) == (5, CONTEXT, 2, "pp3+tg5")
    assert found.stop_ids == []  # ids say nothing of an end
    assert found.tokenize_ms is None


def test_a_job_of_text(tiny):
    found = prepare(str(tiny), prompt="Once upon a time")
    assert found.tokenizer.decode(found.ids).strip() == "Once upon a time"
    assert found.stop_ids == sorted(found.tokenizer.stop_ids) != []
    assert found.tokenize_ms > 0
    assert found.n == job.NEW_TOKENS


def test_the_real_model_has_a_prompt_of_its_own(smollm2):
    found = prepare(str(smollm2))
    assert found.ids == [6403, 1980, 253, 655, 28, 665, 436, 253, 1838]
    assert not found.made_up
    assert found.decode(found.ids) == job.PROMPT


def test_random_weights_are_told(tiny):
    found = prepare(str(tiny))
    assert found.made_up
    assert len(found.ids) == 16
    assert prepare(str(tiny), ids="1").made_up


@pytest.mark.parametrize(
    ("text", "n", "tokens", "new"),
    [
        ("pp64", None, 64, 1),
        ("pp64", 5, 64, 5),
        ("tg32", None, 1, 32),
        ("pp16+tg4", None, 16, 4),
        ("pp16+tg4", 4, 16, 4),
        ("pp16+tg4@d100", None, 116, 4),
        ("tg4@d100", None, 101, 4),
    ],
)
def test_shapes_by_name(text, n, tokens, new):
    ids, found = parse_shape(text, V, n)
    assert (len(ids), found) == (tokens, new)
    assert all(0 <= i < V for i in ids)
    assert ids == parse_shape(text, V, n)[0]  # the same ids each time, so that runs can be paired
    assert len(set(ids)) > 1 or tokens == 1


NO_SHAPES = [
    "",
    "64",
    "pp",
    "pp64tg",
    "pp-1",
    "tg4+pp4",
    "pp4 tg4",
    "pp4+",
    "+tg4",
    "pp0",
    "tg0",
    "pp4+tg0",
    "+",
    "@d4",
    "pp1234567890",
    "tg4@d1234567890",
    "pp" + "9" * 5000,
]


@pytest.mark.parametrize("text", NO_SHAPES)
def test_no_shapes(text):
    with pytest.raises(UsageError) as caught:
        parse_shape(text, V, None)
    assert len(str(caught.value)) < 200


def test_a_shape_and_n_that_disagree():
    with pytest.raises(UsageError, match="disagree"):
        parse_shape("pp4+tg4", V, 5)


def test_ids():
    assert parse_ids("0,511", V) == [0, 511]
    for text in ("", "a", "1,,2", "1;2", "1.5", "0x1"):
        with pytest.raises(UsageError, match="separated by commas"):
            parse_ids(text, V)


@pytest.mark.parametrize("text", ["9" * 5000, "1," * 5000, "9" * 4000])
def test_long_ids_are_cut_in_the_error(text):
    with pytest.raises(UsageError) as caught:
        parse_ids(text, V)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("shape", ["pp999999999", "pp1+tg1@d999999999", "pp1024@d1"])
def test_no_ids_are_drawn_that_the_context_cannot_hold(tiny, shape, monkeypatch):
    monkeypatch.setattr(job, "random_ids", lambda *_: pytest.fail("drawn"))
    with pytest.raises(ContextError, match=f"the context holds {CONTEXT}"):
        prepare(str(tiny), shape=shape)


def test_room_is_what_the_context_leaves(tiny):
    assert prepare(str(tiny), ids="1,2", n=10**8).room == CONTEXT - 1
    assert prepare(str(tiny), ids="1,2", n=5).room == 5


@pytest.mark.parametrize(("text", "bad"), [("512", "512"), ("1,-1", "-1"), ("99999999999999999999", "9999")])
def test_ids_outside_the_vocabulary(text, bad):
    with pytest.raises(UsageError, match=f"{bad}.* is no token .* 0 to 511"):
        parse_ids(text, V)


TWO_PROMPTS = [{"prompt": "a", "ids": "1"}, {"ids": "1", "shape": "pp4"}, {"prompt": "", "shape": "pp4"}]


@pytest.mark.parametrize("flags", TWO_PROMPTS)
def test_one_prompt_only(tiny, flags):
    with pytest.raises(UsageError, match="give one of"):
        prepare(str(tiny), **flags)


@pytest.mark.parametrize("n", [0, -1])
def test_at_least_one_new_token(tiny, n):
    with pytest.raises(UsageError, match="at least one"):
        prepare(str(tiny), n=n)


@pytest.mark.parametrize("prompt", ["", "caf\udce9", "\ud800"])
def test_text_that_is_none(tiny, prompt):
    with pytest.raises(UsageError, match="empty|UTF-8"):
        prepare(str(tiny), prompt=prompt)


@pytest.mark.parametrize("layers", [0, -1, 3, 99])
def test_layers_the_file_lacks(tiny, layers):
    with pytest.raises(UsageError, match=f"--layers {layers}"):
        prepare(str(tiny), layers, ids="1")


def test_fewer_layers_are_told_wherever_the_model_is_named(tiny):
    found = prepare(str(tiny), 1, ids="1")
    assert found.cut
    assert "first 1 of 2 layers" in found.model_name
    assert found.request("naive").layers == 1
    whole = prepare(str(tiny), ids="1")
    assert not whole.cut
    assert "layers" not in whole.model_name
    assert whole.request("naive").layers is None


def test_the_context_is_kept(tiny):
    full = ",".join(["1"] * 8)
    assert prepare(str(tiny), ids=full, context=8).context == 8
    with pytest.raises(ContextError, match="9 tokens and the context holds 8.*--context"):
        prepare(str(tiny), ids=full + ",1", context=8)
    with pytest.raises(ContextError, match=f"1025 tokens and the context holds {CONTEXT}") as error:
        prepare(str(tiny), shape="pp1025")
    assert "--context" not in str(error.value)  # raising it would not help
    with pytest.raises(ContextError, match=f"knows {CONTEXT} positions"):
        prepare(str(tiny), ids="1", context=CONTEXT + 1)


@pytest.mark.parametrize("context", [0, -5])
def test_a_context_of_nothing(tiny, context):
    with pytest.raises(UsageError):
        prepare(str(tiny), ids="1", context=context)


def test_exit_codes():
    assert (UsageError.exit_code, ContextError.exit_code) == (2, 6)


def test_a_request_carries_the_job_and_its_changes(tiny):
    found = prepare(str(tiny), ids="1,2", n=3, context=9, threads=2).request("naive", n=1, budget_s=4.0)
    assert (found.stage, found.model, found.ids, found.n) == ("naive", str(tiny), [1, 2], 1)
    assert (found.context, found.threads, found.budget_s) == (9, 2, 4.0)


def test_quantization_is_the_type_of_most_weights(tiny, tmp_path):
    found = prepare(str(tiny), ids="1")
    mix = job.quant_mix(found.gguf)
    assert set(mix) == {"Q4_K", "Q6_K", "F32"}
    shape = synth.SHAPES["tiny"]
    kv = shape.G * synth.HEAD
    layer = 2 * shape.D * shape.D + 2 * shape.D * kv + 3 * shape.D * shape.F + 2 * shape.D
    assert sum(mix.values()) == shape.L * layer + 2 * shape.V * shape.D + shape.D
    assert job.quantization(found.gguf) == "Q4_K"


def test_the_digest_is_of_the_model_that_is_mapped_and_taken_once(tiny, tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(tiny.read_bytes())
    found = prepare(str(path), ids="1")
    path.unlink()
    path.write_bytes(tiny.read_bytes() + b"another")
    assert found.sha256 == sources.sha256_of(tiny) != sources.sha256_of(path)
    monkeypatch.setattr(type(found.gguf.gguf), "sha256", lambda _: pytest.fail("again"))
    assert len(found.sha256) == 64


def test_lesson_model_is_the_default(tiny, monkeypatch):
    monkeypatch.setenv("LESSON_MODEL", str(tiny))
    assert prepare(ids="1").path == tiny
