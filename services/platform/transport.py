"""Addresses and security of connections: TLS, Kafka's SASL, Redis' URL; by default plaintext for loopback."""

import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlencode, urlsplit, urlunsplit

from pydantic import SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

# Kafka's security protocols.
SASL = ("SASL_PLAINTEXT", "SASL_SSL")
ENCRYPTED = ("SSL", "SASL_SSL")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files: this process's certificate, its key, and the trusted CA."""

    certificate: Path
    key: Path
    ca: Path

    def client_context(self) -> ssl.SSLContext:
        """Return a client's context. Raises: OSError for an invalid file, or a key of another certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.ca)
        # Without it, OpenSSL asks for a key's password on the terminal.
        context.load_cert_chain(self.certificate, self.key, password=lambda: b"")
        return context


def inference_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl": True,
        "root_certificates": str(tls.ca),
        "private_key": str(tls.key),
        "certificate_chain": str(tls.certificate),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaConnection:
    """Brokers and a client's credentials."""

    bootstrap: str
    security: str
    mechanism: str
    user: str
    password: SecretStr
    tls: Tls | None

    def __str__(self) -> str:
        return self.bootstrap


def check_address(value: str) -> str:
    """Return `value` if it is host:port, or raise ValueError."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("must be host:port with a port of 1-65535")
    return value


def check_replicas(value: str) -> str:
    """Return `value` if it is host:port, or IP addresses with ports, separated by commas; else raise ValueError."""
    parts = [check_address(part.strip()) for part in value.split(",")]
    if len(parts) > 1:
        for part in parts:
            ip_address(part.rpartition(":")[0].strip("[]"))
    if len(set(parts)) < len(parts):
        raise ValueError("names an address twice")
    return ",".join(parts)


REDIS_SCHEMES = ("redis", "rediss", "unix")
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")


def cluster_nodes(url: str) -> list[tuple[str, int]]:
    """Return the nodes in a cluster's URL; none for another URL."""
    scheme, _, rest = url.partition("://")
    if scheme not in CLUSTER_SCHEMES:
        return []
    addresses = urlsplit(f"//{rest}").netloc.rpartition("@")[2].split(",")
    found = (check_address(address).rpartition(":") for address in addresses)
    return [(host.strip("[]"), int(port)) for host, _, port in found]


def node_url(url: str) -> str:
    """Return the URL of a cluster's first node."""
    parts = urlsplit(url)
    user, at, addresses = parts.netloc.rpartition("@")
    first = f"{user}{at}{addresses.partition(',')[0]}"
    return urlunsplit(parts._replace(scheme=parts.scheme.partition("+")[0], netloc=first))


def check_redis_url(value: str) -> str:
    """Return `value` if it is the URL of a Redis server or cluster, or raise ValueError."""
    scheme, mark, _ = value.partition("://")
    if not mark or scheme not in (*REDIS_SCHEMES, *CLUSTER_SCHEMES):
        raise ValueError("must start with redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://")
    try:
        if cluster_nodes(value):
            if urlsplit(value).path not in ("", "/", "/0"):
                raise ValueError("a cluster has database 0 alone")
        else:
            urlsplit(value).port  # noqa: B018 - raises
    except ValueError as exc:
        raise ValueError(f"must be a URL ({exc})") from exc
    return value


class TransportSettings(BaseSettings):
    """Settings of processes and commands. A field's environment variable is its name with the prefix FRESHET_."""

    model_config = SettingsConfigDict(
        env_prefix="FRESHET_",
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        env_ignore_empty=True,
        # The invalid input may contain a password.
        hide_input_in_errors=True,
    )

    # PEM files: all are set or none. With them a process serves TLS. All processes but the gateway and the console then
    # require client certificates signed by the CA.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    redis_url: str = "redis://127.0.0.1:16379/0"
    kafka_bootstrap: str = "127.0.0.1:19092"
    kafka_security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_mechanism: Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"] = "SCRAM-SHA-512"
    kafka_user: str = ""
    # The password, or a file with it.
    kafka_password: SecretStr = SecretStr("")
    kafka_password_file: Path | None = None
    inference_server: str = "127.0.0.1:18001"
    inference_server_tls: bool = False

    @field_validator("inference_server")
    @classmethod
    def _address(cls, value: str) -> str:
        return check_address(value)

    @field_validator("kafka_bootstrap")
    @classmethod
    def _addresses(cls, value: str) -> str:
        for part in value.split(","):
            check_address(part.strip())
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        return check_redis_url(value)

    @field_validator("tls_cert", "tls_key", "tls_ca", "kafka_password_file")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                value.read_bytes()
            except OSError as exc:
                raise ValueError(f"must be a file that this user can read ({exc.strerror})") from exc
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        files = {"FRESHET_TLS_CERT": self.tls_cert, "FRESHET_TLS_KEY": self.tls_key, "FRESHET_TLS_CA": self.tls_ca}
        variables = ", ".join(f"{variable}={str(file or '')!r}" for variable, file in files.items())
        if any(files.values()) and not all(files.values()):
            raise ValueError(f"{variables} allowed: all three or none")
        if self.tls is not None:
            try:
                self.tls.client_context()
            except OSError as exc:
                raise ValueError(
                    f"{variables} allowed: PEM files of a certificate, its key without a password, and a CA ({exc})"
                ) from exc
        elif self.inference_server_tls:
            raise ValueError(
                "FRESHET_INFERENCE_SERVER_TLS='true' allowed: only with FRESHET_TLS_CA and its certificate"
            )
        return self

    @model_validator(mode="after")
    def _kafka_is_whole(self) -> Self:
        if self.kafka_password_file is not None and self.kafka_password.get_secret_value():
            raise ValueError("FRESHET_KAFKA_PASSWORD allowed: only without FRESHET_KAFKA_PASSWORD_FILE")
        kafka = self.kafka
        if kafka.security in SASL and not (kafka.user and kafka.password.get_secret_value()):
            raise ValueError(
                f"FRESHET_KAFKA_SECURITY={kafka.security!r} allowed: with FRESHET_KAFKA_USER, and "
                "FRESHET_KAFKA_PASSWORD or FRESHET_KAFKA_PASSWORD_FILE"
            )
        return self

    @property
    def tls(self) -> Tls | None:
        """This process's certificate; None means plaintext."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return Tls(certificate=self.tls_cert, key=self.tls_key, ca=self.tls_ca)

    @property
    def inference_tls(self) -> Tls | None:
        """The certificate for the inference server; None means plaintext."""
        return self.tls if self.inference_server_tls else None

    @property
    def kafka(self) -> KafkaConnection:
        password = self.kafka_password
        if self.kafka_password_file is not None:
            password = SecretStr(self.kafka_password_file.read_text(encoding="utf-8").rstrip("\r\n"))
        return KafkaConnection(
            bootstrap=self.kafka_bootstrap,
            security=self.kafka_security,
            mechanism=self.kafka_mechanism,
            user=self.kafka_user,
            password=password,
            tls=self.tls,
        )

    @property
    def redis(self) -> str:
        """The state store's URL; an encrypted one includes the certificates."""
        if self.tls is None or not self.redis_url.startswith(("rediss://", "rediss+cluster://")):
            return self.redis_url
        files = {"ssl_ca_certs": self.tls.ca, "ssl_certfile": self.tls.certificate, "ssl_keyfile": self.tls.key}
        parts = urlsplit(self.redis_url)
        # The URL's own parameters take precedence.
        query = "&".join(filter(None, (parts.query, urlencode(files))))
        return urlunsplit(parts._replace(query=query))
