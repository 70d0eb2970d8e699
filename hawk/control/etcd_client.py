"""What HAWK asks of etcd, over the JSON gateway that every etcd 3.4 and later serves beside gRPC.

See "gRPC gateway" in etcd's documentation: keys and values are base64, 64-bit numbers are decimal strings, a stream is
one JSON object a line.  The gateway speaks HTTP, so TLS, several members and time-outs are aiohttp's business.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hawk.errors import ConfigError, ControlError, InvalidArgument, MissingDependency
from hawk.extras import install

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
    from pathlib import Path

    import aiohttp

LINE = 8 << 20
"""Bytes of one line of a watch at most: etcd sends no event above 1.5 MiB unless it was told to."""

SNAPSHOT = 64 << 20
"""Bytes of an answer at most."""

PAGE, PAGES = 500, 100
"""Keys that are asked for at a time, as reading what they say keeps an event loop; and how often there may be more."""


class EtcdFault(ControlError):
    """etcd did not answer, or answered with an error."""

    code = "directory"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key that etcd has, and the revision of the change that made it so; `value` is None where it was removed."""

    key: str
    value: bytes | None
    revision: int


class Etcd:
    """A client of one cluster; every question goes to one member, the next one after a fault.

    urls       `http://HOST:PORT` or `https://HOST:PORT` of its members
    tls        authority, certificate and key, for https; each may be None
    user       name and password, or None
    timeout    seconds that an answer may take

    Raises `MissingDependency` without aiohttp, `InvalidArgument` for another scheme, and `ConfigError` for files that
    TLS cannot use.  Its methods raise `EtcdFault`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        tls: tuple[Path | None, Path | None, Path | None] = (None, None, None),
        user: tuple[str, str] | None = None,
        timeout: float = 5.0,
    ) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependency(
                "etcd is asked over HTTP, and the package for that is not installed",
                field="discovery.etcd",
                got=error,
                hint=install("etcd"),
            ) from error
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise InvalidArgument(
                    "no address of etcd's",
                    field="etcd",
                    got=url,
                    expected="http://HOST:PORT or https://HOST:PORT",
                )
        self._urls = [url.rstrip("/") for url in urls]
        self._next = 0
        self._user = user
        self._token = ""
        self._timeout = timeout
        plain = [url for url in urls if not url.startswith("https:")]
        if any(tls) and plain:
            raise ConfigError(
                "files for TLS, and a member that is asked without",
                field="discovery.etcd",
                got=plain[0],
                expected="https:// for each member",
            )
        self._tls = _context(*tls) if len(plain) < len(urls) else None
        self._errors = (
            *(aiohttp.ClientError, OSError, TimeoutError),
            # What reading an answer of another form than etcd's ends by:
            *(ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError),
        )
        self._aiohttp = aiohttp
        self._session: aiohttp.ClientSession | None = None

    @property
    def member(self) -> str:
        """The member that is asked."""
        return self._urls[self._next]

    def turn(self) -> None:
        """Asks the next member from now on."""
        self._next = (self._next + 1) % len(self._urls)
        self._token = ""

    async def close(self) -> None:
        """Closes its connections.  Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def read(self, prefix: str) -> tuple[list[Entry], int]:
        """Every key that begins so, and the revision as of which that is so."""
        entries: list[Entry] = []
        page = {"key": _b64(prefix), "range_end": _b64(_after(prefix)), "limit": str(PAGE)}
        for _ in range(PAGES):
            answer = await self._ask("/v3/kv/range", page)
            with self._faults():
                kvs = answer.get("kvs", [])
                entries += [_entry(kv) for kv in kvs]
                # All pages are of one revision, so that no change falls between two.
                page.setdefault("revision", str(int(answer["header"]["revision"])))
                if not kvs or not answer.get("more"):
                    return entries, int(page["revision"])
                page["key"] = base64.b64encode(base64.b64decode(kvs[-1]["key"]) + b"\0").decode()
        raise EtcdFault("etcd has too many keys", got=f"more than {len(entries)} below {prefix}")

    async def lease(self, seconds: float) -> tuple[int, float]:
        """A new lease, and how many seconds it lasts unless it is renewed."""
        answer = await self._ask("/v3/lease/grant", {"TTL": str(max(1, round(seconds)))})
        with self._faults():
            return int(answer["ID"]), max(float(int(answer["TTL"])), 1.0)

    async def renew(self, lease: int) -> bool:
        """Whether the lease lasts on; False where it has ended."""
        answer = await self._ask("/v3/lease/keepalive", {"ID": str(lease)})
        with self._faults():
            return int(answer["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        """Ends a lease, and with it every key that was written under it."""
        await self._ask("/v3/lease/revoke", {"ID": str(lease)})

    async def put(self, key: str, value: bytes, lease: int, *, over: Entry | None) -> Entry | None:
        """Writes the key if it still is as `over` (None: if there is none); else what is there instead."""
        name = _b64(key)
        if over is None:
            compare: dict[str, Any] = {"key": name, "target": "CREATE", "create_revision": "0"}
        else:
            compare = {"key": name, "target": "MOD", "mod_revision": str(over.revision)}
        written = {"key": name, "value": base64.b64encode(value).decode(), "lease": str(lease)}
        answer = await self._ask(
            "/v3/kv/txn",
            {
                "compare": [compare],
                "success": [{"requestPut": written}],
                "failure": [{"requestRange": {"key": name}}],
            },
        )
        with self._faults():
            if answer.get("succeeded"):
                return None
            (found,) = answer["responses"]
            kvs = found["response_range"].get("kvs", [])
            return _entry(kvs[0]) if kvs else Entry(key, None, 0)

    async def watch(self, prefix: str, since: int) -> AsyncGenerator[list[Entry], None]:
        """Changes below `prefix` from revision `since` on, as they come; first an empty list, once it watches.

        Ends by `EtcdFault` only: the connection broke, or the revision is no longer kept.
        """
        question = {
            "create_request": {
                "key": _b64(prefix),
                "range_end": _b64(_after(prefix)),
                "start_revision": str(since),
            }
        }
        # No bound on the whole: once it watches, whether the member still lives is seen by the lease.
        patient = self._aiohttp.ClientTimeout(sock_connect=self._timeout)
        with self._faults():
            async with (
                asyncio.timeout(self._timeout) as begins,
                self._post("/v3/watch", question, patient) as response,
            ):
                async for line in _lines(response):
                    begins.reschedule(None)
                    result = _object(line)["result"]
                    if result.get("canceled"):
                        why = result.get("cancel_reason") or "no reason"
                        raise EtcdFault("etcd ended the watch", got=_plain(str(why)))
                    yield [_event(event) for event in result.get("events", [])]
        raise EtcdFault("the connection to etcd ended", peer=self.member)

    # -- below -----------------------------------------------------------------------------------------

    async def _ask(self, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        fresh = await self._sign_in()
        try:
            return await self._once(path, question)
        except EtcdFault:
            # A token ends, by its age or with the member that gave it, and that is no fault.
            if fresh or self._token or not await self._sign_in():
                raise
        return await self._once(path, question)

    async def _sign_in(self) -> bool:
        """Gets a token where one is needed; whether there is a new one."""
        if self._user is None or self._token:
            return False
        name, password = self._user
        answer = await self._once("/v3/auth/authenticate", {"name": name, "password": password})
        self._token = str(answer.get("token", ""))
        return True

    async def _once(self, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        limit = self._aiohttp.ClientTimeout(total=self._timeout)
        body = bytearray()
        with self._faults():
            async with self._post(path, question, limit) as response:
                async for piece in response.content.iter_chunked(1 << 16):
                    body += piece
                    if len(body) > SNAPSHOT:
                        raise EtcdFault("an answer of etcd is too long", got=f"more than {SNAPSHOT} bytes")
            return _object(body)

    @contextlib.asynccontextmanager
    async def _post(
        self, path: str, question: Mapping[str, Any], limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = self._aiohttp.ClientSession(trust_env=False)
        headers = {"Authorization": self._token} if self._token else {}
        # Not elsewhere, wherever an answer points: a question may hold the password.
        async with self._session.post(
            self.member + path,
            json=question,
            headers=headers,
            timeout=limit,
            ssl=self._tls or True,
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                if response.status == 401:
                    self._token = ""
                text = (await response.content.read(2000)).decode(errors="replace").strip()
                raise EtcdFault("etcd refuses", got=f"{response.status}: {_plain(text)}", peer=self.member)
            yield response

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Whatever goes wrong in asking is one kind of error, which names the member."""
        try:
            yield
        except TimeoutError as error:
            raise EtcdFault("etcd did not answer in time", peer=self.member, seconds=self._timeout) from error
        except asyncio.CancelledError:
            raise
        except EtcdFault:
            raise
        except self._errors as error:
            why = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
            raise EtcdFault(
                "etcd cannot be asked", got=_plain(str(why)) or repr(why), peer=self.member
            ) from error


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of a stream; one that is too long ends it."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        rest += piece
        *whole, last = rest.split(b"\n")
        for line in whole:
            if line.strip():
                yield bytes(line)
        rest = bytearray(last)
        if len(rest) > LINE:
            raise EtcdFault("a line of etcd's is too long", got=f"more than {LINE} bytes")


def _object(text: bytes | bytearray) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"no object: {type(found).__name__}")
    if "error" in found:  # of a stream: the status was sent before it
        raise EtcdFault("etcd refuses", got=_plain(str(found["error"])))
    return found


def _plain(text: str) -> str:
    """What somebody else wrote, as it may be shown in a terminal."""
    return "".join(c if c.isprintable() else " " for c in text[:2000])


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _after(prefix: str) -> str:
    """The first key behind all that begin with `prefix`, which ends in a character below 0x7f."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _entry(kv: Mapping[str, Any]) -> Entry:
    key = base64.b64decode(kv["key"]).decode(errors="replace")
    return Entry(key, base64.b64decode(kv.get("value", "")), int(kv.get("mod_revision", 0)))


def _event(event: Mapping[str, Any]) -> Entry:
    entry = _entry(event["kv"])
    return Entry(entry.key, None, entry.revision) if event.get("type") == "DELETE" else entry


def _context(authority: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Raises `ConfigError` naming the setting whose file cannot be used."""
    if key is not None and cert is None:
        raise ConfigError("a key needs its certificate", field="discovery.etcd_cert", got="nothing")
    field = "discovery.etcd_ca"
    try:
        context = ssl.create_default_context(cafile=authority)
        if cert is not None:
            field = "discovery.etcd_cert"
            context.load_cert_chain(cert, key, password=lambda: b"")  # rather than to ask at the terminal
    except (OSError, ValueError) as error:
        raise ConfigError("the file cannot be used for TLS", field=field, got=error) from error
    return context
