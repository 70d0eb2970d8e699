"""Certificates for tcp with TLS: a small authority of one's own, and a certificate for each agent.

For clusters that have no authority yet.  Certificates from anywhere else do as well, if they may be used by servers
and clients alike: agents are both.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from hawk.control.keys import check_name, write_new
from hawk.errors import ConfigError, MissingDependency
from hawk.extras import install

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, Name

AUTHORITY = "ca"
"""Name of the authority's own files."""

DAYS = 730

_SLACK = dt.timedelta(hours=1)
"""Clocks of two machines may differ; a certificate is valid a little before it was made."""


def new_certificates(folder: Path, names: Sequence[str], *, days: int = DAYS) -> list[Path]:
    """Writes `NAME.pem` and `NAME-tls.key` (mode 0600) for each name, valid for `days`; returns the certificates.

    The authority is `ca.pem` and `ca-tls.key` in the same folder, made where neither is there, and valid ten times as
    long.  Whoever has its key can make agents: it has no business on their machines.

    Raises `MissingDependency` without the `cryptography` package, `ConfigError` for a name that is none, a file that
    is there already, or an authority that cannot be read.  Nothing is overwritten.
    """
    try:
        import cryptography  # noqa: F401 - whether it is there at all
    except ImportError as error:
        raise MissingDependency(
            "certificates are made with the cryptography package",
            got=error,
            hint=f"{install('tls')}, or make them with another tool",
        ) from error
    for name in names:
        check_name(name, "name")
        if name == AUTHORITY:
            raise ConfigError("this is the authority's own name", field="name", got=name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key = _authority(folder, days * 10)
    made = []
    for name in names:
        own = _new_key()
        made.append(_write(folder, name, _certificate(name, own, authority.subject, key, days), own))
    return made


def _authority(folder: Path, days: int) -> tuple[Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    pem, secret = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}-tls.key"
    if not pem.exists() and not secret.exists():
        own = _new_key()
        made = _certificate(AUTHORITY, own, None, own, days)
        _write(folder, AUTHORITY, made, own)
        return made, own
    try:
        certificate = x509.load_pem_x509_certificate(pem.read_bytes())
        key = serialization.load_pem_private_key(secret.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            "the authority cannot be read", field="directory", got=error, expected=f"{pem} and {secret}"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError("the authority's key is not its certificate's", field="directory", got=secret)
    return certificate, key


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    name: str, own: EllipticCurvePrivateKey, issuer: Name | None, key: EllipticCurvePrivateKey, days: int
) -> Certificate:
    """A certificate of the public half of `own`, signed with `key`; of an authority where there is no issuer."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = dt.datetime.now(dt.UTC)
    called = "HAWK authority" if issuer is None else name
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, called)])
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(of_issuer, critical=False)
        .add_extension(_usage(authority=issuer is None), critical=True)
    )
    if issuer is not None:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(key, hashes.SHA256())


def _usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(folder: Path, name: str, certificate: Certificate, key: EllipticCurvePrivateKey) -> Path:
    from cryptography.hazmat.primitives import serialization

    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem, private = folder / f"{name}.pem", folder / f"{name}-tls.key"
    write_new(private, secret.decode("ascii"), 0o600)
    try:
        write_new(pem, certificate.public_bytes(serialization.Encoding.PEM).decode("ascii"), 0o644)
    except BaseException:
        private.unlink(missing_ok=True)
        raise
    return pem
