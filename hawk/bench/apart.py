"""An agent in a process of its own that retiles from the memory of the engine's GPU, mapped by CUDA IPC.

`Apart` is the engine's end; this module run as a program is the other: it opens the memory and the events that its
first line of input names, has an agent in itself, offers the cache when told to, and says of layers that they will be
written behind those events.  Its kernels are another process': without MPS the GPU does not run both at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hawk.agent import Agent
from hawk.cache import KVCache
from hawk.client import connect
from hawk.config import load_config
from hawk.demo import scenario
from hawk.errors import InternalError
from hawk.memory.cuda import device
from hawk.memory.cuda_share import Exported, Imported, export

if TYPE_CHECKING:
    from hawk.demo.scenario import Scenario

_TTL = 120.0


class Apart:
    """The process, started with the agent's config file; `memory` is one allocation that holds all buffers."""

    def __init__(self, config: Path, gpu: int, scene: Scenario, memory: Any, events: list[Any]) -> None:
        exported = export(device(gpu), int(memory.data.ptr), int(memory.nbytes))
        told = {
            "config": str(config),
            "gpu": gpu,
            "tokens": scene.tokens,
            "memory": asdict(exported) | {"handle": exported.handle.hex(), "fds": ()},
            "events": [bytes(event.ipc_handle()).hex() for event in events],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hawk.bench.apart"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._say(json.dumps(told))

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")

    def _heard(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise InternalError("the agent's process has ended", got=self._process.wait())
        return line.strip()

    async def ready(self) -> None:
        """Waits until the agent answers and has taken the cache."""
        await asyncio.to_thread(self._heard)

    async def offer(self, name: str) -> str:
        """The ticket of a new offer, of which no layer is ready."""
        self._say(f"offer {name}")
        return await asyncio.to_thread(self._heard)

    def layers_ready(self, layers: int) -> None:
        """So many layers are written once the event of the last of them is reached; from any thread."""
        self._say(f"ready {layers}")

    async def ended(self) -> None:
        """Waits until the offer has ended."""
        self._say("ended")
        await asyncio.to_thread(self._heard)

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait()


class _Array:
    """Some bytes of memory of a GPU, for whoever knows `__cuda_array_interface__`."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
        }


async def _main() -> None:
    # What else is written in this process, logs say, goes elsewhere than the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    told = json.loads(await lines.readline())
    torch: Any = import_module("torch")
    gpu = int(told["gpu"])
    there = torch.device("cuda", gpu)
    torch.cuda.set_device(there)
    given = told["memory"] | {"handle": bytes.fromhex(told["memory"]["handle"])}
    given["sizes"], given["fds"] = tuple(given["sizes"]), tuple(given["fds"])
    events = [torch.cuda.Event.from_ipc_handle(there, bytes.fromhex(one)) for one in told["events"]]
    memory = Imported(device(gpu), Exported(**given))
    scene = scenario.load(told["tokens"])
    each = memory.nbytes // scene.source.layers
    arrays = [_Array(memory.address + i * each, each) for i in range(scene.source.layers)]
    config, _ = load_config(Path(told["config"]), env={})
    async with Agent(config) as agent, connect(agent) as client:
        source = await client.register(KVCache.from_cuda(arrays, scene.source))
        blocks = scene.source_blocks()
        print("ready", file=out)
        while line := (await lines.readline()).decode().split():
            if line[0] == "offer":
                offer = await client.offer(
                    line[1], source, blocks, tokens=scene.tokens, ttl=_TTL, layers_ready=0
                )
                print(offer.ticket, file=out)
            elif line[0] == "ready":
                await offer.layers_ready(int(line[1]), after=events[int(line[1]) - 1])
            else:
                print(await offer.ended(), file=out)
        await source.release()
    memory.close()
    out.close()


if __name__ == "__main__":
    asyncio.run(_main())
