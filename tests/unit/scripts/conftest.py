"""`scripts/lib/vmlab` can be imported, and an unpacked kernel without content."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "lib"))

from vmlab import kernel

VERSION = "6.1.0-99-amd64"


@pytest.fixture
def unpacked(tmp_path: Path) -> kernel.Kernel:
    """An unpacked kernel without content."""
    root = tmp_path / "kernel"
    for name in (f"boot/vmlinuz-{VERSION}", f"lib/modules/{VERSION}/modules.dep"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return kernel.find(str(root), tmp_path, print)
