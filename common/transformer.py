"""A small transformer that translates, to try attention where it is used: in training, and word by word.

`python -m common.transformer --save reports/MACHINE/attention` trains it from the same starts with several attentions,
lets each translate the same sentences, and tells how far their losses part.
"""

import argparse
import contextlib
import functools
import json
import math
import multiprocessing
from pathlib import Path
from statistics import fmean
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
STARTS = 8  # seeds of the first weights: how far two trainings part is a matter of chance
TOLERANCE = 2  # times what PyTorch's math backend parts from what PyTorch chooses itself


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


def train(attend, device, steps: int = STEPS, start: int = 0) -> tuple[Transformer, list[float]]:
    """A model from one seeded start, after `steps` batches in BF16 with FP32 weights. -> model, loss of each batch."""
    torch.manual_seed(start)
    model = Transformer(attend).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    warm = max(1, min(WARM_UP, steps // 5))  # up to RATE, then down to nothing
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    losses = []
    for step in range(steps):
        batch = sentences(BATCH, seed=1 + step, device=device)
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
    return model, [round(float(loss), 6) for loss in losses]


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


PAIRS = ("triton", "triton"), ("skip", "skip"), ("hopper", "hopper")  # forward and backward rungs
ATTENTIONS = {f"{rung}, {back}": functools.partial(attention, rung=rung, backward=back) for rung, back in PAIRS} | {
    "sdpa": sdpa,
    "sdpa, again": sdpa,  # does it repeat itself?
    "sdpa, math": functools.partial(sdpa, backend="MATH"),  # to see how far two of PyTorch's own part
}


def parted(a: list[list[float]], b: list[list[float]]) -> dict:
    """How far loss curves part from others with the same starts, averaged over starts, and at most.

    "first_fifth" is the most in a curve's first fifth, before rounding has grown; "mean" the average over all of it.
    After that fifth training amplifies any difference in the last bit: two right attentions part as well.
    """
    apart = [[abs(x - y) for x, y in zip(*curves, strict=True)] for curves in zip(a, b, strict=True)]
    first = fmean(max(curve[: max(1, len(curve) // 5)]) for curve in apart)
    return {"first_fifth": first, "largest": max(map(max, apart)), "mean": fmean(map(fmean, apart))}


def compared(runs: dict) -> dict:
    """Each run held against "sdpa": within TOLERANCE times what "sdpa, math" parts from it, or not."""
    found = {name: parted(run["losses"], runs["sdpa"]["losses"]) for name, run in runs.items()}
    most = {what: TOLERANCE * found["sdpa, math"][what] for what in ("first_fifth", "mean")}
    within = {name: all(apart[what] <= most[what] for what in most) for name, apart in found.items()}
    return {name: {"parted_from_sdpa": found[name], "within_tolerance": within[name]} for name in runs}


def from_start(start: int, device, attentions: dict, steps: int) -> dict:
    """By each attention: losses, translations, and those by the model that "sdpa" has trained."""
    asked, runs, models = sentences(SENTENCES, seed=0, device=device), {}, {}
    for name, attend in attentions.items():
        models[name], losses = train(attend, device, steps, start)
        runs[name] = {"losses": losses, "translations": translate(models[name], asked)}
    for name, attend in attentions.items():
        for module in models["sdpa"].modules():  # the same weights, another attention
            if isinstance(module, Attend):
                module.attend = attend
        runs[name]["with_sdpas_weights"] = translate(models["sdpa"], asked)
    return runs


def measured(device, attentions: dict, steps: int = STEPS, starts: int = STARTS, each=map) -> dict:
    """The record of all starts, by each attention, "sdpa" and "sdpa, math" among them; `each` may be a pool's map."""
    given = functools.partial(from_start, device=device, attentions=attentions, steps=steps)
    found = list(each(given, range(starts)))
    runs = {name: {what: [run[name][what] for run in found] for what in found[0][name]} for name in attentions}
    asked = sentences(SENTENCES, seed=0, device="cpu")
    right = [row[1:length] for row, length in zip(asked.target.tolist(), asked.target_lengths.tolist(), strict=True)]
    for name, judged in compared(runs).items():
        run, sdpas = runs[name], runs["sdpa"]["translations"]
        run |= judged
        run["as_sdpa_trained"] = sum(map(equal, run["translations"], sdpas))
        run["as_sdpa_with_its_weights"] = sum(map(equal, run["with_sdpas_weights"], sdpas))
        run["right"] = sum(equal(made, right) for made in run["translations"])
    model = {"blocks": BLOCKS, "heads": HEADS, "width": WIDTH, "vocabulary": VOCABULARY}
    task = {"words": WORDS, "longest": LONGEST, "batch": BATCH, "steps": steps,
            "starts": starts, "sentences": SENTENCES}  # fmt: skip
    return {"schema": 2, "model": model, "task": task, "source": asked.source.tolist(), "target": right, "runs": runs}


def equal(a: list, b: list) -> int:
    return sum(x == y for x, y in zip(a, b, strict=True))


def main() -> None:
    """Train and translate with every attention on the GPU; write DIR/transformer.json."""
    from common import kernel_ladder
    from common.kernel_gpu import machine

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--save", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    ladders = {name: kernel_ladder.ladder(name) for name in ("attention", "attention_backward")}
    sources = {f"{name}/{rung}": kernel_ladder.source_digest(rungs, rung)
               for pair in PAIRS for (name, rungs), rung in zip(ladders.items(), pair, strict=True)}  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(STARTS) as pool:  # a training waits for its host, not for the GPU
        record = {"machine": machine(), "sources": sources} | measured("cuda", ATTENTIONS, each=pool.map)
    options.save.mkdir(parents=True, exist_ok=True)
    (options.save / "transformer.json").write_text(json.dumps(record) + "\n")
    for name, run in record["runs"].items():
        apart, last = run["parted_from_sdpa"], [losses[-1] for losses in run["losses"]]
        print(
            f"{name:14} loss {run['losses'][0][0]:.3f} to {min(last):.4f} - {max(last):.4f}, from sdpa at most "
            f"{apart['first_fifth']:.5f} at first, {apart['largest']:.4f} later, {apart['mean']:.5f} on average; "
            f"within tolerance: {run['within_tolerance']}; sentences as sdpa {run['as_sdpa_trained']}, with its "
            f"weights {run['as_sdpa_with_its_weights']}, right {run['right']} of {STARTS * SENTENCES}"
        )


if __name__ == "__main__":
    main()
