"""A certificate authority (CA) with a certificate for each process and each operator.

A certificate names its process, `localhost`, the loopback addresses and the given hosts. Only this module needs the
CA's key; store it where no process runs.
"""

import ipaddress
import os
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.contracts.processes import PROCESSES

# No server uses the operator's certificate: commands, Prometheus and other clients present it.
OPERATOR = "operator"
SERVERS = (*PROCESSES, "kafka", "redis", "inference-server")
NAMES = (*SERVERS, OPERATOR)
CA_DAYS = 3650
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Validity begins this long before a certificate's creation, because machines' clocks differ.
_EARLIER = timedelta(minutes=5)


class CertificatesError(ValueError):
    """The folder has other certificates than expected."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA: its certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, *, now: datetime | None = None) -> Self:
        """Return a new CA, valid for ten years."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Freshet CA")])
        may = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        made = (
            _begun(name, name, key.public_key(), now, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(may, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(made.sign(key, hashes.SHA256()), key)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the CA in `folder`. Raises: CertificatesError."""
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        except (OSError, ValueError, TypeError) as exc:
            raise CertificatesError(f"{folder} holds no CA: ca.crt and ca.key are needed ({exc})") from exc
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise CertificatesError(f"{folder}: ca.key is not the key of ca.crt")
        return cls(certificate, key)

    def issue(
        self, name: str, hosts: Collection[str] = (), *, days: int = 365, now: datetime | None = None
    ) -> tuple[bytes, bytes]:
        """Return a certificate and its key in PEM, which expire no later than the CA.

        The certificate is for clients and, except the operator's, for servers.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if name in SERVERS else [])]
        names = dict.fromkeys(_general(one) for one in (name, *_LOOPBACK, *hosts))
        may = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        begun = _begun(subject, self.certificate.subject, key.public_key(), now, days, self.certificate)
        made = (
            begun.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(may, critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return made.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), _pem(key)


def make_certificates(folder: Path, *, hosts: Collection[str] = (), days: int = 365, renew: bool = False) -> datetime:
    """Write the CA and all certificates into `folder`; return the earliest expiry.

    With `renew`, the existing CA issues new certificates and keys, for the previous and the given hosts.
    Raises: CertificatesError if the folder has certificates and renew is not set, or if renew is set and it has no CA.
    """
    files = (folder / f"{name}.{kind}" for name in ("ca", *NAMES) for kind in ("crt", "key"))
    if not renew and (there := next((path for path in files if path.exists()), None)):
        raise CertificatesError(f"{there} is there already")
    known = {name: [*hosts, *(_hosts(folder / f"{name}.crt") if renew else ())] for name in NAMES}
    authority = Authority.read(folder) if renew else Authority.make()
    issued = {name: authority.issue(name, known[name], days=days) for name in NAMES}
    folder.mkdir(parents=True, exist_ok=True)
    if not renew:
        _write(folder / "ca.key", _pem(authority.key), 0o600)
        _write(folder / "ca.crt", authority.certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    for name, (certificate, key) in issued.items():
        _write(folder / f"{name}.key", key, 0o600)
        _write(folder / f"{name}.crt", certificate, 0o644)
    return min(x509.load_pem_x509_certificate(certificate).not_valid_after_utc for certificate, _ in issued.values())


def _hosts(path: Path) -> list[str]:
    if not path.exists():
        return []
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as exc:
        raise CertificatesError(f"{path} is no certificate of `freshet certs` ({exc})") from exc
    return [str(name.value) for name in names]


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime | None,
    days: int,
    authority: x509.Certificate | None = None,
) -> x509.CertificateBuilder:
    now = now or datetime.now(UTC)
    end = now + timedelta(days=days)
    if authority is not None:
        end = min(end, authority.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(end)
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace `path` atomically; other users can never read a key."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
    aside.replace(path)
