"""How many descriptors this process has open."""

from __future__ import annotations

from collections.abc import Mapping

from hawk.transports.testing import descriptors


class Count(int):
    """A number of descriptors that shows, where pytest prints it, what they are."""

    what: Mapping[int, str]

    def __repr__(self) -> str:
        return f"{int(self)} descriptors {dict(sorted(self.what.items()))}"


def fds() -> Count:
    """Open descriptors, once all that nobody refers to is gone: what another test left behind must not go meanwhile."""
    what = descriptors()
    count = Count(len(what))
    count.what = what
    return count
