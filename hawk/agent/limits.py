"""Everything that an agent's jobs wait for in the scheduler's order, made from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.jobs.admission import Admission
from hawk.jobs.reads import Reads
from hawk.jobs.room import Room
from hawk.jobs.turns import Slots

if TYPE_CHECKING:
    from hawk.config import Config
    from hawk.memory.arena import Arena

RETILING = 2
"""Chunks retiled at a time: each takes all threads, and the second is there when the first lets go of one."""


@dataclass(frozen=True)
class Limits:
    """What the jobs of one agent share.

    serving, fetching    places for jobs of either side
    room                 where chunks are prepared
    retiling             chunks that are retiled at a time
    reads                reads that go on at a time
    """

    serving: Admission
    fetching: Admission
    room: Room
    retiling: Slots
    reads: Reads

    @classmethod
    def of(cls, config: Config, arena: Arena) -> Limits:
        """As the configuration has it."""
        jobs = config.jobs

        def admission(what: str) -> Admission:
            return Admission(
                working=jobs.max_jobs,
                queued=jobs.max_queued,
                early=jobs.max_waiting,
                what=what,
                who=f"the agent {config.agent.name}",
            )

        return cls(
            serving=admission("serves"),
            fetching=admission("fetches"),
            room=Room(
                arena,
                per_peer=jobs.in_flight_per_peer,
                per_transport=jobs.in_flight_per_transport or arena.region.nbytes,
            ),
            retiling=Slots(RETILING),
            # One job alone reads two chunks at a time; half a chunk more, so that a small one need not wait for them.
            reads=Reads(jobs.chunk * 5 // 2),
        )
