"""Whatever an outside producer wrote can be set aside: a letter that cannot be sent would hold the stream up."""

from streams import NOW_MS

from services.contracts.topics.dead_letters import MAX_DEAD_LETTER_BYTES, SUFFIX, dead_letter
from services.contracts.topics.interactions import INTERACTIONS
from services.platform.stream.records import DeadLetter, SourceRecord


def test_a_letter_carries_the_original_bytes_and_says_why_and_whence() -> None:
    record = SourceRecord(INTERACTIONS, 3, 17, NOW_MS, b"ann", b"\xff\x00", [("trace", b"\x01")])
    letter = dead_letter(DeadLetter(record, "value='2 unreadable bytes'"))
    assert (letter.topic, letter.key, letter.value) == (INTERACTIONS + SUFFIX, b"ann", b"\xff\x00")
    assert list(letter.headers) == [
        ("trace", b"\x01"),
        ("freshet-reason", b"value='2 unreadable bytes'"),
        ("freshet-source-topic", b"interactions"),
        ("freshet-source-partition", b"3"),
        ("freshet-source-offset", b"17"),
        ("freshet-source-time", str(NOW_MS).encode()),
    ]


def test_absent_keys_values_and_header_values_are_sent_as_empty() -> None:
    letter = dead_letter(
        DeadLetter(SourceRecord(INTERACTIONS, 0, 0, NOW_MS, None, None, [("trace", None)]), "value='no bytes'")
    )
    assert (letter.key, letter.value) == (b"", b"")
    assert letter.headers[0] == ("trace", b"")


def test_the_largest_record_that_a_topic_takes_is_kept_whole() -> None:
    value = b"x" * (1 << 20)
    assert dead_letter(DeadLetter(SourceRecord(INTERACTIONS, 0, 0, NOW_MS, b"ann", value), "why")).value == value


def test_what_no_letter_can_hold_is_cut_and_says_how_long_it_was() -> None:
    record = SourceRecord(INTERACTIONS, 0, 0, NOW_MS, b"k" * 10, b"v" * 3 * MAX_DEAD_LETTER_BYTES, [("h", b"x" * 90)])
    letter = dead_letter(DeadLetter(record, "why"))
    assert len(letter.value or b"") + len(letter.key) < MAX_DEAD_LETTER_BYTES
    assert dict(letter.headers)["freshet-original-bytes"] == str(3 * MAX_DEAD_LETTER_BYTES + 101).encode()


def test_a_long_reason_is_cut_between_characters() -> None:
    letter = dead_letter(DeadLetter(SourceRecord(INTERACTIONS, 0, 0, NOW_MS, b"ann", b"x"), "é" * 300))
    assert dict(letter.headers)["freshet-reason"] == "é".encode() * 256
    odd = dead_letter(DeadLetter(SourceRecord(INTERACTIONS, 0, 0, NOW_MS, b"ann", b"x"), "x" + "é" * 300))
    assert dict(odd.headers)["freshet-reason"] == b"x" + "é".encode() * 255
