"""A small transformer that translates, to try attention where it is used: in training, and word by word.

`python -m common.transformer --save reports/MACHINE/attention` trains it from the same start with several attentions,
lets each translate the same sentences, and tells how far their losses part.
"""

import argparse
import contextlib
import functools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from common.torch_attention import attention

BLOCKS, HEADS, WIDTH, VOCABULARY = 6, 8, 512, 52239  # of the second article's model, encoder and decoder each
PADDING, BEGIN, END, FIRST_WORD = range(4)
WORDS, LONGEST = 64, 12  # of the invented language; a sentence has 4 words at least
STEPS, BATCH, RATE, WARM_UP = 200, 64, 5e-4, 40
SENTENCES = 15
TOLERANCE = 2  # times what PyTorch's own math backend parts from its other ones


class Batch(NamedTuple):
    """Sentences padded on the right; lengths count what is no padding."""

    source: torch.Tensor  # (B, S) ids
    source_lengths: torch.Tensor  # (B,) int32
    target: torch.Tensor  # (B, T + 1) ids, BEGIN first and END last
    target_lengths: torch.Tensor


def sentences(count: int, seed: int, device) -> Batch:
    """Random sentences and their translations: word for word by a fixed dictionary, in the same order."""
    draw = torch.Generator().manual_seed(seed)
    meaning = torch.randperm(VOCABULARY - FIRST_WORD, generator=torch.Generator().manual_seed(0))[:WORDS] + FIRST_WORD
    lengths = torch.randint(4, LONGEST + 1, (count,), generator=draw)
    words = torch.randint(0, WORDS, (count, LONGEST), generator=draw)
    inside = torch.arange(LONGEST)[None, :] < lengths[:, None]
    source = torch.where(inside, words + FIRST_WORD, PADDING)
    target = functional.pad(torch.where(inside, meaning[words], PADDING), (1, 1))
    target[:, 0] = BEGIN
    target[torch.arange(count), lengths + 1] = END
    lengths = lengths.to(torch.int32)
    return Batch(*(a.to(device) for a in (source, lengths, target, lengths + 1)))


def sdpa(q, k, v, lengths, causal, backend=None):
    """PyTorch's attention with the mask that lengths and `causal` amount to, by a named backend or its own choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    keys = torch.arange(k.shape[2], device=k.device)
    seen = (keys[None, :] < lengths[:, None])[:, None, None, :]
    if causal:
        seen = seen & (keys[None, :] <= torch.arange(q.shape[2], device=q.device)[:, None])
    with sdpa_kernel(getattr(SDPBackend, backend)) if backend else contextlib.nullcontext():
        return functional.scaled_dot_product_attention(q, k, v, seen)


class Attend(nn.Module):
    """Several heads: x looks at `seen`, which is x itself or what the encoder made."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, seen, lengths, causal=False):  # (B, Q, WIDTH), (B, K, WIDTH), (B,) -> (B, Q, WIDTH)
        heads = (made.unflatten(2, (HEADS, -1)).transpose(1, 2) for made in
                 (self.query(x), self.key(seen), self.value(seen)))  # fmt: skip
        return self.out(self.attend(*heads, lengths, causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention to itself, to the encoder's output in a decoder, and two layers for each position; norms first."""

    def __init__(self, attend, decoder: bool):
        super().__init__()
        self.decoder = decoder
        self.own, self.cross = Attend(attend), Attend(attend) if decoder else None
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 + decoder))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, lengths, encoded=None, encoded_lengths=None):
        y = self.norms[0](x)
        x = x + self.own(y, y, lengths, causal=self.decoder)
        if self.decoder:
            x = x + self.cross(self.norms[1](x), encoded, encoded_lengths)
        return x + self.feed(self.norms[-1](x))


class Transformer(nn.Module):
    """Encoder and decoder over one vocabulary; `attend(q, k, v, lengths, causal)` is all that differs."""

    def __init__(self, attend):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.encoder = nn.ModuleList(Block(attend, decoder=False) for _ in range(BLOCKS))
        self.decoder = nn.ModuleList(Block(attend, decoder=True) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project = nn.Linear(WIDTH, VOCABULARY)

    def embed(self, ids):  # (B, T) -> (B, T, WIDTH), sines and cosines of the position added
        rates = torch.exp(torch.arange(0, WIDTH, 2, device=ids.device) * (-math.log(1e4) / WIDTH))
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        return self.embedding(ids) * math.sqrt(WIDTH) + torch.cat((angles.sin(), angles.cos()), dim=1)

    def encode(self, source, lengths):  # (B, S), (B,) -> (B, S, WIDTH)
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, lengths)
        return self.norms[0](x)

    def decode(self, target, lengths, encoded, encoded_lengths):  # (B, T), (B,), … -> (B, T, WIDTH)
        x = self.embed(target)
        for block in self.decoder:
            x = block(x, lengths, encoded, encoded_lengths)
        return self.norms[1](x)

    def forward(self, batch: Batch):  # -> (B, T, VOCABULARY), of each next word
        encoded = self.encode(batch.source, batch.source_lengths)
        hidden = self.decode(batch.target[:, :-1], batch.target_lengths, encoded, batch.source_lengths)
        return self.project(hidden)


def train(attend, device, steps: int = STEPS, count: int = BATCH) -> tuple[Transformer, list[float]]:
    """A model from the seeded start, after `steps` batches in BF16 with FP32 weights. -> model, loss of each batch."""
    torch.manual_seed(0)
    model = Transformer(attend).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    warm = max(1, min(WARM_UP, steps // 5))  # up to RATE, then down to nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    losses = []
    for step in range(steps):
        batch = sentences(count, seed=1 + step, device=device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(batch)
        loss = functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.target[:, 1:].flatten(), ignore_index=PADDING
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return model, [float(loss) for loss in losses]


@torch.no_grad()
def translate(model: Transformer, batch: Batch) -> list[list[int]]:
    """The likeliest next word each time, up to END: ids for each sentence. Logits are FP32, so that none are equal."""
    device = batch.source.device
    with torch.autocast(device.type, torch.bfloat16):
        encoded = model.encode(batch.source, batch.source_lengths)
    ids = torch.full((len(batch.source), 1), BEGIN, device=device)
    for _ in range(LONGEST + 1):
        lengths = torch.full_like(batch.source_lengths, ids.shape[1])
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.decode(ids, lengths, encoded, batch.source_lengths)
        best = model.project(hidden[:, -1].float()).argmax(1, keepdim=True)
        ids = torch.cat((ids, best), 1)
    return [row[1 : row.index(END)] if END in row else row[1:] for row in ids.tolist()]


ATTENTIONS = {  # the last is to see how far two of PyTorch's own part
    "triton": functools.partial(attention, rung="triton", backward="triton"),
    "hopper, skip": functools.partial(attention, rung="hopper", backward="skip"),
    "sdpa": sdpa,
    "sdpa, math": functools.partial(sdpa, backend="MATH"),
}


def parted(a: list[float], b: list[float]) -> dict:
    """How far two loss curves part: at most in the first fifth, before rounding has grown, then at most and on average.

    Between, training amplifies any difference in the last bit: there two right attentions part as much as two seeds.
    """
    apart = [abs(x - y) for x, y in zip(a, b, strict=True)]
    first = max(apart[: max(1, len(apart) // 5)])
    return {"first_fifth": first, "largest": max(apart), "mean": sum(apart) / len(apart)}


def compared(runs: dict) -> dict:
    """Each run held against "sdpa": within TOLERANCE times what "sdpa, math" parts from it, or not."""
    found = {name: parted(run["losses"], runs["sdpa"]["losses"]) for name, run in runs.items()}
    most = {what: TOLERANCE * found["sdpa, math"][what] for what in ("first_fifth", "mean")}
    within = {name: all(apart[what] <= most[what] for what in most) for name, apart in found.items()}
    return {name: {"parted_from_sdpa": found[name], "within_tolerance": within[name]} for name in runs}


def measured(device, attentions: dict, steps: int = STEPS) -> dict:
    """The record: losses, seconds and translations by each attention, "sdpa" and "sdpa, math" among them."""
    asked, runs, models = sentences(SENTENCES, seed=0, device=device), {}, {}
    right = [row[1:length] for row, length in zip(asked.target.tolist(), asked.target_lengths.tolist(), strict=True)]
    for name, attend in attentions.items():
        train(attend, device, steps=2)  # compiled and tuned before the clock
        start = time.perf_counter()
        models[name], losses = train(attend, device, steps)
        runs[name] = {"seconds": time.perf_counter() - start, "losses": losses,
                      "translations": translate(models[name], asked)}  # fmt: skip
    for name, judged in compared(runs).items():
        run = runs[name] = runs[name] | judged
        run["as_sdpa_trained"] = equal(run["translations"], runs["sdpa"]["translations"])
        for module in models["sdpa"].modules():  # the same weights, another attention
            if isinstance(module, Attend):
                module.attend = attentions[name]
        run["as_sdpa_with_its_weights"] = equal(translate(models["sdpa"], asked), runs["sdpa"]["translations"])
        run["right"] = equal(run["translations"], right)
    model = {"blocks": BLOCKS, "heads": HEADS, "width": WIDTH, "vocabulary": VOCABULARY}
    task = {"words": WORDS, "longest": LONGEST, "batch": BATCH, "steps": steps, "sentences": SENTENCES}
    return {"schema": 1, "model": model, "task": task, "source": asked.source.tolist(), "target": right, "runs": runs}


def equal(a: list, b: list) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def main() -> None:
    """Train and translate with every attention on the GPU; write DIR/transformer.json."""
    from common.kernel_gpu import machine

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    record = {"machine": machine()} | measured("cuda", ATTENTIONS)
    options.save.mkdir(parents=True, exist_ok=True)
    (options.save / "transformer.json").write_text(json.dumps(record) + "\n")
    for name, run in record["runs"].items():
        apart, lost = run["parted_from_sdpa"], run["losses"]
        print(
            f"{name:12} loss {lost[0]:.3f} to {lost[-1]:.4f}, from sdpa at most {apart['first_fifth']:.5f} at first, "
            f"{apart['largest']:.4f} later, {apart['mean']:.5f} on average; sentences as sdpa "
            f"{run['as_sdpa_trained']}, with its weights {run['as_sdpa_with_its_weights']}, right {run['right']} of "
            f"{SENTENCES}; {run['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
