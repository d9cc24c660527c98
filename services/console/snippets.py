"""A call as a curl command and as Python, to copy."""

import json
import shlex
from collections.abc import Mapping
from typing import Any


def in_script(value: object) -> str:
    """A value as it stands in a script of the page; "</" would end the script."""
    return json.dumps(value).replace("</", "<\\/")


def curl(base: str, method: str, request: Mapping[str, Any], *, with_key: bool) -> str:
    """The method by HTTP; `request` in Protobuf's JSON, empty fields left out."""
    body = json.dumps({name: value for name, value in request.items() if value}, ensure_ascii=False)
    key = ' \\\n  -H "Authorization: Bearer $FRESHET_API_KEY"' if with_key else ""
    return f"curl --json {shlex.quote(body)}{key} \\\n  {base}/freshet.v1.GatewayService/{method}"


def python(target: str, call: str, arguments: Mapping[str, Any], *, with_key: bool) -> str:
    """A program that makes the same call by the Python client."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value)
    uses_filter = "filter" in arguments and bool(arguments["filter"])
    key = ', api_key=os.environ["FRESHET_API_KEY"]' if with_key else ""
    lines = [
        *(["import os", ""] if with_key else []),
        f"from freshet_client import Client{', Filter' if uses_filter else ''}",
        "",
        f"with Client({target!r}{key}) as client:",
        f"    print(client.{call}({given}))",
    ]
    return "\n".join(lines)
