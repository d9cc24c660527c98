"""Pseudonyms of users outside the encoder."""

from hashlib import blake2b
from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from services.platform.config import ConfigError, ProcessSettings

DEVELOPMENT_PSEUDONYM_KEY = "freshet-development"
# Separates several pseudonyms of one user.
PSEUDONYMS_BETWEEN = ","


class PseudonymSettings(ProcessSettings):
    """Settings of a process that writes pseudonyms."""

    # Key of the hash that replaces user ids in attributions, search clicks and exposures. After a change, the encoder's
    # list of earlier keys must contain the old key until `freshet backfill-attributions --rekey` has run.
    pseudonym_key: SecretStr = Field(
        default=SecretStr(DEVELOPMENT_PSEUDONYM_KEY), validation_alias="FRESHET_PSEUDONYM_KEY"
    )
    # Used if FRESHET_PSEUDONYM_KEY is not set.
    pseudonym_key_file: Path | None = Field(default=None, validation_alias="FRESHET_PSEUDONYM_KEY_FILE")

    @field_validator("pseudonym_key")
    @classmethod
    def _key(cls, value: SecretStr) -> SecretStr:
        check_key(value.get_secret_value())
        return value


def pseudonym_of(user_id: str, key: bytes) -> str:
    """Return a keyed hash, 128 bits in hex. key: 1-64 bytes."""
    return blake2b(user_id.encode(), key=key, digest_size=16).hexdigest()


def pseudonym_key(settings: PseudonymSettings) -> bytes:
    """Return the pseudonym key.

    Raises: ConfigError for a file without a key, or for the development key on a host that is not loopback.
    """
    key = settings.pseudonym_key.get_secret_value()
    if settings.pseudonym_key_file is not None and key == DEVELOPMENT_PSEUDONYM_KEY:
        key = read_key("FRESHET_PSEUDONYM_KEY_FILE", settings.pseudonym_key_file)
    if key == DEVELOPMENT_PSEUDONYM_KEY and not settings.is_on_loopback:
        raise ConfigError(
            f"FRESHET_PSEUDONYM_KEY={key!r}, which is public, allowed with FRESHET_HOST={settings.host!r}: "
            "a key of your own of 1-64 bytes; the public one only on a loopback address"
        )
    return key.encode()


def check_key(key: str) -> str:
    """Return the key if it is valid. Raises: ValueError."""
    if not 1 <= len(key.encode()) <= 64:
        raise ValueError("must be 1-64 bytes")
    return key


def read_key(variable: str, file: Path) -> str:
    """Return the key in a file named by `variable`. Raises: ConfigError."""
    try:
        return check_key(file.read_text(encoding="utf-8").strip())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it holds none"
        raise ConfigError(f"{variable}='{file}' allowed: a file of 1-64 bytes ({reason})") from exc
