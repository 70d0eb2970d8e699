"""Checks: wrong bytes never become ready, whatever put them there; a sample finds them as often as it says."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from hawk.control.messages import Accepted, Fetch, PeerMessage, Prepared
from hawk.errors import BadFrame, HawkError, InvalidArgument, Unverifiable, VerificationFailed, from_wire
from hawk.jobs import verify
from hawk.jobs.verify import Verifier
from hawk.memory.region import Moves, Segments
from tests.unit.jobs.rig import Rig, rig

Tamper = Callable[[Segments, list[Any]], None]

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def made_verifiers() -> Iterator[list[Verifier]]:
    made: list[Verifier] = []
    yield made
    for verifier in made:
        verifier.close()


@pytest.fixture
def verifying(made_verifiers: list[Verifier]) -> Callable[..., None]:
    """Makes the fetches of a rig ask for checks."""

    def ask(made: Rig, mode: verify.Mode = "full", **options: Any) -> None:
        made_verifiers.append(verifier := Verifier(mode, threads=2, **options))
        made.context = dataclasses.replace(made.context, verifier=verifier)

    return ask


def tampering(made: Rig, tamper: Tamper, at: int = 1) -> None:
    """Does something to the target after read number `at`, counted from 0, and no other."""
    real, count = made.transport.read, 0

    async def read(key: bytes, segments: Segments, regions: Any, *, timeout: float) -> None:
        nonlocal count
        await real(key, segments, regions, timeout=timeout)
        if count == at:
            tamper(segments, [region.array for region in regions])
        count += 1

    made.transport.read = read  # type: ignore[method-assign]


def flip(segments: Segments, regions: list[Any]) -> None:
    """One bit, in the middle of a segment."""
    i = len(segments) // 2
    regions[segments.region[i]][segments.local[i] + segments.nbytes[i] // 2] ^= 0x10


def swap(segments: Segments, regions: list[Any]) -> None:
    """Two segments of one length lie in each other's places."""
    i, j = next(
        (i, j)
        for i in range(len(segments))
        for j in range(i + 1, len(segments))
        if segments.nbytes[i] == segments.nbytes[j]
    )
    a, b = (
        regions[segments.region[k]][segments.local[k] : segments.local[k] + segments.nbytes[k]]
        for k in (i, j)
    )
    a[:], b[:] = b.copy(), a.copy()


def drop(segments: Segments, regions: list[Any]) -> None:
    """The last segment's bytes never came."""
    i = len(segments) - 1
    regions[segments.region[i]][segments.local[i] : segments.local[i] + segments.nbytes[i]] = 0xA5


@pytest.mark.parametrize("tamper", [flip, swap, drop])
@pytest.mark.parametrize("mode", ["direct", "staged"])
async def test_full_finds_every_wrong_byte(tamper: Tamper, mode: str, verifying: Callable[..., None]) -> None:
    async with rig(mode=mode) as made:
        verifying(made)
        entry = made.offer()
        tampering(made, tamper)
        with pytest.raises(VerificationFailed, match=r"chunk 1, layer \d, [KV], channel \d") as caught:
            await made.fetch(entry.claim).run()
        again = from_wire(caught.value.to_wire())
        assert type(again) is VerificationFailed
        assert {"layer", "channel", "check"} <= set(again.facts)
        assert [state for state, _, _ in made.progress if state in ("ready", "releasing")] == []
        assert made.progress[-1][0] == "failed"
        assert made.metrics.value("hawk_verify_mismatches_total") == 1
        # The offer is still there, and its bytes come whole once nobody touches them.
        await made.serving.idle()
        assert entry.outcome is None
        job = made.fetch(entry.claim)
        await job.run()
        made.check_bytes()
        assert job.result.phases["verify"] > 0


async def test_without_checks_the_same_goes_unseen(verifying: Callable[..., None]) -> None:
    """What the checks are for."""
    async with rig() as made:
        verifying(made, "off")
        tampering(made, flip)
        await made.fetch(made.offer().claim).run()
        with pytest.raises(AssertionError):
            made.check_bytes()


async def test_a_later_read_that_lands_in_an_earlier_chunk(verifying: Callable[..., None]) -> None:
    async with rig() as made:
        verifying(made)
        first: list[Segments] = []

        def astray(segments: Segments, regions: list[Any]) -> None:
            regions[first[0].region[0]][first[0].local[0]] ^= 1

        real = made.transport.read

        async def read(key: bytes, segments: Segments, regions: Any, *, timeout: float) -> None:
            first.append(segments)
            await real(key, segments, regions, timeout=timeout)

        made.transport.read = read  # type: ignore[method-assign]
        tampering(made, astray, at=2)
        with pytest.raises(VerificationFailed, match="chunk 0"):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()


async def test_a_move_that_was_not_made(verifying: Callable[..., None]) -> None:
    async with rig(mode="staged") as made:
        verifying(made)
        real = made.npu.move

        async def move(moves: Moves) -> None:
            await real(Moves(moves.channel[1:], moves.source[1:], moves.target[1:], moves.nbytes[1:]))

        made.npu.move = move  # type: ignore[method-assign]
        with pytest.raises(VerificationFailed):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()


async def test_the_arena_changes_after_the_check(verifying: Callable[..., None]) -> None:
    async with rig() as made:
        verifying(made)

        async def scribble() -> None:
            assert made.transport.region is not None
            for grant in made.transport.grants.values():
                made.transport.region.array[grant.offset + grant.nbytes // 2] ^= 1

        made.transport.hold = scribble
        with pytest.raises(VerificationFailed):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("checked", ["full", "sample"])
async def test_right_bytes_become_ready(
    mode: str, checked: verify.Mode, verifying: Callable[..., None]
) -> None:
    async with rig(mode=mode) as made:
        verifying(made, checked)
        await made.fetch(made.offer().claim).run()
        made.check_bytes()
        assert made.metrics.value("hawk_verify_mismatches_total") == 0
        assert made.metrics.value("hawk_phase_seconds_count", phase="seal") > 1


# -- a sample --------------------------------------------------------------------------------------------------


async def test_a_sample_finds_what_it_looks_at(
    verifying: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk 1's first stretch is wrong in every job: found when the job's id chooses it, and then only."""
    rng, share, found, expected = np.random.default_rng(5), 0.3, [], []
    monkeypatch.setattr(secrets, "token_hex", lambda n=16: rng.bytes(n).hex())
    counts: list[int] = []
    real = verify.chosen

    def noting(job: str, chunk: int, count: int, part: float) -> Any:
        if chunk == 1:
            counts.append(count)
        return real(job, chunk, count, part)

    monkeypatch.setattr(verify, "chosen", noting)

    def first_byte(segments: Segments, regions: list[Any]) -> None:
        regions[segments.region[0]][segments.local[0]] ^= 1

    async with rig() as made:
        verifying(made, "sample", sample=share)
        tampered = made.transport.read
        for number in range(30):
            made.transport.read = tampered  # type: ignore[method-assign]
            tampering(made, first_byte)
            entry = made.offer(request=f"r{number}")
            job = made.fetch(entry.claim, request=f"r{number}")
            try:
                await job.run()
                found.append(False)
            except VerificationFailed:
                found.append(True)
            await made.serving.idle()
            expected.append(0 in real(job.result.attempt, 1, counts[-1], share).tolist())
    assert found == expected
    assert True in found
    assert False in found


# -- what peers know -------------------------------------------------------------------------------------------


def forgetful(message: PeerMessage) -> Iterable[PeerMessage]:
    """A prefill side from before there were checks."""
    if isinstance(message, Accepted):
        message = msgspec.structs.replace(message, verify="")
    if isinstance(message, Prepared):
        message = msgspec.structs.replace(message, checks=b"")
    return (message,)


async def test_a_peer_without_checks_is_refused_before_anything_is_read(
    verifying: Callable[..., None],
) -> None:
    async with rig() as made:
        verifying(made)
        made.to_d.change = forgetful
        with pytest.raises(Unverifiable, match=r"integrity\.unverified"):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()
        assert made.metrics.value("hawk_phase_seconds_count", phase="read") == 0


async def test_a_peer_without_checks_may_be_allowed(verifying: Callable[..., None]) -> None:
    async with rig() as made:
        verifying(made, require=False)
        made.to_d.change = forgetful
        job = made.fetch(made.offer().claim)
        await job.run()
        made.check_bytes()
        assert "verify" not in job.result.phases


async def test_a_check_that_nobody_knows_is_not_promised() -> None:
    async with rig() as made:
        answers: list[Accepted] = []

        def ask(message: PeerMessage) -> Iterable[PeerMessage]:
            if isinstance(message, Fetch):
                message = msgspec.structs.replace(message, verify="crc-7", share=1.0)
            return (message,)

        def note(message: PeerMessage) -> Iterable[PeerMessage]:
            answers.extend([message] if isinstance(message, Accepted) else [])
            return (message,)

        made.to_p.change, made.to_d.change = ask, note
        await made.fetch(made.offer().claim).run()
        assert {answer.verify for answer in answers} == {""}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda checks: checks[:-8], BadFrame),
        (lambda checks: checks + bytes(8), BadFrame),
        (lambda checks: b"", BadFrame),
        (lambda checks: checks[8:] + checks[:8], VerificationFailed),
        (lambda checks: bytes(len(checks)), VerificationFailed),
    ],
    ids=["fewer", "more", "none", "turned", "zeros"],
)
async def test_checks_that_lie(
    change: Callable[[bytes], bytes], error: type[HawkError], verifying: Callable[..., None]
) -> None:
    async with rig() as made:
        verifying(made)

        def lie(message: PeerMessage) -> Iterable[PeerMessage]:
            if isinstance(message, Prepared):
                message = msgspec.structs.replace(message, checks=change(message.checks))
            return (message,)

        made.to_d.change = lie
        with pytest.raises(error):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()


async def test_wrong_bytes_are_fetched_again_where_the_config_says_so(verifying: Callable[..., None]) -> None:
    async with rig() as made:
        verifying(made, retries=1)
        tampering(made, flip)
        job = made.fetch(made.offer().claim)
        await job.run()
        made.check_bytes()
        assert made.metrics.value("hawk_verify_mismatches_total") == 1
        assert made.progress[-1][0] == "ready"


async def test_wrong_twice_is_wrong(verifying: Callable[..., None]) -> None:
    async with rig() as made:
        verifying(made, retries=1)
        real = made.transport.read

        async def read(key: bytes, segments: Segments, regions: Any, *, timeout: float) -> None:
            await real(key, segments, regions, timeout=timeout)
            flip(segments, [region.array for region in regions])

        made.transport.read = read  # type: ignore[method-assign]
        with pytest.raises(VerificationFailed):
            await made.fetch(made.offer().claim).run()
        await made.serving.idle()
        assert made.metrics.value("hawk_verify_mismatches_total") == 2


async def test_more_checks_than_a_message_holds_are_refused_by_name(
    verifying: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_MOST", 3)
    async with rig() as made:
        verifying(made)
        with pytest.raises(InvalidArgument, match=r"integrity\.verify: the chunk has more parts") as caught:
            await made.fetch(made.offer().claim).run()
        assert caught.value.hint is not None
        await made.serving.idle()
