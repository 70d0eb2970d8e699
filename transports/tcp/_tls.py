"""TLS for data connections: both sides show certificates of one authority, and the reader also pins the server's.

The control plane tells the reader the fingerprint of the certificate that the serving agent has, in its endpoint.
So a connection leads to that agent and no other, although all certificates come from the same authority and none
has to name a host.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument, PeerUnreachable
from hawk.retile.native import copy_segments
from hawk.transports._vectors import Vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.memory.region import I64

_STAGE = 256 << 10
"""Bytes gathered before they are encrypted, or decrypted before they are dealt out: 16 records, and small enough to
stay in a core's own cache."""

_ONE_PLACE = 64 << 10
"""Bytes in one place from which they need no gathering."""


class _Sealed(ssl.SSLSocket):
    """Closes itself where it is made over a connection that the peer has reset meanwhile.

    `wrap_socket` first takes the descriptor and then asks for the peer's name; where that fails, it raises and leaves
    what it has made open, out of its caller's reach.
    """

    def getpeername(self) -> Any:
        try:
            return super().getpeername()
        except OSError as error:
            if hasattr(self, "_connected"):  # set last: all is made, and its owner closes it
                raise
            self.close()
            raise ConnectionAbortedError("the peer has left") from error


class Tls:
    """Contexts of both sides, and the fingerprint by which peers know this one.

    Raises `InvalidArgument` naming the setting whose file cannot be read, is no certificate, or does not fit the
    others; and for a private key that others can read.
    """

    def __init__(self, cert: Path | str, key: Path | str, authority: Path | str) -> None:
        cert, key = Path(cert), Path(key)
        _check_private(key)
        self.fingerprint = _fingerprint_of(cert)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False  # the fingerprint says more than a name would
        server.num_tickets = 0  # data connections stay; nobody comes back with a ticket
        for context in (server, client):
            context.sslsocket_class = _Sealed
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(authority)
            except (OSError, ValueError) as error:
                raise _bad("tls_ca", Path(authority), error, "certificates in PEM") from error
            try:
                context.load_cert_chain(cert, key)
            except (OSError, ValueError) as error:
                raise _bad(
                    "tls_key", key, error, f"the private key of {cert}, in PEM, unencrypted"
                ) from error
        self._server, self._client = server, client

    def adopt(self, other: Tls) -> bool:
        """Uses what `other` has read for connections from now on; whether the fingerprint is another."""
        changed = other.fingerprint != self.fingerprint
        self._server, self._client, self.fingerprint = other._server, other._client, other.fingerprint
        return changed

    def welcome(self, sock: socket.socket) -> ssl.SSLSocket:
        """The serving side of an accepted connection; `do_handshake` is still to be called."""
        return self._server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def call(self, sock: socket.socket) -> ssl.SSLSocket:
        """The reading side of a connection; `shake` is still to be called."""
        return self._client.wrap_socket(sock, do_handshake_on_connect=False)


def shake(sock: ssl.SSLSocket, fingerprint: str, peer: str) -> None:
    """The reader's handshake.  Raises `PeerUnreachable` for a peer that is not the one with this fingerprint."""
    with refusals(peer):
        sock.do_handshake()
    shown = sock.getpeercert(binary_form=True)
    if shown is None or hashlib.sha256(shown).hexdigest() != fingerprint:
        raise PeerUnreachable(
            "whoever listens there has another certificate than the peer said",
            peer=peer,
            hint="The peer was restarted with a new certificate, or somebody else answers in its place",
        )


@contextlib.contextmanager
def refusals(peer: str) -> Iterator[None]:
    """Turns what TLS says when two sides do not fit into `PeerUnreachable`, naming the setting."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise PeerUnreachable(
            "the peer's certificate is not of our authority, or not valid now",
            field="transport.tcp.tls_ca",
            got=error.verify_message,
            peer=peer,
        ) from error
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            raise
        raise PeerUnreachable(
            "the peer refuses our certificate",
            field="transport.tcp.tls_cert",
            got=error.reason,
            expected="one of the authority that transport.tcp.tls_ca names there",
            peer=peer,
        ) from error


def objection(ours: str, theirs: str | None, host: str) -> str | None:
    """Why two sides cannot talk; `ours` and `theirs` are fingerprints, ours empty and theirs None without TLS."""
    if ours and theirs is None:
        return f"transport.tcp.tls_cert: this side speaks TLS only, and the peer at {host} speaks none"
    if theirs is not None and not ours:
        return (
            f"transport.tcp.tls_cert: the peer at {host} speaks TLS only; set transport.tcp.tls_cert, tls_key and "
            "tls_ca here"
        )
    if theirs is not None and (len(theirs) != 64 or theirs.strip("0123456789abcdef")):
        return "the peer's endpoint has no fingerprint of a certificate"
    return None


def _check_private(key: Path) -> None:
    try:
        mode = os.stat(key).st_mode
    except OSError as error:
        raise _bad("tls_key", key, error, "a private key in PEM") from error
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidArgument(
            "others can read the private key",
            field="transport.tcp.tls_key",
            got=f"{key} with mode {stat.S_IMODE(mode):04o}",
            expected="mode 0600",
        )


def _fingerprint_of(cert: Path) -> str:
    try:
        text = cert.read_text("ascii")
        begin = text.index(ssl.PEM_HEADER)
        end = text.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(text[begin:end])).hexdigest()
    except (OSError, ValueError) as error:
        raise _bad("tls_cert", cert, error, "a certificate in PEM") from error


def _bad(setting: str, path: Path, error: Exception, expected: str) -> InvalidArgument:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return InvalidArgument(
        "cannot be used for TLS",
        field=f"transport.tcp.{setting}",
        got=f"{path}: {reason}",
        expected=expected,
    )


# -- bytes -------------------------------------------------------------------------------------------------------


def vectors(sock: socket.socket, address: I64, nbytes: I64) -> Vectors | SealedVectors:
    """Places in memory to fill from a connection, or to send: through TLS where that is what the connection speaks."""
    return (SealedVectors if isinstance(sock, ssl.SSLSocket) else Vectors)(address, nbytes)


class SealedVectors:
    """As `Vectors`, through TLS: many small places by way of a stage, since a record takes one buffer."""

    __slots__ = ("_address", "_begin", "_stage", "done", "total")

    def __init__(self, address: I64, nbytes: I64) -> None:
        self._address = address
        self._begin = np.concatenate((np.zeros(1, np.int64), np.cumsum(nbytes)))
        self._stage = np.empty(0, np.uint8)
        self.done = 0
        self.total = int(self._begin[-1])

    def send(self, sock: socket.socket, limit: int) -> None:
        """Sends up to `limit` bytes.  Raises `OSError`."""
        end = min(self.done + limit, self.total)
        while self.done < end:
            view = self._one_place(end)
            if view is None:
                at, place, nbytes = self._places(min(self.done + _STAGE, end))
                view = self._staged(int(nbytes.sum()))
                copy_segments(self._stage_at(), np.zeros(len(at), np.int32), place, 0, at, nbytes)
            sock.sendall(view)
            self.done += len(view)

    def receive(self, sock: socket.socket, limit: int) -> None:
        """Receives up to `limit` bytes, all of them unless the far side ends.  Raises `OSError`."""
        end = min(self.done + limit, self.total)
        while self.done < end:
            view = self._one_place(end)
            if view is not None:
                _fill(sock, view)
            else:
                at, place, nbytes = self._places(min(self.done + _STAGE, end))
                view = self._staged(int(nbytes.sum()))
                _fill(sock, view)
                zero = np.zeros(1, np.int64)
                copy_segments(
                    zero, np.zeros(len(at), np.int32), at, int(self._stage.ctypes.data), place, nbytes
                )
            self.done += len(view)

    def _one_place(self, end: int) -> memoryview | None:
        """What is next, if it is much and all in one place."""
        row = int(self._begin.searchsorted(self.done, "right")) - 1
        nbytes = min(int(self._begin[row + 1]), end) - self.done
        if nbytes < min(_ONE_PLACE, end - self.done):
            return None
        address = int(self._address[row]) + self.done - int(self._begin[row])
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    def _places(self, end: int) -> tuple[I64, I64, I64]:
        """Addresses, offsets in the stage and lengths of the bytes from `done` to `end`."""
        first = int(self._begin.searchsorted(self.done, "right")) - 1
        last = int(self._begin.searchsorted(end, "left"))
        begin = np.maximum(self._begin[first:last], self.done)
        nbytes = np.minimum(self._begin[first + 1 : last + 1], end) - begin
        return self._address[first:last] + begin - self._begin[first:last], begin - self.done, nbytes

    def _staged(self, nbytes: int) -> memoryview:
        if not len(self._stage):
            self._stage = np.empty(_STAGE, np.uint8)
        return memoryview(self._stage.data)[:nbytes]

    def _stage_at(self) -> I64:
        return np.asarray([self._stage.ctypes.data], np.int64)


def _fill(sock: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if got == 0:
            raise ConnectionResetError("the far side ended in mid-stream")
        done += got
