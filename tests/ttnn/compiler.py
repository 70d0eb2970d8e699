"""The chip's compiler for kernels that only move data, out of a compiler for plain RISC-V: Debian's, say.

ttnn compiles kernels with tenstorrent/sfpi, which its wheel does not bring.  The cores that move data are plain
rv32im, so any bare-metal compiler makes their kernels; firmware is in the wheel, ready for every kind of chip, and
chosen here by its numbers of banks.  `root` makes a place that looks as ttnn wants its own to look, with this file as
the compiler; run as a program it is one.

`HAWK_RISCV` is the folder below which `usr/bin/riscv64-unknown-elf-g++`, picolibc's headers and libstdc++'s lie
(Debian: gcc-riscv64-unknown-elf, picolibc-riscv64-unknown-elf, libstdc++-arm-none-eabi-dev); `/` if it is not set.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

REAL = Path("/opt/tenstorrent/sfpi")
THEIRS = ("-Werror", "-Winvalid-pch", "-ftt-", "-mcpu=", "-mno-tt")
"""What begins so is for sfpi alone."""

READY = ("noc.o", "substitutes.o")
"""Objects of the wheel in sfpi's own intermediate form."""


def prefix() -> Path:
    return Path(os.environ.get("HAWK_RISCV") or "/")


def gcc() -> Path:
    return prefix() / "usr" / "bin" / "riscv64-unknown-elf-g++"


def headers() -> list[str]:
    """libstdc++'s, which say nothing of their architecture but a configuration for small cores; and picolibc's."""
    found = sorted((prefix() / "usr/include/newlib/c++").glob("*/arm-none-eabi"))
    places = [place for one in found[-1:] for place in (one.parent, one)]
    places.append(prefix() / "usr/lib/picolibc/riscv64-unknown-elf/include")
    return [word for place in places for word in ("-isystem", str(place))]


def missing() -> str:
    """What is lacking to compile kernels; nothing where they can be."""
    if (REAL / "compiler").exists():
        return ""
    for file in (gcc(), *map(Path, headers()[1::2])):
        if not file.exists():
            return f"no compiler for kernels: {file} is not there (HAWK_RISCV)"
    return (
        ""
        if len(headers()) == 6
        else "no compiler for kernels: libstdc++'s headers are not there (HAWK_RISCV)"
    )


def root(library: Path, folder: Path) -> Path:
    """A place for `TT_METAL_RUNTIME_ROOT`: all of the installed ttnn, and a compiler."""
    made = folder / "root"
    (made / "runtime").mkdir(parents=True)
    for name in ("tt_metal", "ttnn", "build"):
        (made / name).symlink_to(library / name)
    (made / "runtime" / "hw").symlink_to(library / "runtime" / "hw")
    if (REAL / "compiler").exists():
        (made / "runtime" / "sfpi").symlink_to(REAL)
        return made
    tool = made / "runtime" / "sfpi" / "compiler" / "bin" / "riscv-tt-elf-g++"
    tool.parent.mkdir(parents=True)
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "{made}" "$@"\n')
    tool.chmod(0o755)
    return made


def sizes(file: Path) -> dict[str, int]:
    """Bytes of each symbol of a 32-bit ELF file."""
    data = file.read_bytes()
    table, entry, count = struct.unpack_from("<I10xHH", data, 32)
    sections = [struct.unpack_from("<10I", data, table + i * entry) for i in range(count)]
    found = {}
    for section in sections:
        if section[1] == 2:  # symbols
            names = sections[section[6]][4]
            for at in range(section[4], section[4] + section[5], 16):
                name, _, nbytes = struct.unpack_from("<III", data, at)
                end = data.index(b"\0", names + name)
                found[data[names + name : end].decode()] = nbytes
    return found


def main(made: Path, words: list[str]) -> int:
    """Compiles, links, or takes what is ready."""
    if words == ["--version"]:
        version = (made / "tt_metal" / "sfpi-version").read_text()
        numbers = dict(line.split("=", 1) for line in version.splitlines() if "=" in line)
        number, build = (numbers[f"sfpi_{key}"].strip("'") for key in ("version", "build"))
        print(f"riscv-tt-elf-g++ (tenstorrent/sfpi:{number}[{build}]) 15.1.0")
        return 0
    out = Path(words[words.index("-o") + 1])
    compiles = "-c" in words
    if "c++-header" in words:  # made ready for sfpi alone, and taken or not
        out.touch()
        return 0
    if "/firmware/" in str(out):
        return firmware(made, out, words if compiles else None)
    flags = [w for w in words if not w.startswith(THEIRS) and not w.endswith(READY)]
    base = [str(gcc()), "-w", "-march=rv32im", "-mabi=ilp32", *headers()]
    if compiles:
        return subprocess.run([*base, *flags], check=False).returncode
    rest = out.with_suffix(".rest.o")
    source = made / "tt_metal" / "hw" / "toolchain" / "substitutes.cpp"
    include = made / "tt_metal" / "hw" / "inc"
    own = [f"-I{include}", f"-I{include / 'internal'}", "-O2", "-std=c++17", "-ffreestanding"]
    done = subprocess.run([*base, *own, "-c", "-o", str(rest), str(source)], check=False).returncode
    return done or subprocess.run([*base, *flags, "-nostdlib", str(rest), "-lgcc"], check=False).returncode


def firmware(made: Path, out: Path, compiles: list[str] | None) -> int:
    """Takes the wheel's own firmware: of the chip with as many banks, for the same core."""
    noted = out.parent / "banks.json"
    if compiles is not None:
        defined = dict(w[2:].split("=", 1) for w in compiles if w.startswith("-D") and "=" in w)
        noted.write_text(json.dumps([int(defined["NUM_L1_BANKS"]), int(defined["NUM_DRAM_BANKS"])]))
        out.touch()
        if "-MF" in compiles:
            Path(compiles[compiles.index("-MF") + 1]).write_text(f"{out}:\n")
        return 0
    core = out.parent.name
    wanted = json.loads(noted.read_text())
    for ready in sorted((made / "tt_metal" / "pre-compiled").iterdir()):
        has = sizes(ready / "brisc" / "brisc_weakened.elf")
        there = [has["bank_to_l1_offset"] // 4, has["dram_bank_to_noc_xy"] // 4]
        if there == wanted and (ready / core).exists():
            shutil.copy(ready / core / f"{core}.elf", out)
            return 0
    print(f"no firmware for {wanted} banks is ready", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
