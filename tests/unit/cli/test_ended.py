"""SIGTERM puts away what a command has opened, as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
import uvloop

from hawk.cli.ended import STATUS, Terminated, put_away


def _plainly(done: list[str]) -> None:
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        done.append("put away")


def _in_a_loop(done: list[str]) -> None:
    async def main() -> None:
        try:
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # the loop runs on for those that put away
            done.append("put away")

    uvloop.run(main())


@pytest.mark.parametrize("work", [_plainly, _in_a_loop])
@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])
def test_what_was_opened_is_put_away(work: Callable[[list[str]], None], interrupt: signal._HANDLER) -> None:
    done: list[str] = []
    before = signal.signal(signal.SIGINT, interrupt)
    term = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Terminated) as caught, put_away():
            work(done)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["put away"]
    assert caught.value.exit_code == STATUS == 143
    assert signal.getsignal(signal.SIGTERM) is term


def test_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), put_away():
        raise KeyboardInterrupt
