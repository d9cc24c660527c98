"""A record is read whatever bytes its header names are; the others around it are read as ever."""

import pytest
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from services.platform.stream.kafka import accept_any_header_name


class Raw(str):
    """A name that goes out as these bytes."""

    def encode(self, *_: object) -> bytes:
        return b"\xff\xfe-name"


@pytest.mark.parametrize("compression", [0, 1])
def test_a_name_that_is_no_text_is_replaced_and_nothing_else(compression: int) -> None:
    accept_any_header_name()
    accept_any_header_name()
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=65_536,
    )
    headers = [[("a", b"\xff")], [(Raw("x"), b"\xff\xfe"), ("b", None)], [("\u00e9", b"")]]
    for offset, mine in enumerate(headers):
        builder.append(offset, 1000, b"\xff\xfe-name", b"\xff\xfe-name", mine)
    records = list(DefaultRecordBatch(bytes(builder.build())))
    assert [(record.offset, record.key, record.value) for record in records] == [
        (offset, b"\xff\xfe-name", b"\xff\xfe-name") for offset in range(3)
    ]
    assert [type(record.key) for record in records] == [bytes] * 3
    assert [record.headers for record in records] == [
        [("a", b"\xff")],
        [("\ufffd\ufffd-name", b"\xff\xfe"), ("b", None)],
        [("\u00e9", b"")],
    ]
