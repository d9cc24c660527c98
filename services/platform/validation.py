"""Check texts wherever they enter the system. Errors are logged, so they do not repeat the text."""

from services.platform.errors import InvalidRequest

MAX_ID_BYTES = 128
MAX_QUERY_BYTES = 1024


def utf8_size(name: str, text: str) -> int:
    """Return the size in UTF-8. Raises: InvalidRequest if the text is not valid UTF-8."""
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidRequest.of(name, "text that is not UTF-8", "UTF-8") from exc


def validate_text(name: str, text: str, least: int, most: int) -> None:
    """Raise InvalidRequest unless `text` has from `least` to `most` bytes of UTF-8."""
    size = utf8_size(name, text)
    if not least <= size <= most:
        raise InvalidRequest.of(name, f"text of {size} bytes", f"{least}-{most} bytes of UTF-8")


def validate_id(name: str, text: str) -> None:
    """Raise InvalidRequest unless `text` is UTF-8 of 1-128 bytes without control characters (NUL included)."""
    validate_text(name, text, 1, MAX_ID_BYTES)
    _refuse_control_characters(name, text)


def validate_query(name: str, text: str) -> None:
    """Raise InvalidRequest unless `text` is UTF-8 of 1-1,024 bytes with words, without control characters."""
    validate_text(name, text, 1, MAX_QUERY_BYTES)
    if text.isspace():
        raise InvalidRequest.of(name, "only white space", "words")
    _refuse_control_characters(name, text)


def _refuse_control_characters(name: str, text: str) -> None:
    if not text.isprintable() and any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text):
        raise InvalidRequest.of(name, "text with control characters", "no control characters")
