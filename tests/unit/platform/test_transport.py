"""What the variables of TLS, Kafka and Redis become for the clients; a bad one is named, a password never."""

import ssl
from pathlib import Path

import pytest
from fakes import certificates
from pydantic import SecretStr
from redis.connection import parse_url

from services.encoder.config import EncoderSettings
from services.platform.config import ConfigError, ProcessSettings, environment_kafka, environment_tls, load_settings
from services.platform.stream.kafka import kafka_options
from services.platform.transport import cluster_nodes, node_url

PASSWORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.made(tmp_path_factory.mktemp("certificates"))


def name_files(monkeypatch: pytest.MonkeyPatch, certificate: Path, key: Path, ca: Path) -> None:
    for variable, file in (("CERT", certificate), ("KEY", key), ("CA", ca)):
        monkeypatch.setenv(f"FRESHET_TLS_{variable}", str(file))


def secured(monkeypatch: pytest.MonkeyPatch, security: str = "SASL_PLAINTEXT") -> None:
    for variable, value in (("SECURITY", security), ("USER", "freshet"), ("PASSWORD", PASSWORD)):
        monkeypatch.setenv(f"FRESHET_KAFKA_{variable}", value)


def test_without_variables_everything_is_plaintext() -> None:
    settings = load_settings(ProcessSettings)
    assert (settings.tls, settings.inference_tls, settings.redis) == (None, None, settings.redis_url)
    assert set(kafka_options(settings.kafka)) == {"bootstrap_servers", "kafka_client"}
    assert kafka_options("a:1,b:2")["bootstrap_servers"] == ["a:1", "b:2"]


def test_the_three_files_are_one_certificate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    name_files(monkeypatch, folder / "encoder.crt", folder / "encoder.key", folder / "ca.crt")
    assert environment_tls() == certificates.of(folder, "encoder")


def test_one_file_without_the_others_is_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FRESHET_TLS_CA", str(folder / "ca.crt"))
    with pytest.raises(ConfigError, match=r"FRESHET_TLS_CERT=''.*FRESHET_TLS_CA='.*ca.crt' allowed: all three or none"):
        load_settings(ProcessSettings)


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    name_files(monkeypatch, folder / "encoder.crt", folder / "nobody.key", folder / "ca.crt")
    with pytest.raises(ConfigError, match=r"FRESHET_TLS_KEY='.*nobody.key' allowed: .*No such file"):
        load_settings(ProcessSettings)


def test_the_key_of_another_certificate_and_a_file_without_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("not PEM")
    for certificate, key, ca in (
        (folder / "encoder.crt", folder / "gateway.key", folder / "ca.crt"),
        (folder / "encoder.crt", folder / "encoder.key", text),
        (text, folder / "encoder.key", folder / "ca.crt"),
    ):
        name_files(monkeypatch, certificate, key, ca)
        with pytest.raises(ConfigError, match="allowed: PEM files of a certificate, its key without a password"):
            load_settings(ProcessSettings)


def test_kafkas_clients_get_user_password_and_certificate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    secured(monkeypatch, "SASL_SSL")
    name_files(monkeypatch, folder / "encoder.crt", folder / "encoder.key", folder / "ca.crt")
    options = kafka_options(environment_kafka("broker:9093"))
    assert options["bootstrap_servers"] == ["broker:9093"]
    assert options["security_protocol"] == "SASL_SSL"
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("freshet", PASSWORD)
    assert options["ssl_context"].verify_mode == ssl.CERT_REQUIRED
    assert options["ssl_context"].check_hostname


def test_kafkas_password_comes_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secured(monkeypatch)
    file = tmp_path / "password"
    file.write_text("from a file\n")
    monkeypatch.delenv("FRESHET_KAFKA_PASSWORD")
    monkeypatch.setenv("FRESHET_KAFKA_PASSWORD_FILE", str(file))
    assert load_settings(ProcessSettings).kafka.password.get_secret_value() == "from a file"


@pytest.mark.parametrize("left_out", ["USER", "PASSWORD"])
def test_sasl_without_user_or_password_is_refused(monkeypatch: pytest.MonkeyPatch, left_out: str) -> None:
    secured(monkeypatch)
    monkeypatch.delenv(f"FRESHET_KAFKA_{left_out}")
    with pytest.raises(ConfigError, match=r"FRESHET_KAFKA_SECURITY='SASL_PLAINTEXT' allowed: with FRESHET_KAFKA_USER"):
        load_settings(ProcessSettings)


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    secured(monkeypatch)
    settings = load_settings(ProcessSettings)
    assert PASSWORD not in f"{settings!r} {settings.describe()} {settings.kafka!r} {settings.kafka}"
    monkeypatch.setenv("FRESHET_PORT", "no number")
    monkeypatch.setenv("FRESHET_KAFKA_SECURITY", "loud")
    with pytest.raises(ConfigError, match="FRESHET_KAFKA_SECURITY='loud' allowed: ") as refused:
        load_settings(ProcessSettings)
    assert PASSWORD not in f"{refused.value} {refused.value.__cause__}"
    with pytest.raises(ValueError, match="port") as built:
        EncoderSettings(kafka_user="")
    assert PASSWORD not in str(built.value)


def test_a_rediss_url_carries_the_certificate_to_the_client(folder: Path) -> None:
    given = certificates.settings_of(certificates.of(folder, "encoder"))
    settings = ProcessSettings(redis_url="rediss://me:secret@store:6380/2", **given)
    parsed = parse_url(settings.redis)
    assert (parsed["host"], parsed["username"], parsed["password"], parsed["db"]) == ("store", "me", "secret", 2)
    assert parsed["ssl_ca_certs"] == str(folder / "ca.crt")
    assert parsed["ssl_certfile"] == str(folder / "encoder.crt")
    assert parsed["ssl_keyfile"] == str(folder / "encoder.key")
    assert "secret" not in str(settings.describe())


def test_a_cluster_is_its_nodes_and_what_one_of_them_is_asked_with(folder: Path) -> None:
    given = {"tls_cert": folder / "encoder.crt", "tls_key": folder / "encoder.key", "tls_ca": folder / "ca.crt"}
    settings = ProcessSettings(redis_url="rediss+cluster://me:secret@one:7000,two:7001/0", **given)
    assert cluster_nodes(settings.redis) == [("one", 7000), ("two", 7001)]
    parsed = parse_url(node_url(settings.redis))
    assert (parsed["host"], parsed["port"], parsed["username"], parsed["password"]) == ("one", 7000, "me", "secret")
    assert parsed["ssl_ca_certs"] == str(folder / "ca.crt")
    assert settings.describe()["redis_url"] == "rediss+cluster://me:***@one:7000,two:7001/0"
    assert cluster_nodes("redis://one:7000/0") == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+cluster://one", "host:port"),
        ("redis+cluster://u:secret@one:7000,two", "host:port"),
        ("redis+cluster://one:7000,two:7001/1", "a cluster has database 0 alone"),
        ("redis://one:7000,two:7001", "must be a URL"),
        ("cluster://one:7000", r"redis\+cluster:// or rediss\+cluster://"),
    ],
)
def test_what_is_no_cluster_is_named(monkeypatch: pytest.MonkeyPatch, url: str, problem: str) -> None:
    monkeypatch.setenv("FRESHET_REDIS_URL", url)
    with pytest.raises(ConfigError, match=f"FRESHET_REDIS_URL=.*{problem}") as refused:
        load_settings(ProcessSettings)
    assert "secret" not in str(refused.value)


def test_what_a_redis_url_names_itself_counts(folder: Path) -> None:
    given = certificates.settings_of(certificates.of(folder, "encoder"))
    own = ProcessSettings(redis_url="rediss://store:6380/0?ssl_ca_certs=/own.crt", **given).redis
    assert parse_url(own)["ssl_ca_certs"] == "/own.crt"
    plain = ProcessSettings(redis_url="redis://store:6379/0", **given)
    assert plain.redis == plain.redis_url


def test_the_inference_server_is_shown_the_certificate_only_where_it_is_asked_for(folder: Path) -> None:
    given = certificates.settings_of(certificates.of(folder, "encoder"))
    assert ProcessSettings(**given).inference_tls is None
    assert ProcessSettings(inference_server_tls=True, **given).inference_tls == certificates.of(folder, "encoder")
    with pytest.raises(ValueError, match="FRESHET_INFERENCE_SERVER_TLS='true' allowed: only with"):
        ProcessSettings(inference_server_tls=True)


def test_a_secret_that_is_no_text_is_not_printed() -> None:
    with pytest.raises(ValueError, match="kafka_password") as refused:
        ProcessSettings(kafka_password=[PASSWORD])
    assert PASSWORD not in str(refused.value)
    assert SecretStr("") == ProcessSettings().kafka_password
