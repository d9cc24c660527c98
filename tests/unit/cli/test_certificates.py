"""`freshet certs`: what it writes, what it refuses, and what a rotation keeps."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.cli.certificates import NAMES, Authority, make_certificates
from services.contracts.processes import PROCESSES
from tests.unit.cli.shell import facts, refused, shown


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())


def names(folder: Path, name: str) -> set[str]:
    held = certificate(folder, name).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return {str(one.value) for one in held.value}


def test_every_process_gets_a_certificate_that_names_it_loopback_and_the_hosts(tmp_path: Path) -> None:
    options = ("--host", "10.0.0.7", "--host", "freshet.example", "--days", "30")
    text = shown("certs", "--out", tmp_path, *options)
    for name in (*PROCESSES, "kafka", "redis", "inference-server", "operator"):
        expected = {name, "localhost", "127.0.0.1", "::1", "10.0.0.7", "freshet.example"}
        assert names(tmp_path, name) == expected
        assert f"FRESHET_TLS_CERT={tmp_path / name}.crt" in text
        certificate(tmp_path, name).verify_directly_issued_by(certificate(tmp_path, "ca"))
        left = certificate(tmp_path, name).not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=29) < left <= timedelta(days=30)


def test_keys_can_be_read_by_their_owner_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    keys = sorted(tmp_path.glob("*.key"))
    assert len(keys) == len(NAMES) + 1
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_json_names_the_variables_of_each_process(tmp_path: Path) -> None:
    assert facts("certs", "--out", tmp_path)["variables"]["encoder"] == {
        "FRESHET_TLS_CERT": str(tmp_path / "encoder.crt"),
        "FRESHET_TLS_KEY": str(tmp_path / "encoder.key"),
        "FRESHET_TLS_CA": str(tmp_path / "ca.crt"),
    }


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = refused(2, "certs", "--out", tmp_path)
    assert "is there already" in said
    assert "--renew" in said
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_rotation_keeps_the_ca_and_the_hosts_and_makes_everything_else_new(tmp_path: Path) -> None:
    make_certificates(tmp_path, hosts=["10.0.0.7"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shown("certs", "--out", tmp_path, "--renew", "--host", "second.example")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] == before[name]} == {"ca.crt", "ca.key"}
    assert {"10.0.0.7", "second.example"} <= names(tmp_path, "encoder")


def test_a_rotation_needs_the_ca_and_its_key(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / "ca.key").unlink()
    assert "holds no CA" in refused(2, "certs", "--out", tmp_path, "--renew")


def test_an_operators_certificate_is_a_clients_alone() -> None:
    authority = Authority.make()
    for name, uses in (
        ("operator", [ExtendedKeyUsageOID.CLIENT_AUTH]),
        ("gateway", [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
    ):
        made = x509.load_pem_x509_certificate(authority.issue(name)[0])
        assert list(made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == uses
