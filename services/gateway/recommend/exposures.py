"""Sign texts that clients return, each valid for one user. Exposure ids are such texts; their answers are recorded.

A text is body | tag of user and body | MAC of both, in URL-safe base64. The tag depends on the body, so two texts do
not reveal that they belong to one user. Checking a text needs no stored state. Gateways with the same clients share
the key.
"""

import binascii
import os
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any

import structlog

from services.contracts.pseudonyms import read_key
from services.contracts.topics.experiments import Assignment
from services.contracts.topics.exposures import Exposure
from services.gateway.domain import ScoredItem
from services.gateway.ports import ExposureLog
from services.platform.errors import InvalidRequest, PermissionDenied
from services.user_state.values import now_ms

log = structlog.get_logger()

_TAG_BYTES = 6
_MAC_BYTES = 8
_KEY_BYTES = 32


class Altered(ValueError):
    """The text was changed, or made with another key or purpose."""


class OfAnotherUser(ValueError):
    """The text is valid, but for another user."""


class Signer:
    """Signs bodies for one purpose. purpose: at most 16 bytes."""

    def __init__(self, key: bytes, purpose: bytes) -> None:
        self._key = blake2b(key, digest_size=_KEY_BYTES, person=purpose).digest()

    def sign(self, body: bytes, user_id: str) -> str:
        """Return the text for `user_id`. A multiple of three bytes needs no padding."""
        signed = body + self._tag(body, user_id)
        return urlsafe_b64encode(signed + self._mac(signed)).decode()

    def open(self, text: str, num_bytes: int, user_id: str) -> bytes:
        """Return the body of `num_bytes`. Raises: Altered, OfAnotherUser."""
        try:
            raw = urlsafe_b64decode(text.encode("ascii"))
        except (binascii.Error, ValueError) as exc:
            raise Altered from exc
        body, signed, mac = raw[:num_bytes], raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        whole = len(raw) == num_bytes + _TAG_BYTES + _MAC_BYTES
        # base64 decodes some other texts to the same bytes.
        if not whole or not compare_digest(mac, self._mac(signed)) or urlsafe_b64encode(raw).decode() != text:
            raise Altered
        if not compare_digest(signed[num_bytes:], self._tag(body, user_id)):
            raise OfAnotherUser
        return body

    def _tag(self, body: bytes, user_id: str) -> bytes:
        return blake2b(body + user_id.encode(), key=self._key, digest_size=_TAG_BYTES, person=b"user").digest()

    def _mac(self, signed: bytes) -> bytes:
        return blake2b(signed, key=self._key, digest_size=_MAC_BYTES, person=b"mac").digest()


def signing_key(key: str, file: Path | None) -> bytes:
    """Return `key`, else the file's key, else a random key. Raises: ConfigError for a file without a key."""
    if not key and file is not None:
        key = read_key("FRESHET_GATEWAY_SIGNING_KEY_FILE", file)
    if not key:
        log.warning(
            "random_signing_key",
            reason="neither FRESHET_GATEWAY_SIGNING_KEY nor _FILE is set: exposure ids and page tokens of this process "
            "become invalid when it ends, and no other gateway accepts them",
        )
        key = secrets.token_urlsafe(32)
    return key.encode()


_TIME_BYTES, _NONCE_BYTES = 6, 4
_BODY_BYTES = _TIME_BYTES + _NONCE_BYTES


class Exposures:
    """Issues exposure ids and records exposures. log: None records nothing."""

    def __init__(self, key: bytes, log: ExposureLog | None) -> None:
        self._signer, self._log = Signer(key, b"exposure"), log

    def shown(
        self,
        surface: str,
        user_id: str,
        items: Sequence[ScoredItem],
        *,
        assignments: Sequence[Assignment] = (),
        **fields: Any,
    ) -> str:
        """Return the exposure id of an answer sent now. user_id: "" for a visitor. fields: other `Exposure` fields."""
        shown_ms = now_ms()
        exposure_id = self._signer.sign(shown_ms.to_bytes(_TIME_BYTES, "big") + os.urandom(_NONCE_BYTES), user_id)
        if self._log is not None:
            one = Exposure(
                exposure_id=exposure_id,
                shown_ms=shown_ms,
                surface=surface,
                item_ids=[item.item_id for item in items],
                scores=[item.score for item in items],
                sources=[item.source for item in items],
                propensities=propensities_of(items),
                assignments=assigned_texts(assignments),
                **fields,
            )
            self._log.append(user_id, one)
        return exposure_id

    def time_of(self, exposure_id: str, user_id: str) -> int:
        """Return the answer's time, Unix milliseconds.

        Raises: InvalidRequest; PermissionDenied for another user's id.
        """
        try:
            body = self._signer.open(exposure_id, _BODY_BYTES, user_id)
        except Altered:
            shown = f"text of {len(exposure_id)} characters"
            raise InvalidRequest.of("exposure_id", shown, "as an answer of this installation gave it") from None
        except OfAnotherUser:
            raise _foreign("exposure_id") from None
        return int.from_bytes(body[:_TIME_BYTES], "big")

    def check_named(self, exposure_id: str, user_id: str, field: str) -> None:
        """Check an interaction's exposure id. Clients may have their own ids: only another user's id is wrong.

        Raises: PermissionDenied.
        """
        try:
            self._signer.open(exposure_id, _BODY_BYTES, user_id)
        except Altered:
            return
        except OfAnotherUser:
            raise _foreign(field) from None


def propensities_of(items: Sequence[ScoredItem]) -> Sequence[float]:
    """Return the items' propensities, () if all are 1."""
    return () if all(item.propensity == 1 for item in items) else [item.propensity for item in items]


def assigned_texts(assignments: Sequence[Assignment]) -> tuple[tuple[str, str, float], ...]:
    """Return (experiment, arm, share) for exposures and answers; arm "": interleaved."""
    return tuple((one.experiment.name, one.arm.name if one.arm else "", one.share) for one in assignments)


def _foreign(field: str) -> PermissionDenied:
    return PermissionDenied(f"{field}: of an answer to another user; allowed: of an answer to this one")
