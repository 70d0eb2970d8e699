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


def elements(layout, channel, page):
    """fp32 bits of one page, its place given."""
    raw = channel[page : page + layout.page_bytes]
    return codecs.decode(layout.codec, raw[None], layout.piece(0).elements)[0]


def expected(program, pieces, src_layout, dst_layout, src, dst):
    """What the target's channels hold afterwards: page by page, element by element."""
    out = [d.copy() for d in dst]
    a, b = program.src_codec, program.dst_codec
    same = a.name == b.name
    n_src, n_dst, group = program.src_elements, program.dst_elements, b.group
    decoded = {}
    for i in range(len(pieces)):
        p = {name: int(getattr(pieces, name)[i]) for name in COLUMNS}
        todo = {}
        for steps in product(*(range(loop.ext) for loop in program.loops)):
            at = [
                sum(x * getattr(loop, f) for x, loop in zip(steps, program.loops, strict=True))
                for f in ("src", "dst", "row", "col")
            ]
            if at[2] < p["lo"]:
                continue
            valid = at[2] < p["hi"] and at[3] < p["cols"]
            todo[p["dst_start"] + at[1]] = p["src_start"] + at[0] if valid else None
        key = (p["src_channel"], p["src_page"])
        if any(v is not None for v in todo.values()):
            raw = src[key[0]][key[1] : key[1] + a.page_bytes(n_src)]
            if key not in decoded:
                decoded[key] = codecs.decode(a, raw[None], n_src)[0]
            bits = decoded[key]
        page = out[p["dst_channel"]][p["dst_page"] : p["dst_page"] + b.page_bytes(n_dst)]
        if group == 1:
            w = b.bits // 8
            for d, s in todo.items():
                if s is None:
                    page[d * w : d * w + w] = 0
                elif same:
                    page[d * w : d * w + w] = raw[s * w : s * w + w]
                else:
                    page[d * w : d * w + w] = codecs.encode(b, bits[s : s + 1][None])[0]
            continue
        head_in, head_out, per = a.header_bytes(n_src), b.header_bytes(n_dst), group * b.bits // 8
        for g in sorted({d // group for d in todo}):
            froms = [todo[g * group + k] for k in range(group)]
            whole = all(s is not None for s in froms) and froms == list(range(froms[0], froms[0] + group))
            body = slice(head_out + g * per, head_out + g * per + per)
            if same and whole and froms[0] % group == 0:
                page[g] = raw[froms[0] // group]
                page[body] = raw[head_in + froms[0] // group * per :][:per]
            else:
                values = np.array([0 if s is None else bits[s] for s in froms], np.uint32)
                code = codecs.encode(b, values[None])[0]
                page[g], page[body] = code[0], code[1:]
    return out
