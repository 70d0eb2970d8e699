"""The one place where ZeroMQ sockets are made.

Left to itself ZeroMQ waits for ever at exit, queues without limit, drops what it cannot deliver and lets anybody
in.  Every socket from here lingers not, has high-water marks, tells what it cannot deliver, gives up on peers
that never finish a handshake, and over TCP speaks CURVE unless the configuration says insecure.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from hawk.control.keys import KeyPair, is_public_key
from hawk.control.local import LocalListener, listen, socket_path
from hawk.control.monitor import WATCHED
from hawk.control.spare import shortage
from hawk.control.zap import ZAP_DOMAIN, Zap
from hawk.errors import Busy, ConfigError, ControlError, InvalidArgument, PeerLost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Checked here because ZeroMQ takes ports modulo 65536.
_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+(%\w+)?\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")


# Plain integers: combining pyzmq's flags anew for each frame costs more than passing a small frame on.
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a socket.  Queues count messages per peer, `frame_bytes` bytes, the others seconds."""

    send_queue: int = 256
    receive_queue: int = 256
    frame_bytes: int = 4 << 20
    handshake: float = 5.0
    heartbeat: float = 2.0
    heartbeat_timeout: float = 10.0
    reconnect_first: float = 0.05
    reconnect_most: float = 1.0
    busy_retry: float = 0.05
    """What `Busy` suggests to wait."""


class Endpoint:
    """One ROUTER or DEALER socket, bound or connected.  Made by `Sockets`.

    `raw` is the plain ZeroMQ socket, `address` where it is bound (with the port that was chosen for port 0) or
    connected, `authenticated` whether messages on it carry the sender's public key as their user id.  `events` is
    where a DEALER tells what happens to its connection (`Monitor`).
    """

    def __init__(
        self,
        raw: zmq.Socket[bytes],
        address: str,
        limits: Limits,
        *,
        authenticated: bool,
        listener: LocalListener | None = None,
        events: zmq.Socket[bytes] | None = None,
    ) -> None:
        self.raw = raw
        self.events = events
        self.address = address
        self.limits = limits
        self.authenticated = authenticated
        self._listener = listener
        self._most = limits.frame_bytes
        # What pyzmq puts before it, for kinds of sockets that HAWK has none of, costs as much as a small frame.
        self._send = super(zmq.Socket, raw).send

    @property
    def listener(self) -> LocalListener | None:
        """The listening socket behind an `ipc://` address."""
        return self._listener

    def send(self, frames: Sequence[bytes], identity: bytes | None = None) -> None:
        """Queues one message, on a ROUTER for the peer `identity`.  Never waits, never drops.

        On a DEALER at most two frames: ZeroMQ takes the first back only if the one that fails is the last.
        Raises `Busy` if the queue is full (on a DEALER also if there is no connection), `PeerLost` if a ROUTER
        has no such peer (any more), `InvalidArgument` for a frame above the limit, and `ControlError` if the
        socket is closed.  Call `poke` of the socket's receive loop afterwards.
        """
        largest = max(map(len, frames))
        if largest > self._most:
            # The far side would answer by ending the connection, again and again, and would not say why.
            raise InvalidArgument(
                "the message is too large to send",
                field="message",
                got=f"{largest} bytes",
                expected=f"at most {self.limits.frame_bytes}",
            )
        send = self._send
        try:
            if identity is not None:
                send(identity, _MORE)
            for part in frames[:-1]:
                send(part, _MORE)
            send(frames[-1], _LAST)
        except zmq.Again:
            raise Busy(
                "the peer does not take messages as fast as they are sent",
                retry_after=self.limits.busy_retry,
                address=self.address,
            ) from None
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost("the peer is not connected any more", address=self.address) from None
            raise ControlError(f"cannot send: {error.strerror}", address=self.address) from error

    def reconnect(self) -> None:
        """Connects a DEALER anew.

        ZeroMQ connects again by itself after a connection was refused or broke, but never after the far side
        broke the protocol or refused our key, as one does that is just being set up.
        """
        if self.raw.closed:
            return
        # There is nothing to disconnect from if ZeroMQ gave up altogether.
        with contextlib.suppress(zmq.ZMQError):
            self.raw.disconnect(self.address)
        self.raw.connect(self.address)

    def close(self) -> None:
        """Closes the socket; what is still queued is dropped.  Safe to call twice.

        An ipc address is free at once, a TCP port as soon as ZeroMQ's I/O thread got to it.
        """
        if self._listener is not None:
            self._listener.closing()
        if self.events is not None and not self.events.closed:
            # First: ZeroMQ's thread would wait for ever for somebody to read what the socket's end has to tell.
            if not self.raw.closed:
                with contextlib.suppress(zmq.ZMQError):
                    self.raw.disable_monitor()
            self.events.close(linger=0)
        if not self.raw.closed:
            self.raw.close(linger=0)
        if self._listener is not None:
            self._listener.close()


class Sockets:
    """Makes the sockets of one process and owns their ZeroMQ context.

    keys      this side's CURVE pair; without it TCP works with `insecure` only
    insecure  whether TCP may go without CURVE where there are no keys
    """

    def __init__(
        self, *, keys: KeyPair | None = None, insecure: bool = False, limits: Limits | None = None
    ) -> None:
        self.keys = keys
        self.insecure = insecure
        self.limits = limits or Limits()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.zap: Zap | None = None
        self._endpoints: list[Endpoint] = []

    def authorise(self, peers: Mapping[str, str]) -> None:
        """Sets which public keys (by peer name) CURVE routers admit; may be called again to change them.

        The first call starts the authenticator on the running event loop.
        """
        if self.zap is None:
            self.zap = Zap(self.context)
            self.zap.start()
        self.zap.authorise(peers)

    def router(self, address: str, *, field: str = "agent.control") -> Endpoint:
        """A ROUTER bound to `tcp://HOST:PORT` (port 0: any free one) or `ipc:///FOLDER/NAME`.

        Raises `ConfigError` for an address that cannot be right or TCP that would be open to all, and
        `ControlError` for one that is in use or not this machine's.  `field` names the setting in errors.
        """
        secure = self._secure(address, field)
        if secure and self.zap is None:
            self.authorise({})  # nobody may come in, rather than anybody
        raw = self._make(zmq.ROUTER, address)
        listener: LocalListener | None = None
        try:
            raw.router_mandatory = True
            # A peer that reconnects keeps its identity, and may come before its old connection is known to be
            # dead.  Identities are random and secret (see `dealer`), so nobody takes over another's.
            raw.router_handover = True
            if secure:
                assert self.keys is not None
                raw.curve_server = True
                raw.curve_publickey = self.keys.public.encode("ascii")
                raw.curve_secretkey = self.keys.secret.encode("ascii")
                raw.zap_domain = ZAP_DOMAIN
                raw.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            if address.startswith("ipc://"):
                # ZeroMQ would remove whatever file is there, a live agent's too, so the socket is made here.
                listener = listen(socket_path(address, field=field), socket.SOCK_STREAM, field=field)
                raw.setsockopt(zmq.USE_FD, listener.give())
            raw.bind(address)
        except zmq.ZMQError as error:
            raw.close(linger=0)
            if listener is not None:
                listener.close()
            raise _bind_error(address, field, error) from error
        except BaseException:
            raw.close(linger=0)
            raise
        bound = raw.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        actual = bound.rstrip(b"\0").decode()
        return self._keep(Endpoint(raw, actual, self.limits, authenticated=secure, listener=listener))

    def dealer(self, address: str, *, server_key: str | None = None, field: str = "address") -> Endpoint:
        """A DEALER that connects to `address`, now and again for as long as it is open.

        `server_key` is the public key that the far side must own.  Raises `ConfigError` for an address that
        cannot be right, and for TCP without both sides' keys unless insecure.
        """
        secure = self._secure(address, field)
        if secure and server_key is None:
            raise ConfigError(
                "the peer's public key is not known",
                field=field,
                got=address,
                hint="Add the peer to the file that security.peers_file names",
            )
        if server_key is not None and not is_public_key(server_key):
            raise ConfigError("this is no public key", field=field, got=repr(server_key)[:80])
        raw = self._make(zmq.DEALER, address)
        events: zmq.Socket[bytes] | None = None
        try:
            # The identity lasts as long as the socket, across reconnects; it starts with no zero byte, which
            # is ZeroMQ's own, and is never told to anybody but the far side.
            raw.routing_id = b"h" + secrets.token_bytes(16)
            # Nothing is queued for a connection that is not there: it would be delivered to who knows whom,
            # who knows when.
            raw.immediate = True
            if secure:
                assert self.keys is not None
                assert server_key is not None
                raw.curve_publickey = self.keys.public.encode("ascii")
                raw.curve_secretkey = self.keys.secret.encode("ascii")
                raw.curve_serverkey = server_key.encode("ascii")
            if address.startswith("ipc://"):
                socket_path(address, field=field)
            # Before it connects: a handshake takes less than a millisecond, and whoever begins to listen after it
            # would never learn that there is a connection.
            events = raw.get_monitor_socket(WATCHED)
            events.linger = 0
            raw.connect(address)
        except zmq.ZMQError as error:
            _close(raw, events)
            raise ConfigError(
                f"cannot connect to the address: {error.strerror}", field=field, got=address
            ) from error
        except BaseException:
            _close(raw, events)
            raise
        return self._keep(Endpoint(raw, address, self.limits, authenticated=False, events=events))

    def close(self) -> None:
        """Closes every socket that came from here, and the context.  Safe to call twice."""
        for endpoint in self._endpoints:
            endpoint.close()
        self._endpoints.clear()
        if self.zap is not None:
            self.zap.close()
            self.zap = None
        # Also closes what a link left open; `term` alone would wait for it for ever.
        self.context.destroy(linger=0)

    def _keep(self, endpoint: Endpoint) -> Endpoint:
        self._endpoints = [kept for kept in self._endpoints if not kept.raw.closed]
        self._endpoints.append(endpoint)
        return endpoint

    def _secure(self, address: str, field: str) -> bool:
        """Whether CURVE is used at this address; raises `ConfigError` if it must be and cannot."""
        if address.startswith("ipc://"):
            return False
        match = _TCP.fullmatch(address)
        if match is None or int(match["port"]) > 65_535:
            raise ConfigError(
                "this is no control address",
                field=field,
                got=address,
                expected="tcp://HOST:PORT or ipc:///FOLDER/NAME",
            )
        if self.keys is not None:
            return True
        if not self.insecure:
            raise ConfigError(
                "a TCP control socket needs CURVE keys",
                field=field,
                got=address,
                hint="Set security.key_file and security.peers_file (`hawk keys new` makes a pair), or say "
                "agent.insecure = true on a network that you trust",
            )
        return False

    def _make(self, kind: int, address: str) -> zmq.Socket[bytes]:
        limits = self.limits
        short = shortage()
        if short is not None:
            raise Busy(
                f"too few descriptors are left for another connection: {short}",
                retry_after=1.0,
                address=address,
            )
        raw = self.context.socket(kind)
        raw.linger = 0
        raw.sndhwm = limits.send_queue
        raw.rcvhwm = limits.receive_queue
        raw.maxmsgsize = limits.frame_bytes
        raw.handshake_ivl = _milliseconds(limits.handshake)
        raw.connect_timeout = _milliseconds(limits.handshake)
        raw.heartbeat_ivl = _milliseconds(limits.heartbeat)
        raw.heartbeat_timeout = _milliseconds(limits.heartbeat_timeout)
        raw.heartbeat_ttl = _milliseconds(limits.heartbeat_timeout)
        raw.reconnect_ivl = _milliseconds(limits.reconnect_first)
        raw.reconnect_ivl_max = _milliseconds(limits.reconnect_most)
        # With it ZeroMQ would write IPv4 addresses as mapped ones, which nobody would know again.
        raw.ipv6 = "[" in address
        return raw


def _close(*sockets: zmq.Socket[bytes] | None) -> None:
    for raw in sockets:
        if raw is not None:
            raw.close(linger=0)


def _milliseconds(seconds: float) -> int:
    # 0 would mean "never" to ZeroMQ, and a high-water mark of 0 "no limit"; neither is ever meant here.
    return max(1, round(seconds * 1000))


def _bind_error(address: str, field: str, error: zmq.ZMQError) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return ControlError(
            "the address is in use",
            field=field,
            got=address,
            hint="Stop what listens there, or choose another port (0 takes any free one)",
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return ControlError("this machine has no such address", field=field, got=address)
    if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT):
        return ConfigError(
            "this is no address to listen at", field=field, got=address, expected="tcp://HOST:PORT"
        )
    return ControlError(f"cannot listen at the address: {error.strerror}", field=field, got=address)
