"""What `/dev/hawk_npuN` is told: `kmod/hawk_npu.h`, in Python.  A test compares the two, field by field."""

from __future__ import annotations

import ctypes
from typing import ClassVar

ABI_VERSION = 1
MAX_CHANNELS = 64
MAP_SHIFT = 40
CHECKSUM_MAX = 0x4000000

EMULATED = 1
BAR = 2
DMABUF = 3

CAN_EXPORT = 0x1
HAS_PAGES = 0x2
PEER_CLIENT = 0x4
PEER_REVOKES = 0x8

U32 = ctypes.c_uint32
U64 = ctypes.c_uint64
S32 = ctypes.c_int32


class Info(ctypes.Structure):
    """`struct hawk_npu_info`."""

    _fields_: ClassVar = [
        ("abi_version", U32),
        ("provider", U32),
        ("channels", U32),
        ("flags", U32),
        ("channel_bytes", U64),
        ("page_bytes", U64),
    ]
    abi_version: int
    provider: int
    channels: int
    flags: int
    channel_bytes: int
    page_bytes: int


class Channel(ctypes.Structure):
    """`struct hawk_npu_channel`."""

    _fields_: ClassVar = [("channel", U32), ("flags", U32)]
    channel: int
    flags: int


class Range(ctypes.Structure):
    """`struct hawk_npu_range`."""

    _fields_: ClassVar = [("channel", U32), ("flags", U32), ("offset", U64), ("nbytes", U64)]
    channel: int
    flags: int
    offset: int
    nbytes: int


class Export(ctypes.Structure):
    """`struct hawk_npu_export`."""

    _fields_: ClassVar = [
        ("channel", U32),
        ("flags", U32),
        ("offset", U64),
        ("nbytes", U64),
        ("fd", S32),
        ("reserved", U32),
    ]
    channel: int
    flags: int
    offset: int
    nbytes: int
    fd: int
    reserved: int


class Adopt(ctypes.Structure):
    """`struct hawk_npu_adopt`."""

    _fields_: ClassVar = [("fd", S32), ("channel", U32), ("nbytes", U64)]
    fd: int
    channel: int
    nbytes: int


class Checksum(ctypes.Structure):
    """`struct hawk_npu_checksum`."""

    _fields_: ClassVar = [
        ("channel", U32),
        ("flags", U32),
        ("offset", U64),
        ("nbytes", U64),
        ("value", U64),
    ]
    channel: int
    flags: int
    offset: int
    nbytes: int
    value: int


IOC_MAGIC = 0xB7
_WRITE, _READ = 1, 2


def ioctl_number(
    direction: int, number: int, argument: type[ctypes.Structure], magic: int = IOC_MAGIC
) -> int:
    """The number of an ioctl as `asm-generic/ioctl.h` builds it; x86-64 and arm64 use that one."""
    return direction << 30 | ctypes.sizeof(argument) << 16 | magic << 8 | number


INFO = ioctl_number(_READ, 0x00, Info)
CLAIM = ioctl_number(_WRITE, 0x01, Channel)
EXPORT = ioctl_number(_READ | _WRITE, 0x02, Export)
REVOKE = ioctl_number(_WRITE, 0x03, Channel)
RESET = ioctl_number(_WRITE, 0x04, Channel)
FLUSH = ioctl_number(_WRITE, 0x05, Range)
CHECKSUM = ioctl_number(_READ | _WRITE, 0x06, Checksum)
ADOPT = ioctl_number(_READ | _WRITE, 0x07, Adopt)
