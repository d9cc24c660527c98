"""The console process: serve the pages on one port until a signal."""

import secrets
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from nicegui import app as pages_app
from nicegui import ui

from services.console.access import Access
from services.console.config import ConsoleSettings
from services.console.frame import PAGES, Page, add_page, add_sign_in
from services.console.pages import experiments, health, items, live, models, results, rules, try_it, user, why
from services.console.same_origin import SameOrigin
from services.platform.machine import check_port_free

log = structlog.get_logger()

# The pages, in the order of `PAGES`.
_MADE: tuple[type[Page], ...] = (
    *(try_it.TryIt, user.User, why.Why, items.Items, live.Live),
    *(models.Models, rules.Rules, health.Health, experiments.Experiments, results.Results),
)
STATIC = Path(__file__).parent / "static"


async def run(settings: ConsoleSettings) -> None:
    """Serve until a signal. Raises: PortTaken. While the gateway is unavailable, pages report it."""
    check_port_free(settings.host, settings.port)
    tls = settings.tls
    certificates: dict[str, Any] = {} if tls is None else {"ssl_keyfile": tls.key, "ssl_certfile": tls.certificate}
    config = uvicorn.Config(
        _application(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        **certificates,
    )
    log.info("serving", address=f"{'https' if tls else 'http'}://{settings.host}:{settings.port}")
    await uvicorn.Server(config).serve()


def _application(settings: ConsoleSettings) -> Any:
    """Return the pages, with a check of each request's origin. NiceGUI has one application per process."""
    access = Access(settings)
    pages_app.add_static_files("/static", STATIC)
    add_sign_in(access)
    for path, page in zip(PAGES, _MADE, strict=True):
        add_page(access, path, page)
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @outer.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        return "serving\n"

    ui.run_with(
        outer,
        title="Freshet",
        favicon=STATIC / "drop.svg",
        dark=None,
        language="en-US",
        storage_secret=secrets.token_urlsafe(32),
        session_middleware_kwargs={"same_site": "strict", "https_only": settings.tls is not None},
        show_welcome_message=False,
    )
    return SameOrigin(outer, settings.names)
