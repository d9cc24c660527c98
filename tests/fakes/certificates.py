"""Certificates as `freshet certs` makes them, and as somebody else would."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from services.cli.certificates import Authority, make_certificates
from services.platform.transport import Tls


def made(folder: Path, hosts: Sequence[str] = ()) -> Path:
    """The folder, with everybody's certificates."""
    make_certificates(folder, hosts=hosts)
    return folder


def of(folder: Path, name: str) -> Tls:
    """What the process `name` is given."""
    return Tls(certificate=folder / f"{name}.crt", key=folder / f"{name}.key", ca=folder / "ca.crt")


def expired(folder: Path, name: str) -> Tls:
    """A certificate of the CA in `folder` that ended yesterday."""
    certificate, key = Authority.read(folder).issue(name, days=1, now=datetime.now(UTC) - timedelta(days=2))
    old = folder / "expired"
    old.mkdir(exist_ok=True)
    (old / f"{name}.crt").write_bytes(certificate)
    (old / f"{name}.key").write_bytes(key)
    return Tls(certificate=old / f"{name}.crt", key=old / f"{name}.key", ca=folder / "ca.crt")


def foreign(folder: Path, elsewhere: Path, name: str) -> Tls:
    """A certificate of another CA, for somebody who believes the one in `folder`."""
    other = of(made(elsewhere), name)
    return Tls(certificate=other.certificate, key=other.key, ca=folder / "ca.crt")


def settings_of(tls: Tls) -> dict[str, Path]:
    """The same as a process's settings."""
    return {"tls_cert": tls.certificate, "tls_key": tls.key, "tls_ca": tls.ca}
