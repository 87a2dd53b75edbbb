"""What the kernel of a token copies and what it reads: the same pieces in one order, for every shape and GPU."""

import itertools

import pytest

from common.cuda_streams import (
    BYTES,
    CHUNK_K,
    GROUP,
    HALVES,
    HEADER,
    NIBBLES,
    PIECE,
    SHARE,
    WARPS,
    Cut,
    order,
    plan,
    tall,
)

FORMS = {
    "q4_k_m": [(NIBBLES, NIBBLES, BYTES, NIBBLES, NIBBLES, BYTES), (NIBBLES,) * 6],
    "halves": [(HALVES,) * 6, (BYTES, HALVES, NIBBLES, HALVES, BYTES, HALVES)],
}
SIZES = {  # D, F, H, G, hd, V
    "tinyllama": (2048, 5632, 32, 4, 64, 32000),
    "smollm2": (576, 1536, 9, 3, 64, 4096),
    "llama": (4096, 14336, 32, 8, 128, 4096),
    "tiny": (256, 512, 4, 2, 64, 512),
    "odd": (192, 141, 3, 1, 40, 517),
}
CASES = {
    f"{shape}-{forms}-{blocks}": (Cut(*SIZES[shape], 2, min(blocks, tall(SIZES[shape][1]))), FORMS[forms], BYTES)
    for shape, forms, blocks in itertools.product(SIZES, FORMS, (64, 128))
}


def read(cut, layers, output, block, warp):
    """The pieces that a warp of the kernel reads, written after its phases: (matrix, number, bytes of shares)."""
    B, active = cut.blocks, warp < cut.warps

    def by_rows(matrix, form, tile):
        """product_by_rows: chunks of k; a share of eight units, or two of four, again for the low bytes of HALVES."""
        for chunk in range(cut.chunks if active else 0):
            pieces = [(0, 0)] if form == NIBBLES else [(plane, j) for plane in range(form) for j in range(2)]
            for plane, j in pieces:
                yield matrix, (tile * cut.chunks + chunk) * len(pieces) + 2 * plane + j, SHARE

    def by_columns(matrix, form, shares, every):
        """add_columns: turns of tiles, each by every share of x, again for the low bytes of HALVES."""
        many, passes = shares
        size = many * (128 + 64 if form == NIBBLES else 256 + 64)
        at_once = min(every, SHARE // size)
        pieces = -(-every // at_once) * passes * (2 if form == HALVES else 1)
        for i in range(pieces):
            yield matrix, block * pieces + i, at_once * size

    for l, (q, k, v, o, gate_up, down) in enumerate(layers):
        queries, keys = tall(cut.H * cut.hd), tall(cut.G * cut.hd)
        for tile in range(B - 1 - block, queries + 2 * keys, B):
            if tile < queries:
                yield from by_rows(6 * l, q, tile)
            else:
                second = tile >= queries + keys
                yield from by_rows(6 * l + 1 + second, v if second else k, tile - queries - keys * second)
        if block < cut.parts * cut.H:
            yield from by_columns(6 * l + 3, o, cut.seen, -(-cut.each // WARPS))
        for unit in range(block, tall(cut.F), B):
            yield from by_rows(6 * l + 4, gate_up, 2 * unit)
            yield from by_rows(6 * l + 4, gate_up, 2 * unit + 1)
        yield from by_columns(6 * l + 5, down, cut.act, -(-tall(cut.D) // WARPS))
    for tile in range(block, tall(cut.V), B):
        yield from by_rows(6 * cut.L, output, tile)


@pytest.mark.parametrize("case", CASES)
def test_what_is_copied_is_what_is_read(case):
    """A warp's ring step by step: filled, then arrive and leave for each piece, which has been asked for before it is
    waited for, and is the one that is read. The ring ends empty.
    """
    cut, layers, output = CASES[case]
    made = plan(cut, layers, output)
    for block, warp in itertools.product((0, cut.blocks // 2, cut.blocks - 1), (0, WARPS - 1)):
        idle = warp >= cut.warps
        first = block * WARPS * made.stride  # where the stream of warp 0 begins; the others' are alike

        def of_this_block(places, values, first=first, stride=made.stride):
            return {int(at) - first: value for at, value in zip(places, values, strict=True)
                    if first <= at < first + WARPS * stride}  # fmt: skip

        held, length = {}, of_this_block(*made.links[idle])
        for matrix, places in enumerate(made.others if idle else made.places):
            held |= of_this_block(places, [(matrix, number) for number in range(len(places))])
        stream, ring, slot = HEADER, [], 0
        for i in range(cut.slots):  # fill
            ring.append((stream, length[4 * i]))
            stream += ring[i][1]
        for matrix, number, size in read(cut, layers, output, block, warp):
            at, asked = ring[slot]  # arrive
            assert asked == size + 16 <= PIECE
            assert held[at] == (matrix, number)
            ring[slot] = stream, length[at + size]  # leave
            stream += ring[slot][1]
            slot = (slot + 1) % cut.slots
        assert not any(size for _, size in ring)
        assert stream <= made.stride


@pytest.mark.parametrize("case", CASES)
def test_every_piece_is_packed_once(case):
    cut, layers, output = CASES[case]
    made, listed = plan(cut, layers, output), [piece for of in order(cut, layers, output) for piece in of]
    for matrix, places in enumerate(made.places):  # as the thread blocks that pack it count them
        assert sorted(number for m, number, *_ in listed if m == matrix) == list(range(len(places)))
    for l, forms in enumerate(layers):
        for i, rows in ((0, cut.H * cut.hd), (1, cut.G * cut.hd), (2, cut.G * cut.hd), (4, 32 * tall(cut.F))):
            assert len(made.places[6 * l + i]) == tall(rows) * (cut.chunks << forms[i])
    for places in (made.places, made.others):
        spans = sorted((int(places[m][number]), size + 16) for m, number, size, rows in listed
                       if places is made.places or not rows)  # fmt: skip
        assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= made.nbytes and all(at % 16 == 0 for at, _ in spans)


def test_a_block_has_room_for_its_ring():
    for cut, _, _ in CASES.values():
        assert cut.shared <= 227 * 1024 - 4096 and 4 * cut.slots <= HEADER
        assert cut.warps <= WARPS and CHUNK_K * cut.chunks * cut.warps >= cut.D
        assert GROUP == WARPS // 2


def test_blocks_have_their_share():
    """Of the matrices by rows, whose tiles are dealt, no block has much more than the mean."""
    cut = Cut(*SIZES["tinyllama"], 2, 128)
    found = [sum(size for matrix, _, size, _ in block if matrix < 12) for block in order(cut, FORMS["q4_k_m"], BYTES)]
    assert max(found) <= 1.1 * sum(found) / len(found)
