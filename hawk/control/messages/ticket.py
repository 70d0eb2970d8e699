"""Tickets: what a decode side needs to fetch an offer, as a printable string."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from hawk.control.messages.common import Claim, Count, Name, PartDescr, RequestId
from hawk.errors import BadFrame


class Ticket(Struct, frozen=True, array_like=True):
    """What a decode side needs to fetch an offer: who has it, where, and the claim that only this ticket holds.

    part    what of a model's cache the offer holds, where its cache says so
    """

    agent: Name
    address: Annotated[str, Meta(max_length=512)]
    generation: Annotated[str, Meta(max_length=16)]
    request: RequestId
    claim: Claim
    tokens: Count
    part: PartDescr | None = None


_PREFIX = "hawk1."


def encode_ticket(ticket: Ticket) -> str:
    """The ticket as a printable string for JSON and headers."""
    return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(ticket)).decode().rstrip("=")


def decode_ticket(text: str) -> Ticket:
    """The ticket that `encode_ticket` wrote; raises `BadFrame` for anything else."""
    if not text.startswith(_PREFIX) or len(text) > 2048:
        raise BadFrame("not a HAWK ticket", field="ticket", got=repr(text[:24]), expected=f"{_PREFIX}...")
    body = text[len(_PREFIX) :]
    try:
        raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        return msgspec.msgpack.decode(raw, type=Ticket)
    except (binascii.Error, ValueError, msgspec.MsgspecError) as fault:
        raise BadFrame("the ticket is damaged", field="ticket", got=repr(text[:24])) from fault
