"""From a layout and a shape to the compiled form: what `Layout.compile` does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hawk.errors import LayoutError
from hawk.layouts.bounds import BYTES, MAX_ALIGN, MAX_CHANNELS, bounded, moved_error, short
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import AXES, CompiledLayout, CompiledPiece
from hawk.layouts.digits import MAX_ELEMENTS, Factor, Refiner, prove, strides
from hawk.layouts.grammar import Name, Term, evaluate, nearest
from hawk.layouts.renaming import (
    MAX_DIM,
    Tables,
    check_halves,
    names_in,
    parts_of,
    stored_name,
    without_empty,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.layouts.compiled import Axis, CacheShape, CodecInfo, Digit, Per, Run
    from hawk.layouts.declared import Piece, Sharding
    from hawk.layouts.layout import Layout


class Compiler:
    """Compiles one layout; see `Layout.compile`."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def compile(
        self,
        shape: CacheShape,
        codec: str | None,
        channels: int | None,
        align: int | None,
        params: Mapping[str, int],
    ) -> CompiledLayout:
        """The compiled form; `LayoutError` where there is none."""
        extents = self.extents(shape)
        info = self.codec(codec)
        channels = self._channels(channels)
        align = bounded(self.layout.align if align is None else align, MAX_ALIGN, self._where("align"), BYTES)
        values = self.values(params, shape)
        found = [
            self._piece(i, piece, shape, extents, values, channels)
            for i, piece in enumerate(self.layout.pieces)
        ]
        found = [(piece, pages) for piece, pages in found if piece.kvs]
        held = [kv for piece, _ in found for kv in piece.kvs]
        missing = set(range(shape.kvs)) - set(held)
        if missing:
            raise self._error(
                "no piece holds this value of kv",
                "piece",
                f"kv {', '.join(str(kv) for kv in sorted(held)) or 'none'}",
                f'where = "kv={min(missing)}"',
            )
        first, pages = found[0]
        for piece, others in found[1:]:
            self._agree(first, pages, piece, others)
        for piece, _ in found:
            self._groups(info, piece)
        buffers = 1
        for axis in self.layout.buffers:
            buffers *= extents[axis]
        if buffers * pages * first.elements > MAX_ELEMENTS:
            got = f"{buffers} buffers of {pages} pages of {first.elements} elements"
            raise self._error("the cache is too large", "shape", got, f"at most {MAX_ELEMENTS} elements")
        page_bytes = info.page_bytes(first.elements)
        scale = self._scale(info, shape, channels, align)
        if scale is not None and scale.pages != pages and self._inside:
            raise self._error(
                "scales lie behind other pages",
                "scale.order",
                f"{scale.pages} pages",
                f"{pages} pages",
                "The order of scales must have the digits of the elements' page number in front of its '|'",
            )
        stride = -(-(page_bytes + (scale.page_bytes if scale and self._inside else 0)) // align) * align
        if scale is not None and self._inside:
            scale = replace(scale, page_stride=stride, inset=page_bytes)
        if self.layout.scale is not None and self.layout.scale.place == "constant" and _scaled(info):
            info = replace(info, factor=self.layout.scale.value)
        return CompiledLayout(
            name=self.layout.name,
            shape=shape,
            codec=info,
            buffers=self.layout.buffers,
            pieces=tuple(piece for piece, _ in found),
            pages=pages,
            page_bytes=page_bytes,
            page_stride=stride,
            channels=channels,
            banks=self.layout.banks,
            scale=scale,
        )

    def extents(self, shape: CacheShape) -> dict[Axis, int]:
        """The extents of all axes; `LayoutError` where one is beyond all measure."""
        extents: dict[Axis, int] = {axis: shape.extent(axis) for axis in AXES}
        for axis, extent in extents.items():
            if extent > MAX_ELEMENTS:
                raise self._error("too large", f"shape.{axis}", short(extent), f"at most {MAX_ELEMENTS}")
        return extents

    def _where(self, key: str) -> str:
        return f"{self.layout.name}: {key}"

    def _error(
        self, message: str, key: str, got: object, expected: object, hint: str | None = None
    ) -> LayoutError:
        return LayoutError(message, field=self._where(key), got=got, expected=expected, hint=hint)

    def codec(self, codec: str | None) -> CodecInfo:
        """The codec of that name, or the layout's default; `LayoutError` where the layout does not hold it."""
        name = self.layout.codec if codec is None else codec
        if name not in self.layout.codecs:
            raise self._error(
                "this layout does not hold this codec",
                "codec",
                short(name),
                ", ".join(self.layout.codecs),
                None if name in CODECS else nearest(str(name), self.layout.codecs),
            )
        return CODECS[name]

    def _channels(self, channels: int | None) -> int:
        if channels is None:
            return self.layout.channels
        bounded(channels, MAX_CHANNELS, self._where("channels"))
        if self.layout.placement == "linear" and channels != 1:
            raise self._error("a linear layout has one channel", "channels", channels, 1)
        if self.layout.banks and channels != len(self.layout.banks):
            raise self._error("not one channel a bank", "channels", channels, len(self.layout.banks))
        return channels

    def values(self, given: Mapping[str, int], shape: CacheShape) -> dict[str, int]:
        """The parameters' values; `LayoutError` where one is unknown or out of range."""
        known = dict(self.layout.params)
        for name in given:
            if name not in known:
                raise self._error(
                    "unknown parameter",
                    f"params.{short(name)}",
                    given[name],
                    ", ".join(known) or "no parameters",
                    nearest(name, known),
                )
        values = {}
        for name, default in known.items():
            limit = shape.extent(default) if isinstance(default, str) else MAX_ELEMENTS
            values[name] = bounded(
                given.get(name, limit if isinstance(default, str) else default),
                limit,
                self._where(f"params.{name}"),
            )
        return values

    def _piece(
        self,
        number: int,
        piece: Piece,
        shape: CacheShape,
        extents: Mapping[Axis, int],
        values: Mapping[str, int],
        channels: int,
    ) -> tuple[CompiledPiece, int]:
        key = self._where(f"piece[{number}]")
        whole = [name for name, default in self.layout.params if default == "dim"]
        check_halves(piece, [n for n in whole if values[n] != extents["dim"]], values, f"{key}.rename")
        (page, inside), stored = self._factors(piece, extents, values, key)
        if self.layout.sharding is not None:
            page = self._sharded(self.layout.sharding, page, extents, values, channels)
        padded = prove([*page, *inside], extents, self.layout.buffers, f"{key}.order")
        page_digits, pages = strides(page, f"{key}.order")
        inside_digits, elements = strides(inside, f"{key}.order")
        kvs = tuple(kv for kv in range(shape.kvs) if piece.kv in (None, kv))
        return CompiledPiece(kvs, page_digits, inside_digits, elements, padded, stored), pages

    def _factors(
        self, piece: Piece, extents: Mapping[Axis, int], values: Mapping[str, int], key: str
    ) -> tuple[tuple[list[Factor], list[Factor]], tuple[Run, ...]]:
        """Factors of page and inside; and where dims are stored, where their renames are no digits of dim."""
        parts = parts_of(piece.splits, extents["dim"], values, f"{key}.split")
        renames = [(name, without_empty(terms, parts)) for name, terms in piece.renames]
        refiner = Refiner(extents, values, f"{key}.order")
        # What is only a part of dim has no digits of dim.
        exact = all(part.size in (0, extents["dim"]) for part in parts.values())
        first: LayoutError | None = None
        if exact:
            try:
                for name, part in parts.items():
                    if part.size:
                        refiner.name(name, [Factor("dim", 1, part.size)], f"{key}.split")
                for name, left in renames:
                    if len(left) != 1:
                        got = f"{len(left)} terms with indices in {name!r}"
                        raise LayoutError("a sum is of parts", field=f"{key}.rename", got=got, expected=1)
                    refiner.rename(name, left[0], f"{key}.rename")
                return refiner.order(piece.order), ()
            except LayoutError as error:
                first = error
        written = stored_name(piece.order, [name for name, _ in renames], parts)
        if written is None:
            raise first or LayoutError(
                "where dim is split, the order names one rename that holds all its parts",
                field=f"{key}.order",
                got=piece.text,
                expected="m, for instance, with a rename 'm = one + other'",
            )
        if extents["dim"] > MAX_DIM:
            raise first or LayoutError(
                "too large for parts", field="dim", got=extents["dim"], expected=f"at most {MAX_DIM}"
            )
        try:
            tables = Tables(extents["dim"], parts, values)
            for new, left in renames:
                tables.rename(new, left, f"{key}.rename")
            runs = tables.runs(written, f"{key}.rename")
            refiner = Refiner(extents, values, f"{key}.order")
            refiner.name(written, [Factor("dim", 1, extents["dim"], open=True)], f"{key}.rename")
            return refiner.order(piece.order), runs
        except LayoutError as error:
            raise first or error from None

    @property
    def _inside(self) -> bool:
        return self.layout.scale is not None and self.layout.scale.place == "page"

    def _scale(self, info: CodecInfo, shape: CacheShape, channels: int, align: int) -> CompiledLayout | None:
        """The tensor of scales, where elements of this codec have one."""
        scale = self.layout.scale
        if scale is None or scale.order is None or not _scaled(info):
            return None
        if self.layout.sharding is not None:
            raise self._error("scales beside shards are not described", "scale", scale.place, "constant")
        axes = names_in([*scale.order.page, *scale.order.inside])
        per: Per = "token" if "slot" in axes else "block" if "block" in axes else "cache"
        if per == "token" and "block" not in axes:
            raise self._error("a slot's scale is one of a block", "scale.order", scale.text, "block in it")
        buffers = self.layout.buffers if scale.buffers is None else scale.buffers
        groups = 1
        if "dim" in axes:
            if shape.dim % scale.group:
                raise self._error(
                    "the groups do not fill a head", "scale.group", scale.group, f"a factor of {shape.dim}"
                )
            groups = shape.dim // scale.group
        # One scale for all indices of an axis: an extent of 1, which has a place anywhere.  Where the order has no
        # '|', what is in front of the others is of the page's number.
        front, back = (
            tuple(Term(Name(a, 1), (), a, 1) for a in names if a not in axes)
            for names in (("block", "slot"), ("head", "dim"))
        )
        order = scale.order
        order = (
            replace(order, page=(*front, *order.page), inside=(*order.inside, *back))
            if order.cut
            else replace(order, page=(*front, *order.page, *back))
        )
        tensor = replace(
            self.layout,
            name=f"{self.layout.name} scales",
            codec=scale.codec,
            codecs=(scale.codec,),
            buffers=buffers,
            params=(),
            scale=None,
            pieces=(
                replace(self.layout.pieces[0], kv=None, order=order, splits=(), renames=(), text=scale.text),
            ),
        )
        box = replace(
            shape,
            heads=shape.heads if "head" in axes else 1,
            dim=groups,
            block_size=shape.block_size if per == "token" else 1,
            blocks=1 if per == "cache" else shape.blocks,
        )
        try:
            compiled = Compiler(tensor).compile(box, None, channels if channels > 1 else None, align, {})
        except LayoutError as error:
            error = moved_error(error, f"{tensor.name}: piece[0].", self._where("scale."))
            raise moved_error(error, f"{tensor.name}: ", self._where("scale.")) from None
        return replace(compiled, per=per, of_scales=True)

    def _sharded(
        self,
        sharding: Sharding,
        page: Sequence[Factor],
        extents: Mapping[Axis, int],
        values: Mapping[str, int],
        channels: int,
    ) -> list[Factor]:
        """The page's factors in an order in which dealing page by page is dealing shard by shard.

        Page i lies in channel `i % channels`, so the digit of the bank becomes the least significant one; above it
        are the digits inside a shard, above these those of a bank's second shard, third and so on.
        """
        where = self._where("placement.shard")
        refiner, term = Refiner(extents, values, where), Term(Name("shard", 1), (), "shard", 1)
        rows, columns = (evaluate(e, values, where) for e in (sharding.rows, sharding.columns))
        wide = len(page)
        while wide and page[wide - 1].axis == "dim":
            wide -= 1
        down, down_in = refiner.cut(list(page[:wide]), rows, term)
        across, across_in = refiner.cut(list(page[wide:]), columns, term)
        shards = [*across, *down] if sharding.down else [*down, *across]
        later, bank = refiner.cut(shards, channels, term)
        return [*later, *down_in, *across_in, *bank]

    def _agree(self, first: CompiledPiece, pages: int, other: CompiledPiece, others: int) -> None:
        """Pieces share a buffer's page numbers, or its description: they must not overlap or leave gaps."""
        for what, a, b in (("pages", pages, others), ("elements per page", first.elements, other.elements)):
            if a != b:
                raise self._error(f"the pieces differ in {what}", "piece", f"{a} and {b}", "the same number")
        if "kv" not in self.layout.buffers:
            # The pages with kv = k are those whose number has the digit k there: the same digit in every piece.
            # Where K and V share pages, the positions with kv = k.
            ours, theirs = ([d for d in p.page if d.axis == "kv"] for p in (first, other))
            if ours == theirs:
                ours, theirs = ([d for d in p.inside if d.axis == "kv"] for p in (first, other))
                if ours == theirs and ours and _rows_of_pages(first) != _rows_of_pages(other):
                    raise self._error(
                        "K and V share pages that hold other blocks, tokens or heads of the one than of the other",
                        "piece",
                        "other digits before '|'",
                        "the same digits there, but those of dim",
                    )
            if ours != theirs:
                raise self._error(
                    "kv lies at different digits in two pieces, so they overlap",
                    "piece",
                    f"{_strides(ours)} and {_strides(theirs)}",
                    "the same stride",
                )

    def _groups(self, info: CodecInfo, piece: CompiledPiece) -> None:
        if piece.elements * info.bits % 8:
            raise self._error(
                "a page is no whole number of bytes",
                "codec",
                f"{piece.elements} elements of {info.bits} bits",
                "a multiple of 8 bits",
            )
        left = info.group
        for digit in reversed(piece.inside):
            if left == 1:
                break
            if digit.axis != "dim" or (digit.ext % left and left % digit.ext):
                factor = Factor(digit.axis, digit.div, digit.ext)
                raise self._error(
                    f"the {info.group} elements that share an exponent are not of one row of dim",
                    "codec",
                    f"{info.name} over {factor}",
                    f"dim digits of {info.group} elements at the end of the order",
                )
            left = max(1, left // digit.ext)
        if left > 1:
            raise self._error(
                "a page is smaller than a group of the codec",
                "codec",
                f"{info.name} over {piece.elements} elements",
                f"{info.group} elements",
            )


def _scaled(info: CodecInfo) -> bool:
    """Whether elements of this codec are multiplied by a scale that the layout speaks of."""
    return info.bits == 8 and info.group == 1


def _rows_of_pages(piece: CompiledPiece) -> list[Digit]:
    """The digits of a page's number that tell which rows it holds."""
    return [d for d in piece.page if d.axis != "dim" and d.ext > 1]


def _strides(digits: Sequence[Digit]) -> str:
    return " ".join(f"{d.axis}/{d.div}%{d.ext} at stride {d.stride}" for d in digits) or "none"
