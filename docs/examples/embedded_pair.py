"""Both agents in one process: a cache goes from pages of (slot, head) into pages of (head, slot).

python docs/examples/embedded_pair.py
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import numpy as np

import hawk

PREFILL = """
[agent]
name = "p0"
role = "prefill"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/p0.sock"
insecure = true        # plain TCP on loopback; elsewhere an agent has keys
[arena]
size = "16MiB"
"""

DECODE = """
[agent]
name = "d0"
role = "decode"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/d0.sock"
insecure = true
[peers]
p0 = "{p0}"
"""

SOURCE = hawk.CacheSpec(layers=2, heads=4, dim=64, block_size=16, blocks=8, layout="vllm/nhd")
TARGET = SOURCE.replace(layout="vllm/hnd")
TOKENS, FROM, TO = 40, [5, 0, 3], [1, 2, 7]  # 40 tokens fill two blocks of 16, and half of a third


def agent(folder: Path, text: str, **values: object) -> hawk.Agent:
    """An agent from the text of its configuration."""
    file = folder / "node.toml"
    file.write_text(text.format(folder=folder, **values))
    config, _ = hawk.load_config(file)
    return hawk.Agent(config)


async def main() -> None:
    """Moves one request and compares every row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with agent(folder, PREFILL) as p0, agent(folder, DECODE, p0=p0.control_address) as d0:
            async with hawk.connect(p0) as prefill, hawk.connect(d0) as decode:
                source, target = hawk.KVCache.alloc(SOURCE), hawk.KVCache.alloc(TARGET)
                for buffer in source.buffers:
                    buffer[:] = np.random.default_rng(7).integers(0, 256, buffer.size, np.uint8)
                given, wanted = await prefill.register(source), await decode.register(target)

                ticket = str(await prefill.offer("req-1", given, FROM, tokens=TOKENS))
                ready = await decode.fetch(ticket, into=wanted, blocks=TO, timeout="10s")

                for out, into in zip(source.buffers, target.buffers, strict=True):
                    rows = out.view(np.uint16).reshape(2, 8, 16, 4, 64)[
                        :, FROM
                    ]  # K and V, block, slot, head, dim
                    got = into.view(np.uint16).reshape(2, 8, 4, 16, 64)[:, TO].transpose(0, 1, 3, 2, 4)
                    assert (
                        rows.reshape(2, 48, 4, 64)[:, :TOKENS] == got.reshape(2, 48, 4, 64)[:, :TOKENS]
                    ).all()
                print(f"{ready.tokens} tokens, {ready.nbytes} bytes by {ready.transport}: every row is right")


if __name__ == "__main__":
    asyncio.run(main())
