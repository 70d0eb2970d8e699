"""Pieces and caches for the tests: small, slow loops over the documented sums, element by element."""

from __future__ import annotations

from itertools import product

import numpy as np

from hawk.layouts import codecs
from hawk.retile.program import Pieces

COLUMNS = ("src_channel", "src_page", "src_start", "dst_channel", "dst_page", "dst_start", "lo", "hi", "cols")


def term(digits, axis, index):
    return sum(index // d.div % d.ext * d.stride for d in digits if d.axis == axis)


def place(layout, kv, layer, head, block, slot, dim):
    """(channel, page's byte offset, position) within the buffer of (layer, kv); padding indices allowed."""
    piece = layout.piece(kv)
    index = {"layer": layer, "kv": kv, "head": head, "block": block, "slot": slot, "dim": dim}
    page = sum(term(piece.page, axis, i) for axis, i in index.items() if axis not in layout.buffers)
    inside = sum(term(piece.inside, axis, i) for axis, i in index.items())
    return page % layout.channels, page // layout.channels * layout.page_stride, inside


def pieces_of(program, src, dst, kv, layer, src_blocks, dst_blocks, token, tokens):
    """One row a piece for tokens [token, token + tokens) of a request, target blocks touched filled with zeros."""
    rows, size_in, size_out = program.rows, src.shape.block_size, dst.shape.block_size
    table = []
    for entry in range(token // size_out, -(-(token + tokens) // size_out)):
        for slot, head, dim in product(program.slots.tolist(), program.heads.tolist(), program.dims.tolist()):
            first = entry * size_out + slot
            lo, hi = max(0, token - first), min(rows, token + tokens - first)
            if slot >= size_out or head >= src.shape.heads:
                lo, hi = 0, 0  # padding
            elif hi <= lo and first < token:
                continue  # neighbours
            hi = max(hi, 0)
            cols = max(0, src.shape.dim - dim)
            s = (0, 0, 0)
            if hi and cols:
                s = place(src, kv, layer, head, src_blocks[first // size_in], first % size_in, dim)
            d = place(dst, kv, layer, head, dst_blocks[entry], slot, dim)
            table.append((*s, *d, min(lo, rows), hi, cols))
    columns = np.array(table, np.int64).reshape(-1, 9).T
    return Pieces(**dict(zip(COLUMNS, (np.ascontiguousarray(c) for c in columns), strict=True)))


def buffers(layout, fill=None, rng=None):
    """The channels of one buffer."""
    if rng is not None:
        return [rng.integers(0, 256, layout.channel_bytes, np.uint8) for _ in range(layout.channels)]
    return [np.full(layout.channel_bytes, fill, np.uint8) for _ in range(layout.channels)]


def steps(program):
    """Per element of a piece, in the loops' order: source offset, target offset, row, col."""
    found = [
        [
            sum(x * getattr(loop, f) for x, loop in zip(at, program.loops, strict=True))
            for f in ("src", "dst", "row", "col")
        ]
        for at in product(*(range(loop.ext) for loop in program.loops))
    ]
    return np.array(found, np.int64).reshape(-1, 4).T


def expected(program, pieces, src, dst):
    """What the target's channels hold afterwards, piece by piece and group by group, with `codecs` alone."""
    out = [d.copy() for d in dst]
    a, b = program.src_codec, program.dst_codec
    n_src, n_dst, same = program.src_elements, program.dst_elements, a.name == b.name
    s_at, d_at, row, col = steps(program)
    decoded = {}
    for i in range(len(pieces)):
        p = {name: int(getattr(pieces, name)[i]) for name in COLUMNS}
        s, d = p["src_start"] + s_at, p["dst_start"] + d_at
        touched, valid = row >= p["lo"], (row < p["hi"]) & (col < p["cols"])
        raw, bits = np.zeros(a.page_bytes(n_src), np.uint8), np.zeros(n_src, np.uint32)
        if (touched & valid).any():
            key = (p["src_channel"], p["src_page"])
            raw = src[key[0]][key[1] : key[1] + a.page_bytes(n_src)]
            if key not in decoded:
                decoded[key] = codecs.decode(a, raw[None], n_src)[0]
            bits = decoded[key]
        page = out[p["dst_channel"]][p["dst_page"] : p["dst_page"] + b.page_bytes(n_dst)]
        s = np.where(touched & valid, s, 0)
        values = np.where(valid, bits[s], 0).astype(np.uint32)
        if b.group == 1:
            w = b.bits // 8
            code = codecs.encode(b, values[None])[0].reshape(-1, w)
            if same:
                code = np.where(valid[:, None], raw.reshape(-1, w)[s], 0)
            page.reshape(-1, w)[d[touched]] = code[touched]
            continue
        order = np.argsort(d, kind="stable")
        encoded = codecs.encode(b, values[order][None])[0]
        n = b.group
        head_in, head_out, per = a.header_bytes(n_src), b.header_bytes(n_dst), n * b.bits // 8
        for g in range(len(d) // n):
            members = order[g * n : g * n + n]
            if not touched[members[0]]:
                continue
            to, first = d[members[0]] // n, s[members[0]]
            body = encoded[len(d) // n + g * per :][:per]
            scale = encoded[g]
            alike = valid[members].all() and s[members].tolist() == list(range(first, first + n))
            if same and alike and first % n == 0:
                scale, body = raw[first // n], raw[head_in + first // n * per :][:per]
            page[to], page[head_out + to * per : head_out + to * per + per] = scale, body
    return out
