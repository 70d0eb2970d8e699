"""What a prefill engine tells a decode engine about a request, through whoever stands between them.

The words are those of vLLM's `kv_transfer_params`, so that proxies which know only vLLM carry them unchanged.  The
request goes by its `transfer_id`: a name that nobody can guess, drawn by the proxy or by the prefill engine.  What
opens an offer, its claim, follows from it, so a decode engine that knows the transfer's name and where the prefill
engine's agents are can fetch before there is an offer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import structs

from hawk.arguments import shown, text
from hawk.control.messages import Ticket, decode_ticket, encode_ticket
from hawk.errors import BadFrame, InvalidArgument
from hawk.jobs.caches import write_part
from hawk.plan.part import Part

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MOST_WORKERS = 1024
_LONGEST = 256
_MOST = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Model:
    """What is shared out among the workers of an engine: all KV heads and all layers that keep a cache."""

    heads: int
    layers: int


@dataclass(frozen=True, slots=True)
class Grid:
    """How many workers share the heads (`tp`) and the layers (`pp`).  Worker (stage s, rank r) is number `s*tp + r`."""

    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """How many there are."""
        return self.tp * self.pp

    def part(self, model: Model, number: int) -> Part:
        """What of the model's cache that worker keeps."""
        return Part.of(
            model.heads,
            model.layers,
            tp_rank=number % self.tp,
            tp_size=self.tp,
            pp_rank=number // self.tp,
            pp_size=self.pp,
        )


@dataclass(frozen=True, slots=True)
class Worker:
    """The agent of one worker: its name, and its control address (`tcp://HOST:PORT` or `ipc:///PATH`)."""

    name: str
    address: str


def worker_name(engine: str, number: int, size: int) -> str:
    """The name of a worker's own agent: the engine's, and the worker's number where there are several."""
    return engine if size == 1 else f"{engine}-{number}"


def worker_address(base: str, number: int) -> str:
    """Where a worker's own agent listens, if the first is at `base`: a port further for each; any port for port 0."""
    host, colon, port = base.rpartition(":")
    if not base.startswith("tcp://") or not colon or not port.isdecimal() or port == "0":
        return base
    return f"{host}:{int(port) + number}"


def new_transfer() -> str:
    """A name for a transfer that nobody can guess."""
    return secrets.token_hex(16)


def claim(transfer: str, number: int, attempt: int) -> str:
    """The claim of the offer that worker `number` makes of a transfer; a second one is another attempt."""
    text = f"hawk claim\0{transfer}\0{number}\0{attempt}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def again(tickets: Sequence[str], transfer: str, attempt: int) -> tuple[str, ...]:
    """The tickets of the same workers for another attempt at the transfer."""
    return tuple(
        encode_ticket(structs.replace(decode_ticket(ticket), claim=claim(transfer, number, attempt)))
        for number, ticket in enumerate(tickets)
    )


def digest(tokens: ArrayLike, others: Sequence[str] = ()) -> str:
    """What two engines compare to know that they speak of one prompt: its token ids, and names of what is beside."""
    import numpy as np

    found = hashlib.blake2b(np.ascontiguousarray(tokens, np.int64).tobytes(), digest_size=16)
    for other in others:
        found.update(b"\0" + other.encode())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Remote:
    """A request at a prefill engine, as a decode engine got to know of it.

    tickets    one for each of the prefill engine's workers
    tokens     how many tokens are there; None where nobody said
    digest     of the prompt that they are of; empty where nobody said
    early      the tickets were made here, by the transfer's name: the prefill may not be over
    """

    transfer: str
    tickets: tuple[str, ...]
    tokens: int | None = None
    digest: str = ""
    early: bool = False


def write(
    transfer: str,
    workers: Sequence[Worker],
    *,
    engine: str,
    model: Model,
    grid: Grid,
    attempt: int,
    tokens: int,
    digest: str,
    blocks: Sequence[Sequence[int]],
    alone: bool = True,
) -> dict[str, Any]:
    """What the prefill engine returns with its answer, for the decode engine: `kv_transfer_params`, plain JSON.

    Where it is not `alone` behind its address a proxy cannot know which of several will get the next request, so that
    a fetch that begins early would go astray: `hawk_early` is then false.
    """
    host, port = _place(workers[0].address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": workers[0].name if len(workers) == 1 else engine,  # an agent beside has its own
        "remote_request_id": transfer,
        "remote_host": host,
        "remote_port": port,
        "remote_block_ids": [list(group) for group in blocks],
        "remote_num_tokens": tokens,
        "tp_size": grid.tp,
        "pp_size": grid.pp,
        "transfer_id": transfer,
        "hawk_tickets": _tickets(transfer, workers, model, grid, tokens, attempt),
        "hawk_digest": digest,
        **({} if alone else {"hawk_early": False}),
    }


def read(params: Mapping[str, Any], *, model: Model, tokens: int) -> Remote:
    """What `write` wrote; or, of a transfer that has not begun, what a proxy says of it.

    The latter names `transfer_id` (or `remote_request_id`), `remote_engine_id`, `remote_host`, `remote_port`, and
    `tp_size` and `pp_size` where they are not 1; `tokens` is then the length of the decode engine's own prompt.
    Raises `InvalidArgument` naming what lacks or cannot be.
    """
    transfer = text_of(params, "transfer_id") or text_of(params, "remote_request_id")
    if not transfer:
        raise InvalidArgument(
            "the request says not which transfer it is",
            field="kv_transfer_params.transfer_id",
            expected="the name that the prefill engine got or returned",
        )
    there = _number(params, "remote_num_tokens", None, 0)
    tickets = params.get("hawk_tickets")
    early = tickets is None
    if tickets is None:
        grid = Grid(_number(params, "tp_size", 1, 1) or 1, _number(params, "pp_size", 1, 1) or 1)
        if grid.size > MOST_WORKERS:
            raise InvalidArgument(
                "too many workers",
                field="kv_transfer_params.tp_size",
                got=grid.size,
                expected=f"1..{MOST_WORKERS}",
            )
        tickets = _tickets(transfer, _workers(params, grid), model, grid, there or tokens, 0)
    return Remote(transfer, _checked(tickets), there, text_of(params, "hawk_digest"), early)


def _tickets(
    transfer: str, workers: Sequence[Worker], model: Model, grid: Grid, tokens: int, attempt: int
) -> list[str]:
    return [
        encode_ticket(
            Ticket(
                agent=worker.name,
                address=worker.address,
                generation="",  # the claim says as much: it is of one transfer alone
                request=transfer,
                claim=claim(transfer, number, attempt),
                tokens=tokens,
                part=write_part(grid.part(model, number)),
            )
        )
        for number, worker in enumerate(workers)
    ]


def _workers(params: Mapping[str, Any], grid: Grid) -> list[Worker]:
    engine, host = text_of(params, "remote_engine_id"), text_of(params, "remote_host")
    for key, value in (("remote_engine_id", engine), ("remote_host", host)):
        if not value:
            raise InvalidArgument(
                "the request says not where the prefill engine is",
                field=f"kv_transfer_params.{key}",
                expected="hawk_tickets, or remote_engine_id, remote_host and remote_port",
            )
    if host.startswith("ipc://"):
        base = host
        if grid.size > 1:
            raise InvalidArgument(
                "several workers cannot be found behind one path",
                field="kv_transfer_params.remote_host",
                got=host,
                expected="a host, or hawk_tickets",
            )
    else:
        port = _number(params, "remote_port", None, 1)
        if port is None or port > 65_535 - grid.size:
            raise InvalidArgument(
                "no port", field="kv_transfer_params.remote_port", got=shown(port), expected="1..65535"
            )
        base = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
    return [Worker(worker_name(engine, n, grid.size), worker_address(base, n)) for n in range(grid.size)]


def _checked(tickets: object) -> tuple[str, ...]:
    if not isinstance(tickets, list | tuple) or not 0 < len(tickets) <= MOST_WORKERS:
        raise InvalidArgument(
            "no tickets",
            field="kv_transfer_params.hawk_tickets",
            got=shown(tickets),
            expected=f"a list of 1 to {MOST_WORKERS}",
        )
    for i, ticket in enumerate(tickets):
        try:
            decode_ticket(ticket if isinstance(ticket, str) else "")
        except BadFrame as fault:
            raise InvalidArgument(
                fault.message,
                field=f"kv_transfer_params.hawk_tickets[{i}]",
                got=fault.got,
                expected=fault.expected,
            ) from fault
    return tuple(tickets)


def _place(address: str) -> tuple[str, int]:
    """Host and port of a control address; of a path the whole address and 0."""
    if not address.startswith("tcp://"):
        return address, 0
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or 0


def text_of(params: Mapping[str, Any], key: str) -> str:
    """The text under that key, empty where there is none; raises `InvalidArgument` for what cannot be sent."""
    value = params.get(key)
    if value is None:
        return ""
    return text(value, f"kv_transfer_params.{key}", _LONGEST)


def _number(params: Mapping[str, Any], key: str, default: int | None, least: int) -> int | None:
    value = params.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise InvalidArgument(
            "out of range",
            field=f"kv_transfer_params.{key}",
            got=shown(value),
            expected=f"a whole number, {least}..{_MOST}",
        )
    return value
