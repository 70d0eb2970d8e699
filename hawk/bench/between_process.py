"""How the prefill side of `hawk bench transfer --devices` asks the decode side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from hawk.errors import InternalError

if TYPE_CHECKING:
    from pathlib import Path


class Decode:
    """The decode side as the prefill side asks it."""

    async def ask(self, name: str, *arguments: object) -> Any:
        """What a method of `hawk.bench.between_far.Far` answers; raises `InternalError` with its error."""
        raise NotImplementedError

    async def open(self) -> None:
        """Starts it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends it."""
        raise NotImplementedError


class Process(Decode):
    """The decode side as a process of its own; `stand_in`: memory of the host stands in for its GPU."""

    def __init__(self, config: Path, number: int, *, stand_in: bool = False) -> None:
        self._arguments = [sys.executable, "-m", "hawk.bench.between_far", str(config), str(number)]
        self._arguments += ["stand-in"] * stand_in

    async def open(self) -> None:
        """See `Decode.open`."""
        self._process = await asyncio.to_thread(
            subprocess.Popen,
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # it ends with its standard input, and Ctrl-C on a terminal is for us alone
        )
        try:
            await self._answer()
        except BaseException:
            await self.close()
            raise

    async def ask(self, name: str, *arguments: object) -> Any:
        """See `Decode.ask`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of one that has ended there is no answer, which says so
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
        return await self._answer()

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            status = await asyncio.to_thread(self._process.wait)
            raise InternalError("the decode side has ended", got=f"status {status}")
        answer = json.loads(line)
        if "error" in answer:
            raise InternalError("the decode side failed", got=answer["error"])
        return answer["value"]

    async def close(self) -> None:
        """See `Decode.close`."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            await asyncio.to_thread(self._process.wait, 20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
