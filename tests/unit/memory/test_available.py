"""Available memory, read from made-up /proc and control group trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from hawk.memory.available import available_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, mib: int, cgroup: str, mountinfo: str) -> None:
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:  {mib * 1024} kB\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mountinfo,
        },
    )


V2_MOUNT = "30 20 0:25 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_here_and_now() -> None:
    assert available_memory() > 0


def test_without_groups_the_machine_decides(tmp_path: Path) -> None:
    machine(tmp_path, 500, "0::/\n", V2_MOUNT)
    assert available_memory(tmp_path) == 500 * MIB


def test_version_2_limit_without_droppable_cache(tmp_path: Path) -> None:
    machine(tmp_path, 5000, "0::/app/worker\n", V2_MOUNT)
    group = "sys/fs/cgroup/app/worker/"
    write(
        tmp_path,
        {
            group + "memory.max": f"{1000 * MIB}\n",
            group + "memory.high": "max\n",
            group + "memory.current": f"{700 * MIB}\n",
            group + "memory.stat": f"anon 5\nfile {400 * MIB}\ninactive_file {90 * MIB}\n"
            f"active_file {10 * MIB}\nshmem {300 * MIB}\nslab_reclaimable 0\n",
        },
    )
    assert available_memory(tmp_path) == 400 * MIB
    write(tmp_path, {group + "memory.high": f"{650 * MIB}\n"})
    assert available_memory(tmp_path) == 50 * MIB


def test_a_group_further_up_is_tighter(tmp_path: Path) -> None:
    machine(tmp_path, 5000, "0::/pod/container\n", V2_MOUNT)
    write(
        tmp_path,
        {
            "sys/fs/cgroup/pod/memory.max": f"{300 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{100 * MIB}\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": f"{100 * MIB}\n",
        },
    )
    assert available_memory(tmp_path) == 200 * MIB


@pytest.mark.parametrize(
    ("path", "mount_root", "group"),
    [
        ("/docker/abc", "/", "docker/abc/"),
        ("/docker/abc", "/docker/abc", ""),  # a container that sees its own part of the tree only
        ("/elsewhere", "/docker/abc", ""),
    ],
)
def test_version_1(tmp_path: Path, path: str, mount_root: str, group: str) -> None:
    machine(tmp_path, 5000, f"4:cpu:/x\n3:memory:{path}\n0::/\n", V1_MOUNT.format(root=mount_root))
    base = f"sys/fs/cgroup/memory/{group}"
    write(
        tmp_path,
        {
            base + "memory.limit_in_bytes": f"{2048 * MIB}\n",
            base + "memory.usage_in_bytes": f"{1000 * MIB}\n",
            base
            + "memory.stat": f"inactive_file 1\ntotal_inactive_file {150 * MIB}\ntotal_active_file {50 * MIB}\n",
        },
    )
    assert available_memory(tmp_path) == 1248 * MIB


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    machine(tmp_path, 700, "3:memory:/\n", V1_MOUNT.format(root="/"))
    base = "sys/fs/cgroup/memory/"
    write(
        tmp_path,
        {base + "memory.limit_in_bytes": "9223372036854771712\n", base + "memory.usage_in_bytes": "5\n"},
    )
    assert available_memory(tmp_path) == 700 * MIB


def test_past_the_limit_is_nothing_left(tmp_path: Path) -> None:
    machine(tmp_path, 700, "0::/\n", V2_MOUNT)
    write(
        tmp_path,
        {"sys/fs/cgroup/memory.max": f"{MIB}\n", "sys/fs/cgroup/memory.current": f"{2 * MIB}\n"},
    )
    assert available_memory(tmp_path) == 0


@pytest.mark.parametrize("junk", ["", "junk\n", "0::\n:::\n", "x y z - cgroup2\n"])
def test_unreadable_files_are_no_limit(tmp_path: Path, junk: str) -> None:
    machine(tmp_path, 700, junk, junk)
    assert available_memory(tmp_path) == 700 * MIB


def test_no_proc_at_all(tmp_path: Path) -> None:
    assert available_memory(tmp_path) > 0
