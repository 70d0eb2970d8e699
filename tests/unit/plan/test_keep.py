"""What is kept is bounded in number and in bytes."""

from __future__ import annotations

import numpy as np

from hawk.plan import keep
from hawk.plan.keep import kept


def test_the_last_results_are_kept_and_large_ones_are_not():
    made = []

    @kept(2, lambda a: a.nbytes)
    def make(n, fill=0):
        made.append(n)
        return np.full(n, fill, np.uint8)

    first = make(3)
    assert make(3) is first
    assert make(3, fill=1) is not first
    assert make(3, fill=1)[0] == 1
    make(4)
    assert make(3) is not first
    assert made == [3, 3, 4, 3]
    large = keep.MOST_BYTES + 1
    assert make(large) is not make(large)
    make.cache_clear()
    make(4)
    assert made == [3, 3, 4, 3, large, large, 4]
