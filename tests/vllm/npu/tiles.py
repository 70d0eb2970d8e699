"""K or V of one layer as the device sees it: 32 x 32 tiles that go round the memory channels.

Page i is in channel i % C, slot i // C; tile (r, c) of block b and head h is page
((b * heads + h) * down + r) * across + c.
What is inside a tile is `tests.reference.tenstorrent`, which shares nothing with HAWK's layouts either.
"""

from __future__ import annotations

import numpy as np

from tests.reference import tenstorrent as ref

ALIGN = 64


class Tiles:
    """`[blocks, heads, block_size, dim]` in the banks `uint8[bytes]`, each from the tensor's address on.

    rotary    the dims are in Meta's order: this is K
    made      as if the device were made otherwise, for reads and writes alike: with two of its `"channels"` in place of
              each other, or with the two middle `"faces"` of each tile; `""` is as it is
    """

    def __init__(
        self, banks: list[np.ndarray], shape: tuple[int, int, int, int], codec: str, *, rotary: bool
    ) -> None:
        self.shape, self.codec, self.rotary = shape, codec, rotary
        self.page = ref.PAGE_BYTES[codec]
        stride = -(-self.page // ALIGN) * ALIGN
        self.banks = [
            bank[: len(bank) // stride * stride].reshape(-1, stride)[:, : self.page] for bank in banks
        ]
        self.made = ""

    def _pages(self, blocks: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The pages of tile rows `rows[i]` of `blocks[i]`, `[n, heads, across]`."""
        _, heads, size, dim = self.shape
        down, across = size // ref.TILE, dim // ref.TILE
        first = (blocks[:, None] * heads + np.arange(heads)) * down + rows[:, None]
        return np.asarray(first[:, :, None] * across + np.arange(across))

    def _channels(self) -> list[np.ndarray]:
        if self.made != "channels":
            return self.banks
        first, second, *rest = self.banks
        return [second, first, *rest]

    def _load(self, pages: np.ndarray) -> np.ndarray:
        flat = pages.ravel()
        raw = np.empty((len(flat), self.page), np.uint8)
        for number, bank in enumerate(self._channels()):
            here = flat % len(self.banks) == number
            raw[here] = bank[flat[here] // len(self.banks)]
        return raw

    def _store(self, pages: np.ndarray, raw: np.ndarray) -> None:
        flat = pages.ravel()
        for number, bank in enumerate(self._channels()):
            here = flat % len(self.banks) == number
            bank[flat[here] // len(self.banks)] = raw[here]

    def _values(self, pages: np.ndarray) -> np.ndarray:
        """`float32[n, heads, 32, dim]` of pages `[n, heads, across]`."""
        shape = (len(pages), self.shape[1], ref.TILE, self.shape[3])
        bits = ref.unpages(self._turn(self._load(pages)), self.codec, shape, self.rotary)
        return np.ascontiguousarray(bits).view(np.float32)

    def _turn(self, raw: np.ndarray) -> np.ndarray:
        if self.made != "faces":
            return raw
        exponents = 64 if self.codec == "bfp8_b" else 0
        parts = [
            part.reshape(len(raw), 4, part.shape[1] // 4)[:, [0, 2, 1, 3]].reshape(part.shape)
            for part in (raw[:, :exponents], raw[:, exponents:])
        ]
        return np.concatenate(parts, axis=1)

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """All rows of these blocks, `float32[tokens, heads, dim]`."""
        down = self.shape[2] // ref.TILE
        values = self._values(self._pages(np.repeat(blocks, down), np.tile(np.arange(down), len(blocks))))
        return np.asarray(values.transpose(0, 2, 1, 3).reshape(-1, self.shape[1], self.shape[3]))

    def write(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Rows `float32[n, heads, dim]` to slots block * block_size + i: each tile they touch is read, and made anew.

        In block floats a row shares its exponents with nobody but itself, so those that were there stay as they are.
        """
        units, where = np.unique(slots // ref.TILE, return_inverse=True)
        pages = self._pages(*np.divmod(units, self.shape[2] // ref.TILE))
        values = self._values(pages)
        values[where, :, slots % ref.TILE] = rows
        raw = ref.pages(values.view(np.uint32), self.codec, self.rotary)
        self._store(pages, self._turn(raw))
