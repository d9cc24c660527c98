"""One JSON object per line on stdout, libraries' logs included.

Fields of `structlog.contextvars` and the request id are on each line.
"""

import logging
import sys
from typing import Any, TextIO

import structlog

from services.platform import request_context

# At INFO they log every reconnect. kafka-python logs rejected connections several times a second; adapters log one.
_QUIET = {
    "kafka": logging.CRITICAL,
    "grpc": logging.WARNING,
    "asyncio": logging.WARNING,
    "urllib3": logging.WARNING,
    "opentelemetry": logging.WARNING,
}


def _add_request_id(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    request_id = request_context.request_id.get()
    if request_id:
        event.setdefault("request_id", request_id)
    return event


def configure_logging(process: str, level: str = "info", *, stream: TextIO | None = None) -> None:
    """Write all logs to `stream` (stdout) as JSON lines."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _add_request_id,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]

    def add_process(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    shared.append(add_process)
    out = sys.stdout if stream is None else stream
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name, least in _QUIET.items():
        logging.getLogger(name).setLevel(max(number, least))
