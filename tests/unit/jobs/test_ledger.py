"""The ledger: jobs as they are and as they ended, so many and no more; who was met, and what they are told."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest

from hawk.control.messages import Hello, Notice, PeerMessage, Refused, Welcome
from hawk.control.server import Peer
from hawk.errors import HawkError
from hawk.jobs.guests import Guests
from hawk.jobs.ledger import Ledger, Look


class Job:
    """What a look reads."""

    state, nbytes = "reading", 0

    def look(self) -> Look:
        return Look(self.state, "read", "f" * 32, nbytes=self.nbytes, total=100)


def test_a_job_is_seen_as_it_is_and_then_as_it_ended() -> None:
    ledger, job = Ledger(), Job()
    entry = ledger.open("a" * 32, "fetch", request="r", peer="p0", seconds=60, look=job.look)
    job.nbytes = 40
    (found,) = ledger.find("aa")
    info = found.info()
    assert (info.nbytes, info.total, info.state, info.ended, info.ending) == (40, 100, "reading", None, "")
    assert info.deadline is not None
    assert 0 < info.deadline <= 60
    assert ledger.find("ff") == [entry]
    assert ledger.find("bb") == []
    assert len(ledger) == 1
    job.state = "failed"
    ledger.close(entry, "aborted", "x" * 5000)
    kept = weakref.ref(job)
    del job
    gc.collect()
    assert kept() is None, "the ledger keeps jobs, and with them caches, alive"
    info = entry.info()
    assert (info.state, info.ending, info.deadline, len(info.reason)) == ("failed", "aborted", None, 1000)
    assert info.ended is not None
    assert len(ledger) == 0
    assert list(ledger.states()) == []
    assert ledger.find("aa", ended=False) == []
    # It can cross the wire.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)).job == "a" * 32


def test_the_latest_are_remembered_and_told_first() -> None:
    ledger = Ledger(remembered=3)
    for number in range(6):
        entry = ledger.open(f"{number:032x}", "serve", request="r", peer="d0", seconds=1, look=Job().look)
        if number != 1:
            ledger.close(entry, "released")
    assert [int(entry.job, 16) for entry in ledger.find()] == [1, 5, 4, 3]


# -- guests ----------------------------------------------------------------------------------------------


class Met:
    """Guests of an agent p0, with what was sent to them."""

    def __init__(self) -> None:
        self.peers: dict[bytes, Peer] = {}
        self.sent: list[tuple[bytes, PeerMessage]] = []
        self.bad: list[HawkError] = []
        self.guests = Guests(
            self.peers,
            lambda: Welcome("p0", "prefill", "t", {}),
            lambda identity, message: self.sent.append((identity, message)),
            lambda identity, error: self.bad.append(error),
        )

    def come(self, identity: bytes, called: str, *, filed: str = "", version: int = 2) -> None:
        self.peers[identity] = Peer(identity, 7, version, filed)
        self.guests.hello(identity, Hello(called, "decode", "t", {}))


def test_only_those_who_know_the_word_are_told() -> None:
    met = Met()
    met.come(b"old", "d0", version=1)
    met.come(b"new", "d1")
    met.sent.clear()
    met.guests.notify(draining=True)
    assert met.sent == [(b"new", Notice(True))]


@pytest.mark.parametrize(("version", "told"), [(1, 0), (2, 1)])
def test_who_calls_itself_by_another_name_is_refused_and_told_if_it_can_be(version: int, told: int) -> None:
    met = Met()
    met.come(b"x", "d0", filed="d9", version=version)
    assert met.guests.name(b"x") is None
    assert met.guests.met() == []
    assert len(met.bad) == 1
    refusals = [message for _, message in met.sent if isinstance(message, Refused)]
    assert len(met.sent) == len(refusals) == told
    assert all((r.error["got"], r.error["expected"]) == ("d0", "d9") for r in refusals)


def test_a_name_lasts_as_long_as_its_key_and_its_process() -> None:
    met = Met()
    met.come(b"x", "d0", filed="d0")
    assert met.guests.name(b"x") == "d0"
    # Taken for lost, and back: it does not introduce itself again.
    peer = met.peers.pop(b"x")
    assert met.guests.gone(b"x") == "d0"
    assert met.guests.met() == []
    met.peers[b"x"] = peer
    assert met.guests.name(b"x") == "d0"
    peer.name = "d5"  # its key was given another name meanwhile
    assert met.guests.name(b"x") is None
    peer.name, peer.generation = "d0", 8
    assert met.guests.name(b"x") is None
    assert met.guests.gone(b"never seen") == ""


@pytest.mark.parametrize("version", [1, 2])
def test_who_has_another_name_meanwhile_is_told_both_and_welcome_again_with_its_own(version: int) -> None:
    met = Met()
    met.come(b"x", "d0", filed="d0", version=version)
    met.sent.clear()
    met.peers[b"x"].name = "d5"
    met.guests.renamed([b"x", b"never introduced"])
    assert met.guests.met() == []
    fault = met.guests.unknown(b"x", "fetch")
    assert (fault.code, fault.field, fault.got, fault.expected) == (
        "peer-unreachable",
        "agent.name",
        "d0",
        "d5",
    )
    told = [(b"x", Refused(fault.to_wire()))] * 2  # at once, and with the answer, should it have gone astray
    assert met.sent == (told if version == 2 else [])
    assert met.guests.unknown(b"never introduced", "fetch").code == "bad-frame"
    met.sent.clear()
    met.peers[b"x"].name = "d0"
    met.guests.renamed([b"x"])
    assert met.sent == [(b"x", Welcome("p0", "prefill", "t", {}))]
    assert met.guests.name(b"x") == "d0"


def test_who_drains_is_known_while_it_is_here() -> None:
    met = Met()
    met.come(b"x", "d0")
    met.guests.notice(b"x", True)
    assert [draining for _, _, draining in met.guests.met()] == [True]
    met.guests.gone(b"x")
    met.come(b"x", "d0")
    assert [draining for _, _, draining in met.guests.met()] == [False]
