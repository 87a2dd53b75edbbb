"""What the fused stage's kernel copies and what it reads: the same pieces in one order, for every shape and GPU."""

from types import SimpleNamespace

import pytest

from common.cuda_tiles import BYTES, HALVES, NIBBLES, SIXTEENTHS, TILE_BYTES, deep
from stages.fused import GROUP, PIECE, SLOT, WARPS, pieces


def stack(K, *matrices):
    """Matrices of (rows, format) and of one K."""
    counts = tuple(-(-rows // 16) for rows, _ in matrices)
    return SimpleNamespace(depth=deep(K), counts=counts, formats=tuple(form for _, form in matrices))


def model(D, F, kv, V, L, down=SIXTEENTHS):
    """The products of a token, in order."""
    layers = [
        (
            stack(D, (D, NIBBLES), (kv, NIBBLES), (kv, SIXTEENTHS if l % 2 else BYTES)),
            stack(D, (D, NIBBLES)),
            stack(D, (2 * F, NIBBLES)),
            stack(F, (D, down if l % 2 else NIBBLES)),
        )
        for l in range(L)
    ]
    return [w for layer in layers for w in layer] + [stack(D, (V, SIXTEENTHS))]


def read(stacks, blocks, block):
    """What the kernel's product and stream read, written after them: dealt, groups of tiles, pieces along k."""
    base = 0
    for number, w in enumerate(stacks):
        first = block - base
        if first < 0:
            first += blocks
        everything = sum(w.counts)
        base += everything
        while base >= blocks:
            base -= blocks
        for start in range(first, everything, GROUP * blocks):
            for tile in range(start, min(start + GROUP * blocks, everything), blocks):
                of = 0
                while tile >= w.counts[of]:
                    tile -= w.counts[of]
                    of += 1
                size, many = TILE_BYTES[w.formats[of]], PIECE[w.formats[of]]
                for k in range(0, w.depth, many):
                    yield number, of, (tile * w.depth + k) * size, min(many, w.depth - k) * size


SHAPES = {
    "tinyllama": model(2048, 5632, 256, 32000, 4),
    "smollm2": model(576, 1536, 192, 49152, 3, down=NIBBLES),
    "tiny": model(256, 512, 128, 512, 2),
    "odd": model(32, 96, 32, 17, 2, down=HALVES),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("blocks", [1, 6, 64, 132])
def test_what_is_copied_is_what_is_read(name, blocks):
    copied = pieces(SHAPES[name], blocks)
    assert len(copied) == blocks
    for block, of in enumerate(copied):
        assert of == list(read(SHAPES[name], blocks, block))


@pytest.mark.parametrize("name", SHAPES)
def test_every_byte_is_copied_once(name):
    stacks = SHAPES[name]
    seen = sorted(piece for block in pieces(stacks, 132) for piece in block)
    want = 0
    for number, w in enumerate(stacks):
        for matrix, (count, form) in enumerate(zip(w.counts, w.formats, strict=True)):
            mine = [(first, size) for n, m, first, size in seen if (n, m) == (number, matrix)]
            end = 0
            for first, size in mine:
                assert first == end and size % 16 == 0
                end += size
            assert end == count * w.depth * TILE_BYTES[form]
            want += len(mine)
    assert want == len(seen)


def test_a_piece_fits_its_slot_and_its_warps():
    for form, many in enumerate(PIECE):
        assert many * TILE_BYTES[form] <= SLOT
        assert many % WARPS == 0 or WARPS % many == 0  # so that a tile along k stays with the warp that took its x


def test_blocks_have_their_share():
    """Dealt on from product to product, no block has more than a piece or two above the mean of a layer."""
    found = [sum(size for *_, size in block) for block in pieces(SHAPES["tinyllama"][:-1], 132)]
    assert max(found) <= 1.15 * sum(found) / len(found)


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_a_ring_of_any_size_comes_to_its_end(slots):
    """One warp copies, in order, into slots that all readers have left; readers wait for theirs in the same order."""
    for block in pieces(SHAPES["smollm2"], 132)[:7]:
        copied = done = 0
        while done < len(block):
            before = copied, done
            if copied < len(block) and copied - done < slots:
                copied += 1
            if done < copied:
                done += 1
            assert (copied, done) != before
