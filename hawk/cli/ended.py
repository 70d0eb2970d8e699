"""SIGTERM that ends a command as Ctrl-C does: what it has opened is closed, and what it has begun is put away."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

STATUS = 128 + signal.SIGTERM
"""Of a command that SIGTERM has ended, as shells have it."""


class Terminated(click.ClickException):
    """A command was told to end."""

    exit_code = STATUS

    def __init__(self) -> None:
        super().__init__("terminated")

    def show(self, file: Any = None) -> None:
        """On stderr, as other ends are told."""
        click.echo(f"hawk: {self.message}", file=file, err=file is None)


@contextmanager
def put_away() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated`, once everything below has been left as by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    told = False

    def end(number: int, frame: Any) -> None:
        nonlocal told
        told = True
        # An event loop that runs has a handler of its own for Ctrl-C, which calls its task off; the second time, and
        # where Ctrl-C is ignored, as in a shell's background, this is the end at once.
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if told:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
