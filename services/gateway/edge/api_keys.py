"""API keys: one JSON file with each key's id, roles, rate, and the SHA-256 of its secret.

A secret is 256 random bits, so it needs no slow hash (scrypt, Argon2), which would cost each call milliseconds. The
file is always replaced whole.
"""

import fcntl
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from services.gateway.edge.roles import Role
from services.platform.config import ConfigError

# Scanners for leaked secrets recognise this prefix.
_PREFIX = "freshet_"
_MAX_RATE = 1_000_000


class ApiKey(BaseModel):
    """One key. sha256: the secret's digest in lower-case hexadecimal.

    requests_per_second: the long-term rate; None: unlimited. burst: most calls at once; None: as many as in a second.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    roles: Annotated[frozenset[Role], Field(min_length=1)]
    expires: AwareDatetime | None = None
    requests_per_second: float | None = Field(default=None, ge=0.001, le=_MAX_RATE, allow_inf_nan=False)
    burst: int | None = Field(default=None, ge=1, le=_MAX_RATE)


class _KeysFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    keys: tuple[ApiKey, ...]

    @model_validator(mode="after")
    def _each_is_one(self) -> Self:
        for field in ("id", "sha256"):
            values = [getattr(key, field) for key in self.keys]
            if len(set(values)) < len(values):
                raise ValueError(f"each {field} once, and {max(values, key=values.count)!r} is there twice")
        return self


def digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file, in its order.

    Raises: ConfigError with field, value (unless it may be a secret) and allowed values.
    """
    try:
        return _KeysFile.model_validate_json(path.read_bytes()).keys
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}; allowed: a keys file (`freshet keys create`)") from exc
    except ValidationError as exc:
        # The cause is dropped, because its text shows every value.
        raise ConfigError(f"{path}: {'; '.join(map(_explain, exc.errors()))}") from None


def create_key(path: Path, **fields: Any) -> str:
    """Add a key to the file, which need not exist; return its secret.

    Raises: ConfigError for an invalid field, a taken id, or an unusable file.
    """
    secret = _PREFIX + secrets.token_urlsafe(32)
    try:
        key = ApiKey(sha256=digest(secret.encode()).hex(), **fields)
    except ValidationError as exc:
        raise ConfigError("; ".join(map(_explain, exc.errors()))) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        keys = read_keys(path) if path.exists() else ()
        if any(other.id == key.id for other in keys):
            raise ConfigError(f"id={key.id!r} allowed: one that no key in {path} has")
        _write(path, (*keys, key))
    return secret


def remove_key(path: Path, key_id: str) -> bool:
    """Remove a key; return False if there is none. Raises: ConfigError as `read_keys`."""
    with _locked(path):
        keys = read_keys(path)
        left = tuple(key for key in keys if key.id != key_id)
        if left != keys:
            _write(path, left)
        return left != keys


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only."""
    path = path.resolve()
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # Mode 0600.
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    write_private(path, _KeysFile(keys=keys).model_dump_json(indent=1, exclude_defaults=True) + "\n")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Allow one writer at a time: a writer with older contents would restore a revoked key."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _explain(error: ErrorDetails) -> str:
    where, value = error["loc"], error["input"]
    # Another field's value may be the secret, put there by mistake.
    is_shown = (ApiKey.model_fields.keys() - {"sha256"}) & set(where) and not isinstance(value, dict)
    return f"{'.'.join(map(str, where))}{f'={str(value)[:80]!r}' if is_shown else ''} allowed: {error['msg']}".lstrip()
