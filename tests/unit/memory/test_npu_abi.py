"""The Python mirror of the module's header says what the header says."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from hawk.memory import npu_abi

HEADER = (Path(__file__).resolve().parents[3] / "kmod" / "hawk_npu.h").read_text()
CODE = re.sub(r"/\*.*?\*/", " ", HEADER, flags=re.DOTALL)
C_TYPES = {"__u32": ctypes.c_uint32, "__u64": ctypes.c_uint64, "__s32": ctypes.c_int32}
STRUCTS = {
    name: re.findall(r"(\w+)\s+(\w+);", body)
    for name, body in re.findall(r"struct hawk_npu_(\w+) \{(.*?)\};", CODE, re.DOTALL)
}
DEFINES = dict(re.findall(r"^#define[ \t]+HAWK_NPU_(\w+)[ \t]+(\S.*?)[ \t]*$", CODE, re.MULTILINE))
IOCTLS = {
    name: re.fullmatch(r"_(IO|IOR|IOW|IOWR)\(HAWK_NPU_IOC_MAGIC, (\w+), struct hawk_npu_(\w+)\)", text)
    for name, text in DEFINES.items()
    if text.startswith("_IO")
}
DIRECTION = {"IO": 0, "IOW": 1, "IOR": 2, "IOWR": 3}


def mirrored(struct: str) -> type[ctypes.Structure]:
    found = getattr(npu_abi, struct.title())
    assert issubclass(found, ctypes.Structure)
    return found


def test_the_header_was_understood() -> None:
    assert len(STRUCTS) == 6
    assert len(IOCTLS) == 8
    assert all(IOCTLS.values())


@pytest.mark.parametrize("struct", STRUCTS)
def test_structures(struct: str) -> None:
    class Expected(ctypes.Structure):
        _fields_ = [(name, C_TYPES[kind]) for kind, name in STRUCTS[struct]]

    mirror = mirrored(struct)
    assert list(mirror._fields_) == list(Expected._fields_)
    assert ctypes.sizeof(mirror) == ctypes.sizeof(Expected)
    # No holes, and nothing that a 32-bit program would lay out otherwise.
    assert ctypes.sizeof(mirror) == sum(ctypes.sizeof(kind) for _, kind in Expected._fields_)
    assert all(getattr(mirror, name).offset % ctypes.sizeof(kind) == 0 for name, kind in mirror._fields_)
    assert ctypes.sizeof(mirror) % 8 == 0
    assert set(mirror.__annotations__) - {"_fields_"} == {name for name, _ in mirror._fields_}


def test_every_structure_is_in_the_header() -> None:
    mirrors = {
        name.lower()
        for name, value in vars(npu_abi).items()
        if isinstance(value, type) and name[0] != "_"
        if issubclass(value, ctypes.Structure)
    }
    assert mirrors == set(STRUCTS)


@pytest.mark.parametrize("name", [name for name, text in DEFINES.items() if not text.startswith("_IO")])
def test_numbers(name: str) -> None:
    assert getattr(npu_abi, name) == int(DEFINES[name], 0)


@pytest.mark.parametrize("name", IOCTLS)
def test_ioctls(name: str) -> None:
    found = IOCTLS[name]
    assert found is not None
    direction, number, struct = found.groups()
    size = ctypes.sizeof(mirrored(struct))
    assert getattr(npu_abi, name) == DIRECTION[direction] << 30 | size << 16 | 0xB7 << 8 | int(number, 0)
    assert size < 1 << 14


def test_nothing_else_is_in_the_mirror() -> None:
    numbers = {
        name for name, value in vars(npu_abi).items() if isinstance(value, int) and not name.startswith("_")
    }
    assert numbers == set(DEFINES)
