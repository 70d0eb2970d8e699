"""A directory in a real etcd: who is there, who has gone, and what holds while it is away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import ipaddress
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hawk.control.discovery import Registration
from hawk.control.etcd import EtcdPeers
from hawk.control.etcd_client import Entry, Etcd, EtcdFault
from hawk.errors import ConfigError, PeerUnreachable, UnknownPeer
from tests.etcd import MISSING, EtcdServer, etcd

pytestmark = pytest.mark.skipif(MISSING, reason="etcd is not installed (etcd-server)")

LIMIT = 30.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One that nobody stops; each test has a prefix of its own."""
    with etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"/{request.node.name}/"


@contextlib.asynccontextmanager
async def agent(
    name: str,
    *urls: str,
    prefix: str = "/hawk/",
    address: str = "tcp://127.0.0.1:7400",
    run: int = 1,
    lease: float = 2.0,
    peers: dict[str, str] | None = None,
    pattern: str = "",
) -> AsyncIterator[EtcdPeers]:
    """The directory as one agent has it."""

    def own() -> Registration:
        return Registration(address=address, generation=f"{run:016x}", role="both", transports=["tcp"])

    made = EtcdPeers(
        peers or {},
        pattern,
        etcd=Etcd(urls, timeout=5.0),
        prefix=prefix,
        name=name,
        own=own,
        lease=lease,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def becomes(good: Callable[[], bool], what: str) -> None:
    """What etcd tells comes when it comes."""
    try:
        async with asyncio.timeout(LIMIT):
            while not good():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never {what}") from None


async def test_agents_find_each_other_and_are_missed(shared: EtcdServer, prefix: str) -> None:
    async with agent("p0", shared.url, prefix=prefix, address="tcp://127.0.0.1:1") as p:
        async with agent("d0", shared.url, prefix=prefix, address="tcp://127.0.0.1:2") as d:
            await becomes(lambda: "d0" in p.registered() and "p0" in d.registered(), "met")
            assert await p.resolve("d0") == "tcp://127.0.0.1:2"
            assert await d.resolve("p0") == "tcp://127.0.0.1:1"
            assert d.registered()["p0"].transports == ["tcp"]
            assert set(p.registered()) == {"d0"}  # not itself
            assert p.configured() == {}
            assert p.state == "etcd, 2 agents"
        # It took its record out: nobody waits for the lease.
        await becomes(lambda: "d0" not in p.registered(), "gone")
        with pytest.raises(UnknownPeer):
            await p.resolve("d0")


async def test_what_is_configured_goes_before_what_is_registered(shared: EtcdServer, prefix: str) -> None:
    async with (
        agent("p0", shared.url, prefix=prefix, peers={"d0": "tcp://127.0.0.1:9"}) as p,
        agent("d0", shared.url, prefix=prefix, address="tcp://127.0.0.1:2"),
    ):
        await becomes(lambda: "d0" in p.registered(), "met")
        assert await p.resolve("d0") == "tcp://127.0.0.1:9"
        p.replace({"d1": "tcp://127.0.0.1:8"})
        assert await p.resolve("d0") == "tcp://127.0.0.1:2"
        assert await p.resolve("d1") == "tcp://127.0.0.1:8"
        p.replace({})
        with pytest.raises(UnknownPeer):
            await p.resolve("d1")


async def test_an_agent_that_comes_back_elsewhere_is_found_there(shared: EtcdServer, prefix: str) -> None:
    async with agent("p0", shared.url, prefix=prefix) as p:
        for port, run in ((2, 5), (3, 6)):
            async with agent("d0", shared.url, prefix=prefix, address=f"tcp://127.0.0.1:{port}", run=run):
                where = f"tcp://127.0.0.1:{port}"
                await becomes(
                    lambda where=where: "d0" in p.registered() and p.registered()["d0"].address == where,
                    where,
                )
                assert await p.resolve("d0") == where


async def test_an_agent_whose_place_was_taken_knows_it_and_comes_back(
    shared: EtcdServer, prefix: str
) -> None:
    """The second takes the first for its own earlier run: both have one name, and say one address."""
    async with agent("p0", shared.url, prefix=prefix) as watching:

        def there() -> str:
            return watching.registered()["d0"].generation if "d0" in watching.registered() else ""

        async with agent("d0", shared.url, prefix=prefix, run=5) as first:
            await becomes(lambda: first.state == "etcd, 2 agents", "registered")
            async with agent("d0", shared.url, prefix=prefix, run=6) as second:
                await becomes(lambda: "not registered: another agent" in first.state, "noticed")
                await first._register()  # as it does again and again: what came later stays
                assert "not registered: another agent" in first.state
                assert int(there(), 16) == 6
                assert second.state == "etcd, 2 agents"
            await becomes(lambda: first.state == "etcd, 2 agents" and int(there() or "0", 16) == 5, "back")


async def test_a_name_has_one_agent(shared: EtcdServer, prefix: str) -> None:
    """The second waits until the first has gone; one at the same address is the next run of the first."""
    async with agent("p0", shared.url, prefix=prefix) as watching:
        async with agent("d0", shared.url, prefix=prefix, address="tcp://127.0.0.1:2", run=5) as first:
            await becomes(lambda: "d0" in watching.registered(), "registered")
            async with agent("d0", shared.url, prefix=prefix, address="tcp://127.0.0.1:3", run=6) as second:
                await becomes(lambda: "another agent is, under the name d0" in second.state, "refused")
                assert watching.registered()["d0"].address == "tcp://127.0.0.1:2"
                await first.close()
                await becomes(
                    lambda: (
                        "d0" in watching.registered()
                        and watching.registered()["d0"].address == "tcp://127.0.0.1:3"
                    ),
                    "taken over",
                )
                await becomes(lambda: second.state == "etcd, 2 agents", "said")
        # An agent that was killed and came back at its address does not wait for its own lease.
        stale = Etcd([shared.url])
        lease, _ = await stale.lease(600)
        value = b'{"address":"tcp://127.0.0.1:4","generation":"00000000000000aa"}'
        assert await stale.put(f"{prefix}agents/d1", value, lease, over=None) is None
        async with agent("d1", shared.url, prefix=prefix, address="tcp://127.0.0.1:4", run=7):
            await becomes(
                lambda: "d1" in watching.registered() and watching.registered()["d1"].generation[-1] == "7",
                "replaced",
            )
        await stale.revoke(lease)
        await stale.close()


async def test_a_record_that_is_taken_away_is_written_again(shared: EtcdServer, prefix: str) -> None:
    async with agent("d0", shared.url, prefix=prefix) as d, agent("p0", shared.url, prefix=prefix) as p:
        await becomes(lambda: "d0" in p.registered(), "registered")
        revision = p.registered()["d0"]
        other = Etcd([shared.url])
        await other._ask("/v3/kv/deleterange", _key(f"{prefix}agents/d0"))
        await becomes(lambda: d._there is None or p.registered().get("d0") is not revision, "taken away")
        await becomes(lambda: p.registered().get("d0") == revision, "written again")
        await other.close()


def _key(name: str) -> dict[str, str]:
    return {"key": base64.b64encode(name.encode()).decode()}


async def test_records_that_cannot_be_used_harm_nobody(shared: EtcdServer, prefix: str) -> None:
    other = Etcd([shared.url])
    lease, _ = await other.lease(600)
    good = {"address": "tcp://10.0.0.1:7400", "generation": "00000000000000aa", "later": [1, {"x": None}]}
    bad = {
        "junk": b"\xff{",
        "list": b"[]",
        "no-port": json.dumps(good | {"address": "tcp://10.0.0.1"}).encode(),
        "elsewhere": json.dumps(good | {"address": "ipc:///etc/passwd"}).encode(),
        "cursor": json.dumps(good | {"role": "\x1b[2J"}).encode(),
        "no run": json.dumps(good).encode(),
        "deep/er": json.dumps(good).encode(),
        "x" * 300: json.dumps(good).encode(),
    }
    for name, value in (bad | {"d7": json.dumps(good).encode()}).items():
        assert await other.put(f"{prefix}agents/{name}", value, lease, over=None) is None
    async with agent("p0", shared.url, prefix=prefix) as p:
        await becomes(lambda: p.up, "read")
        assert set(p.registered()) == {"d7"}
        assert f"{len(bad)} records cannot be used" in p.state
    await other.revoke(lease)
    await other.close()


async def test_while_it_is_away(tmp_path: Path) -> None:
    """What it said stays true; who asks for somebody else waits for it, and then gets what it says."""
    with etcd(tmp_path) as server:
        async with (
            agent("p0", server.url, address="tcp://127.0.0.1:1") as p,
            agent("d0", server.url, address="tcp://127.0.0.1:2"),
        ):
            await becomes(lambda: "d0" in p.registered(), "met")
            server.stop()
            await becomes(lambda: not p.up, "noticed")
            assert "etcd away for" in p.state
            assert await p.resolve("d0") == "tcp://127.0.0.1:2"
            assert await p.resolve("d9", "tcp://127.0.0.1:9") == "tcp://127.0.0.1:9"  # a ticket's address
            with pytest.raises(PeerUnreachable, match="the directory is away") as told:
                await p.resolve("d9", wait=0.05)
            assert told.value.field == "discovery.etcd"
            waiting = asyncio.get_running_loop().create_task(p.resolve("d1", wait=LIMIT))
            server.start()
            async with agent("d1", server.url, address="tcp://127.0.0.1:3"):
                with contextlib.suppress(UnknownPeer):  # it was back before d1 was
                    assert await waiting == "tcp://127.0.0.1:3"
                await becomes(lambda: {"d0", "d1"} <= set(p.registered()), "all back")
                assert await p.resolve("d1") == "tcp://127.0.0.1:3"


async def test_a_member_that_stands_still_is_left_for_the_next(tmp_path: Path, shared: EtcdServer) -> None:
    """Its connection stays; that nothing comes over it any more shows in the lease."""
    with etcd(tmp_path) as server:
        made = EtcdPeers(
            {},
            etcd=Etcd([server.url, shared.url], timeout=0.5),
            prefix="/still/",
            name="p0",
            own=lambda: Registration(address="tcp://127.0.0.1:1", generation="0" * 16),
            lease=2.0,
        )
        await made.start()
        try:
            await becomes(lambda: made.up, "up")
            server.send(signal.SIGSTOP)
            await becomes(lambda: not made.up, "noticed")
            await becomes(lambda: made.up, "elsewhere")
            assert made._etcd.member == shared.url
        finally:
            server.send(signal.SIGCONT)
            await made.close()


async def test_what_the_client_says_of_faults(shared: EtcdServer) -> None:
    client = Etcd([shared.url])
    with pytest.raises(EtcdFault, match="etcd refuses"):
        await client.put("/k", b"v", 12345, over=None)  # no such lease
    with pytest.raises(EtcdFault, match="etcd refuses"):
        await client._ask("/v3/nothing", {})
    assert not await client.renew(12345)
    lease, lasts = await client.lease(2)
    assert lasts >= 2
    assert await client.put("/k", b"v", lease, over=None) is None
    there = await client.put("/k", b"w", lease, over=None)
    assert isinstance(there, Entry)
    assert there.value == b"v"
    assert await client.put("/k", b"w", lease, over=there) is None
    assert (await client.put("/k", b"x", lease, over=there)).value == b"w"  # type: ignore[union-attr]
    changes = client.watch("/", 1)
    assert await anext(changes) == []
    assert [entry.value for entry in await anext(changes)][:1] != [None]
    await changes.aclose()
    await client.revoke(lease)
    await client.close()
    nowhere = Etcd(["http://127.0.0.1:9"])
    with pytest.raises(EtcdFault, match=r"cannot be asked.*127\.0\.0\.1:9"):
        await nowhere.read("/")
    await nowhere.close()


async def test_a_user_with_a_password(tmp_path: Path) -> None:
    with etcd(tmp_path) as server:
        root = Etcd([server.url])
        await root._ask("/v3/auth/user/add", {"name": "root", "password": "secret"})
        await root._ask("/v3/auth/role/add", {"name": "root"})
        await root._ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        await root._ask("/v3/auth/enable", {})
        with pytest.raises(EtcdFault, match="etcd refuses"):
            await root.read("/")
        await root.close()
        wrong = Etcd([server.url], user=("root", "guess"))
        with pytest.raises(EtcdFault, match="etcd refuses") as told:
            await wrong.read("/")
        assert "guess" not in str(told.value)
        await wrong.close()
        right = Etcd([server.url], user=("root", "secret"))
        assert await right.read("/")
        right._token = "gone.1"  # as after a restart of the server
        assert await right.read("/")
        assert right._token != "gone.1"
        await right.close()


async def test_tls_with_certificates_on_both_sides(tmp_path: Path) -> None:
    made = authority(tmp_path)
    arguments = [
        *("--cert-file", str(made / "server.pem"), "--key-file", str(made / "server.key")),
        *("--client-cert-auth", "--trusted-ca-file", str(made / "ca.pem")),
    ]
    with etcd(tmp_path, arguments, scheme="https") as server:
        good = Etcd([server.url], tls=(made / "ca.pem", made / "client.pem", made / "client.key"))
        assert await good.read("/")
        await good.close()
        for tls in ((made / "ca.pem", None, None), (None, made / "client.pem", made / "client.key")):
            bad = Etcd([server.url], tls=tls)
            with pytest.raises(EtcdFault, match="cannot be asked"):
                await bad.read("/")
            await bad.close()
    with pytest.raises(ConfigError, match=r"discovery\.etcd_cert"):
        Etcd(["https://127.0.0.1:1"], tls=(made / "ca.pem", made / "client.pem", made / "server.key"))


def authority(folder: Path) -> Path:
    """ca.pem, and server and client with their keys, for 127.0.0.1."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd of a test")])
    root = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)

    def sign(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> bytes:
        builder = (
            x509.CertificateBuilder(subject_name=subject, issuer_name=name, public_key=key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if not ca:
            here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([here]), critical=False)
        return builder.sign(root, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (folder / "ca.pem").write_bytes(sign(name, root, ca=True))
    for one in ("server", "client"):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)])
        (folder / f"{one}.pem").write_bytes(sign(subject, key, ca=False))
        (folder / f"{one}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return folder
