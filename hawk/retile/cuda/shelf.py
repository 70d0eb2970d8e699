"""What was worked out for pieces, kept for those who come with the same: chunks of a job differ in the layer alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    room: tuple[int, ...]
    value: T
    held: object


class Shelf(Generic[T]):
    """Values by keys that name objects by their ids; the latest of them, from any thread."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._kept: dict[tuple[int, ...], _Kept[T]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: tuple[int, ...], room: list[int]) -> T | None:
        """The value of that key, where there is at least as much room as when it was checked, in every channel."""
        kept = self._kept.get(key)
        if kept is None or len(room) != len(kept.room):
            return None
        return kept.value if all(a >= b for a, b in zip(room, kept.room, strict=True)) else None

    def keep(self, key: tuple[int, ...], room: list[int], value: T, held: object) -> None:
        """Keeps a value; `held` are the objects that the key names, so that no others get their ids."""
        self._kept.pop(key, None)
        self._kept[key] = _Kept(tuple(room), value, held)
        for old in list(self._kept)[: -self._most]:
            self._kept.pop(old, None)
