"""Commands and calls to copy: a call of the gateway as curl and as Python."""

import json
import shlex
from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any

from freshet_client import Client
from freshet_client.wire import write
from google.protobuf.json_format import MessageToDict

from services.console.elements import box, button, text
from services.console.frame import Page


def curl(base: str, method: str, request: Mapping[str, Any], *, with_key: bool) -> str:
    """Return a curl command that calls the method over HTTP. request: in Protobuf's JSON."""
    key = ' \\\n  -H "Authorization: Bearer $FRESHET_API_KEY"' if with_key else ""
    body = shlex.quote(json.dumps(request, ensure_ascii=False))
    return f"curl --json {body}{key} \\\n  {base}/freshet.v1.GatewayService/{method}"


def python(target: str, call: str, arguments: Mapping[str, Any], *, with_key: bool) -> str:
    """Return a program that makes the same call with the Python client."""
    asked = signature(getattr(Client, call)).parameters
    required = [name for name, one in asked.items() if one.default is Parameter.empty]
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value or name in required)
    key = ', api_key=os.environ["FRESHET_API_KEY"]' if with_key else ""
    modules = [f"import {name}" for name in ("datetime", "os") if f"{name}." in given + key]
    names = ["Client", *(name for name in ("Condition", "Filter", "Rule") if f"{name}(" in given)]
    lines = [
        *([*modules, ""] if modules else []),
        f"from freshet_client import {', '.join(names)}",
        "",
        f"with Client({target!r}{key}) as client:",
        f"    print(client.{call}({given}))",
    ]
    return "\n".join(lines)


def code_of(page: Page, call: str, request: Any, arguments: Mapping[str, Any]) -> None:
    """Show a call as code. call: a method of the client. request: an empty message of the gateway's method."""
    settings, method = page.settings, request.DESCRIPTOR.name.removeprefix("GatewayService").removesuffix("Request")
    given = MessageToDict(write(request, {name: value for name, value in arguments.items() if value}))
    snippet("curl", curl(settings.gateway_http, method, given, with_key=page.has_key))
    snippet("Python", python(settings.gateway, call, arguments, with_key=page.has_key))


def snippet(name: str, code: str) -> None:
    """Show code with a button that copies it."""
    with box("div", "snippet"):
        text("pre", code, tabindex="0")
        copy = button("Copy", lambda: None, icon="content_copy", about=f"Copy as {name}")
        copy.on("click", js_handler=f"(e) => freshet.copy(e, {json.dumps(code)})")
