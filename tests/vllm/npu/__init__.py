"""A platform plug-in for vLLM whose device is an emulated NPU: it computes on the CPU, and its cache is in tiles.

    device.py      the channels, and the function that HAWK's connector has the cache from
    tiles.py       rows of tokens in and out of tiles, in numpy, with nothing of HAWK's
    attention.py   the attention backend: reads and writes tiles, never vLLM's page tensor
    platform.py    vLLM's own platform for CPUs, with that backend

vLLM finds it by the entry point that `conftest.py` writes, as it finds any platform that is not its own.
"""


def plug_in() -> str:
    """The platform's name, for vLLM."""
    return "tests.vllm.npu.platform.NpuPlatform"
