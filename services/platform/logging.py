"""One JSON object per line on stdout, for this code's events and the libraries' logs.

A process's `__main__` calls `configure_logging` once; modules call `structlog.get_logger()`. Fields bound with
`structlog.contextvars`, and the current call's request id, appear on each line.
"""

import logging
import sys
from typing import Any, TextIO

import structlog

from services.platform.rpc import request_context

# At INFO these libraries log every reconnect; their warnings stay. kafka-python logs each rejected connection as an
# error, several a second while a broker is down; the adapters log it once.
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
    """Write structlog's and the standard library's logs to `stream` (stdout) as JSON lines."""
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
