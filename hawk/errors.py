"""Every error that HAWK raises, in one tree.

A user meets these before the documentation, so each one names what was wrong, what came and what would
have been right.  An error that happened in an agent reaches the client as the same class: `to_wire` and
`from_wire` carry the class by its `code` and the facts by name.

This module is a leaf: it imports nothing of HAWK, and everything may import it.
"""

from __future__ import annotations

from typing import Any, ClassVar


def _shown(value: object) -> str:
    """The value as text; a float without the digits that only its binary form has (5.6000000000000005)."""
    if isinstance(value, float):
        return str(float(f"{value:.9g}"))
    return str(value)


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and what is counted: `"1 entry"`, `"2 transfers"`; `many` is `one` and an s where not given."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class HawkError(Exception):
    """Base of all errors that HAWK raises.

    Parameters are facts for people and programs alike: `message` says what happened in one sentence,
    `field` names the input at fault (`"blocks[3]"`), `got` and `expected` show the value that came and
    what would have been right, and `hint` says what to do about it.
    """

    code: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        got: object = None,
        expected: object = None,
        hint: str | None = None,
        **facts: object,
    ) -> None:
        self.message = message
        self.field = field
        self.got = None if got is None else _shown(got)
        self.expected = None if expected is None else _shown(expected)
        self.hint = hint
        self.facts: dict[str, str] = {k: _shown(v) for k, v in facts.items() if v is not None}
        super().__init__(self._text())

    def _text(self) -> str:
        text = self.message
        if self.field is not None:
            text = f"{self.field}: {text}"
        if self.got is not None:
            text += f"; got {self.got}"
        if self.expected is not None:
            text += f"; expected {self.expected}"
        if self.facts:
            text += " (" + ", ".join(f"{k}={v}" for k, v in self.facts.items()) + ")"
        if self.hint is not None:
            text += f". {self.hint}"
        return text

    def __str__(self) -> str:
        return self._text()

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_wire, (self.to_wire(),))

    def to_wire(self) -> dict[str, str]:
        """The error as strings, for a control message."""
        wire = {"code": self.code, "message": self.message}
        for key in ("field", "got", "expected", "hint"):
            value = getattr(self, key)
            if value is not None:
                wire[key] = value
        wire.update({f"fact.{k}": v for k, v in self.facts.items()})
        return wire


# -- bad input -------------------------------------------------------------------------------------------


class InvalidArgument(HawkError, ValueError):
    """A value given by the caller cannot be right, whatever the state of the system."""

    code = "invalid-argument"


class ConfigError(HawkError, ValueError):
    """The configuration has problems; `problems` holds one line for each, all found in one pass."""

    code = "config"

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), **kw: Any) -> None:
        self.problems = problems
        super().__init__("\n".join((message, *problems)) if problems else message, **kw)


class LayoutError(HawkError, ValueError):
    """A layout declaration cannot be read, or is no bijection; the message names the digit."""

    code = "layout"


class Unmappable(LayoutError):
    """A source cache cannot be mapped onto this target; `field` names what differs."""

    code = "unmappable"


class MissingDependency(HawkError, ImportError):
    """An optional package is needed for what was asked; the hint says how to install it."""

    code = "missing-dependency"


class WrongContext(HawkError, RuntimeError):
    """A client was used from another event loop, thread or forked child than the one that made it."""

    code = "wrong-context"


# -- memory ----------------------------------------------------------------------------------------------


class HawkMemoryError(HawkError):
    """Base of errors about memories, regions and pools."""

    code = "memory"


class OutOfMemory(HawkMemoryError, MemoryError):
    """An allocation does not fit; the facts name the pool, the channel, what is free and in which pieces."""

    code = "out-of-memory"


class RegistrationFailed(HawkMemoryError):
    """The agent cannot reach this memory; the message names the ways that would work."""

    code = "registration-failed"


class DeviceLost(HawkMemoryError):
    """A GPU's context in this process has failed for good; what is in that GPU's memory cannot be reached any more."""

    code = "device-lost"


class DeviceReset(DeviceLost):
    """A device was reset: what was in its memory is gone, and it has to be opened anew."""

    code = "device-reset"


class DeviceDenied(HawkMemoryError, PermissionError):
    """A device that this user may not open; `field` names the memory, `got` the device file."""

    code = "device-denied"


class DriverTooOld(HawkMemoryError):
    """A device's kernel driver, or the kernel, cannot do yet what was asked; `expected` is the first that can."""

    code = "driver-too-old"


class WindowsExhausted(OutOfMemory):
    """A device has fewer free windows into its memory than a reservation needs; the facts count them."""

    code = "windows-exhausted"


class UnknownCache(HawkMemoryError, LookupError):
    """No cache with that id is registered in this agent (it may have been released)."""

    code = "unknown-cache"


# -- transports ------------------------------------------------------------------------------------------


class TransportError(HawkError):
    """Base of errors in moving bytes."""

    code = "transport"


class NotViable(TransportError):
    """No transport that both sides have can be used; the message gives each one's reason."""

    code = "not-viable"


class TransferFailed(TransportError, ConnectionError):
    """The bytes did not arrive: the connection broke, or the far side refused or ended early."""

    code = "transfer-failed"


class AccessDenied(TransportError, PermissionError):
    """A key is unknown, revoked, or does not cover the range that was asked for."""

    code = "access-denied"


# -- control ---------------------------------------------------------------------------------------------


class ControlError(HawkError):
    """Base of errors between agents, and between an agent and its clients."""

    code = "control"


class BadFrame(ControlError, ValueError):
    """A control frame cannot be decoded, or does not fit the state it came in."""

    code = "bad-frame"


class VersionMismatch(ControlError):
    """The peer speaks no protocol version that this side speaks."""

    code = "version-mismatch"


class PeerUnreachable(ControlError, ConnectionError):
    """A peer did not answer within the deadline; the facts give its name and address."""

    code = "peer-unreachable"


class PeerLost(ControlError, ConnectionError):
    """A peer that took part in a job died, restarted or fell silent."""

    code = "peer-lost"


class UnknownPeer(ControlError, LookupError):
    """No peer of that name is configured."""

    code = "unknown-peer"


class Busy(ControlError):
    """Admission is full; try again after `retry_after` seconds."""

    code = "busy"

    def __init__(self, message: str, *, retry_after: float | str = 0.1, **kw: Any) -> None:
        self.retry_after = float(retry_after)
        super().__init__(message, retry_after=self.retry_after, **kw)


# -- jobs ------------------------------------------------------------------------------------------------


class JobError(HawkError):
    """Base of the named endings of a transfer job."""

    code = "job"


class UnknownRequest(JobError, LookupError):
    """The prefill side holds no offer for that request (never made, withdrawn, or its time ran out)."""

    code = "unknown-request"


class AlreadyClaimed(JobError):
    """The offer was given to another consumer, or was consumed before."""

    code = "already-claimed"


class AlreadyOffered(JobError):
    """An offer for that request is still open in this agent."""

    code = "already-offered"


class PartsMismatch(JobError, ValueError):
    """The parts of a request are not what the target needs; `got` names heads and layers that lack or clash."""

    code = "parts-mismatch"


class RangeBusy(JobError):
    """Blocks named by this job still belong to another job."""

    code = "range-busy"


class LeaseExpired(JobError):
    """The source ranges were not held until the last byte was read; the destination is not ready."""

    code = "lease-expired"


class DeadlineExceeded(JobError, TimeoutError):
    """The job did not end within its deadline; the facts name the state it was in."""

    code = "deadline-exceeded"


class Aborted(JobError):
    """The job was ended by its owner, or by the other side on its owner's word."""

    code = "aborted"


class Draining(JobError):
    """The agent is leaving and takes no new jobs; the facts name it (`agent`) and say where to `retry`: elsewhere."""

    code = "draining"

    @classmethod
    def refused(cls, agent: str, what: str) -> Draining:
        """What the agent `agent` answers to new work: not here, not later; another agent may."""
        return cls(f"the agent is leaving and takes no new {what}", agent=agent, retry="elsewhere")


class StillDraining(JobError):
    """A byte may still land in these ranges; they are quarantined and must not be reused yet."""

    code = "still-draining"


class VerificationFailed(JobError):
    """What arrived is not what was sent; the facts name the chunk, the layer, the channel and the stretch of bytes."""

    code = "verification-failed"


class Unverifiable(JobError):
    """The peer sends no checks of what it prepares, and the configuration asks for them."""

    code = "unverifiable"


class InternalError(HawkError, RuntimeError):
    """A bug in HAWK; the facts and the agent's log say where."""

    code = "internal"


def _all_classes(base: type[HawkError]) -> dict[str, type[HawkError]]:
    found = {base.code: base}
    for sub in base.__subclasses__():
        found.update(_all_classes(sub))
    return found


def _printable(text: str) -> str:
    """What came from elsewhere goes to terminals and logs: what is no character to look at is written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def from_wire(wire: dict[str, str]) -> HawkError:
    """The error that `HawkError.to_wire` wrote; an unknown code becomes a plain `HawkError`.

    Whoever wrote it is not trusted with a terminal: what cannot be printed is escaped.
    """
    wire = {key: _printable(value) for key, value in wire.items()}
    cls = _all_classes(HawkError).get(wire.get("code", ""), HawkError)
    kw: dict[str, Any] = {k: wire[k] for k in ("field", "got", "expected", "hint") if k in wire}
    kw.update({k[5:]: v for k, v in wire.items() if k.startswith("fact.") and k[5:].isidentifier()})
    for reserved in ("message", "problems"):
        kw.pop(reserved, None)
    return cls(wire.get("message", "unspecified error"), **kw)
