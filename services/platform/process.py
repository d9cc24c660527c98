"""Start and end a process, and configure its logs and those of libraries.

A log line on stdout is one JSON object; it includes the request id and the fields of `structlog.contextvars`.
"""

import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TextIO, TypeVar

import structlog
import uvloop

from services.platform import request_context
from services.platform.config import ConfigError, ProcessSettings, load_settings
from services.platform.errors import FreshetError
from services.platform.machine import PortTaken
from services.platform.request_context import OFF, Tracing

# At INFO these libraries log every reconnect. kafka-python logs a rejected connection several times a second; adapters
# log it once.
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


S = TypeVar("S", bound=ProcessSettings)

log = structlog.get_logger()

# The running thread yields the interpreter after this time, so that a request waits less for other threads.
_SWITCH_INTERVAL_S = 0.0005


def run_process(process: str, kind: type[S], run: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Run until a signal; return the exit status.

    An invalid setting, a taken port, an unusable bundle or an unavailable dependency gives status 1, with one line on
    stderr. Other exceptions propagate.
    """
    try:
        settings = load_settings(kind)
    except ConfigError as exc:
        return _refuse(process, exc)
    configure_logging(process, settings.log_level)
    log.info("settings", **settings.describe())
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(run(settings))
    except (PortTaken, FreshetError, ValueError, FileNotFoundError) as exc:
        log.error("start_refused", reason=str(exc), exc_info=exc)
        return _refuse(process, exc)
    except MemoryError as exc:
        log.error("out_of_memory", exc_info=exc)
        return _refuse(process, MemoryError(f"not enough memory for the bundle at {settings.bundle}: {exc}"))
    return 0


def configure_tracing(process: str, endpoint: str) -> Tracing:
    """Export spans to `endpoint` (OTLP over gRPC, host:port); "" is off."""
    if not endpoint:
        return OFF
    from services.platform.exported_spans import ExportedSpans, otlp_exporter

    return ExportedSpans(process, otlp_exporter(endpoint))


def _refuse(process: str, exc: Exception) -> int:
    sys.stderr.write(f"freshet {process}: {exc}\n")
    return 1
