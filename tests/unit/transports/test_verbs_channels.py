"""Which descriptor belongs to a completion channel: nothing else may come or go while it is made."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hawk.transports.verbs import _pyverbs, _pyverbs_call, _pyverbs_queue
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs._pyverbs import PyverbsDevice
from hawk.transports.verbs._pyverbs_queue import PyverbsCompletions


class PyverbsError(Exception):
    """Stands in for pyverbs' own."""


class Opened:
    """What has a descriptor: it comes and goes only while the lock is held."""

    def __init__(self, table: set[int]) -> None:
        assert _pyverbs_call.descriptors.locked()
        self.fd = os.memfd_create("event")
        table.add(self.fd)
        self._table = table

    def close(self) -> None:
        assert _pyverbs_call.descriptors.locked()
        self._table.remove(self.fd)
        os.close(self.fd)


class Library:
    """pyverbs, as far as channels and devices go; `open` are the descriptors, `refuse` fails queues and domains."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.refuse = False

    def part(self, name: str) -> Any:
        attributes = dict.fromkeys(
            (
                *(
                    "device_cap_flags",
                    "max_mr_size",
                    "max_qp_wr",
                    "max_sge",
                    "max_sge_rd",
                    "max_cqe",
                    "max_mw",
                ),
                *("max_qp_init_rd_atom", "max_qp_rd_atom", "phys_port_cnt"),
            ),
            1,
        )
        facts = SimpleNamespace(**attributes)

        class Context(Opened):
            def query_device(self) -> Any:
                return facts

        return {
            "pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError),
            "device": SimpleNamespace(Context=lambda name: Context(self.open)),
            "pd": SimpleNamespace(PD=self._domain),
            "cq": SimpleNamespace(
                CompChannel=lambda context: Opened(self.open), CQ=self._queue, WC=SimpleNamespace(imm_data=0)
            ),
        }[name]

    def _domain(self, context: object) -> Any:
        if self.refuse:
            raise PyverbsError("Failed to allocate PD. Errno: 12, Cannot allocate memory")
        return SimpleNamespace(close=lambda: None)

    def _queue(self, *arguments: object) -> Any:
        if self.refuse:
            raise PyverbsError("Failed to create a CQ. Errno: 12, Cannot allocate memory")
        return SimpleNamespace(close=lambda: None)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    for module in (_pyverbs, _pyverbs_call, _pyverbs_queue):
        monkeypatch.setattr(module, "part", made.part)
    for module in (_pyverbs, _pyverbs_queue):
        monkeypatch.setattr(module, "event_descriptors", lambda: set(made.open))
    yield made
    assert not made.open


def test_devices_and_channels_come_and_go_one_at_a_time(library: Library) -> None:
    device = PyverbsDevice("rxe0")
    one, two = device.completions(8), device.completions(8)
    assert library.open >= {one.fd, two.fd}
    assert one.fd != two.fd
    assert not os.get_blocking(one.fd)
    for each in (one, two, device):
        each.close()


def test_a_device_without_a_domain_is_given_back(library: Library) -> None:
    library.refuse = True
    with pytest.raises(VerbsError) as raised:
        PyverbsDevice("rxe0")
    assert raised.value.errno == errno.ENOMEM
    assert not library.open


def test_a_channel_without_its_queue_is_given_back(library: Library) -> None:
    device = PyverbsDevice("rxe0")
    library.refuse = True
    before = set(library.open)
    with pytest.raises(VerbsError) as raised:
        device.completions(8)
    assert raised.value.errno == errno.ENOMEM
    assert library.open == before
    device.close()


def test_a_channel_whose_descriptor_is_not_found_is_given_back(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = PyverbsDevice("rxe0")
    before = set(library.open)
    monkeypatch.setattr(_pyverbs_queue, "event_descriptors", set)
    with pytest.raises(VerbsError, match="descriptor"):
        PyverbsCompletions(None, 8)
    assert library.open == before
    device.close()


def test_what_a_device_says_is_read_and_acknowledged(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is the one that appears as it is opened, and reading it never waits."""
    reading, writing = os.pipe()
    shown: set[int] = set()
    acknowledged: list[int] = []

    class Talking(Opened):
        def query_device(self) -> Any:
            return plain.query_device()

        def get_async_event(self) -> Any:
            try:
                (kind,) = os.read(reading, 1)
            except BlockingIOError:
                raise PyverbsError("Failed to get async event. Errno: 11") from None
            return SimpleNamespace(event_type=kind, ack=lambda: acknowledged.append(kind))

    def opening(name: str) -> Any:
        shown.add(reading)
        return Talking(library.open)

    part = library.part
    with _pyverbs_call.descriptors:
        plain = part("device").Context("rxe0")
    parts = {"device": SimpleNamespace(Context=opening)}
    monkeypatch.setattr(_pyverbs, "part", lambda name: parts.get(name) or part(name))
    monkeypatch.setattr(_pyverbs, "event_descriptors", lambda: set(shown))
    device = PyverbsDevice("rxe0")
    assert device.event_fd == reading
    assert device.take_event() is None
    os.write(writing, bytes([10, 9]))
    assert [device.take_event() for _ in range(3)] == [10, 9, None]
    assert acknowledged == [10, 9]
    device.close()
    with _pyverbs_call.descriptors:
        plain.close()
    for fd in (reading, writing):
        os.close(fd)
