"""What agents of earlier protocol versions wrote, as `tests/end_to_end/record.py` recorded it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hawk.control.frames import Kind

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True)
class Frame:
    """One recorded frame; `type`, `fields` and `carried` (the chunk's bytes in the arena) where it has them."""

    sender: str
    kind: Kind
    header: bytes
    body: bytes
    type: str
    fields: dict[str, Any]
    carried: bytes

    def with_fields(self, **fields: Any) -> bytes:
        """The body with other values in some of its fields, as the recorded version would write it."""
        return msgspec.msgpack.encode({"type": self.type, **self.fields, **fields})


def _frame(raw: dict[str, Any]) -> Frame:
    return Frame(
        raw["from"],
        Kind[raw["kind"]],
        bytes.fromhex(raw["header"]),
        bytes.fromhex(raw["body"]),
        raw.get("type", ""),
        unhex(raw.get("fields", {})),
        bytes.fromhex(raw.get("bytes", "")),
    )


def unhex(value: Any) -> Any:
    """The value with its {"hex": ...} as the bytes that they stand for."""
    if isinstance(value, dict):
        if value.keys() == {"hex"}:
            return bytes.fromhex(value["hex"])
        return {key: unhex(below) for key, below in value.items()}
    return [unhex(below) for below in value] if isinstance(value, list) else value


@cache
def recorded(version: int) -> dict[str, list[Frame]]:
    """The frames of a protocol version: `"peer"` in the order in which they were sent, `"local"` one of each."""
    raw = json.loads((DATA / f"protocol-{version}.json").read_text())
    assert raw["protocol"] == version
    return {family: [_frame(frame) for frame in raw[family]] for family in ("peer", "local")}


def versions() -> list[int]:
    """The protocol versions of which there are recordings."""
    return sorted(int(path.stem.partition("-")[2]) for path in DATA.glob("protocol-*.json"))


def job_of(frames: list[Frame], which: int) -> list[Frame]:
    """The frames of the recording's first job (it ended ready) or its second (it was aborted)."""
    jobs = list(dict.fromkeys(frame.fields["job"] for frame in frames if "job" in frame.fields))
    return [frame for frame in frames if frame.fields.get("job") == jobs[which]]


def lacks(old: Any, new: Any, where: str = "") -> list[str]:
    """What a reader of `old`'s version would miss in `new`: absent fields, and values of another type."""
    if isinstance(old, dict) and isinstance(new, dict):
        faults = []
        for key, value in old.items():
            if key not in new:
                faults.append(f"{where}{key}: absent")
            elif isinstance(value, dict) and not set(value) <= set(new[key]):
                continue  # a table of names, not a message's fields
            else:
                faults += lacks(value, new[key], f"{where}{key}.")
        return faults
    same = isinstance(new, type(old)) or {type(old), type(new)} <= {int, float}
    return [] if same else [f"{where} {type(old).__name__} became {type(new).__name__}"]
