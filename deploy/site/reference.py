"""The reference pages, made from code: settings from pydantic, commands from typer, the API from the protos.

`python deploy/site/reference.py settings|commands|api` prints one. `make docs` puts all three into the site.
"""

import ast
import inspect
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]

# Modules with the settings of a process, the shared ones first.
CONFIGS = {
    "Every process": "platform",
    "gateway": "gateway",
    "encoder": "encoder",
    "candidates": "candidates",
    "reranker": "reranker",
    "refresher": "refresher",
    "generator": "generator",
    "compact": "compact",
}


def settings_page() -> str:
    """Every environment variable of every process, with its default, its range and the comment beside the field."""
    from pydantic_settings import BaseSettings

    lines = ["# Settings", "", "Each process reads environment variables once, at its start.", ""]
    shown: set[str] = set()
    for title, package in CONFIGS.items():
        lines += [f"## {title}", "", "| variable | default | allowed | |", "|---|---|---|---|"]
        module = import_module(f"services.{package}.config")
        kinds = [
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind) and issubclass(kind, BaseSettings) and kind.__module__ == module.__name__
        ]
        for base in [
            base for kind in kinds for base in reversed(kind.__mro__) if base.__module__.startswith("services")
        ]:
            comments = _field_comments(base)
            for name in comments:
                field = cast("type[BaseSettings]", base).model_fields[name]
                variable = str(field.validation_alias or f"FRESHET_{name.upper()}")
                if variable not in shown:
                    shown.add(variable)
                    lines.append(f"| `{variable}` | {_default(field)} | {_allowed(field)} | {_cell(comments[name])} |")
        lines.append("")
    return "\n".join(lines)


def commands_page() -> str:
    """Every command of `freshet`, with its arguments and options."""
    import typer.main

    from services.cli.main import app

    lines = [
        "# Commands",
        "",
        "What `freshet COMMAND --help` prints. `freshet --help` groups the commands by purpose.",
        "",
    ]
    lines += _command(typer.main.get_command(app), "freshet", 1)
    return "\n".join(lines)


def api_page() -> str:
    """Services, messages and enums of `protos/freshet/v1`, with their comments. What clients use comes first."""
    first = ("gateway", "common", "events")
    by_name = {Path(proto.name).stem: proto for proto in _descriptors() if proto.package == "freshet.v1"}
    lines = [
        "# API",
        "",
        "`gateway` is what clients call, `events` what topics hold; the rest is between processes.",
        "",
    ]
    for name in [*first, *sorted(by_name.keys() - set(first))]:
        proto = by_name[name]
        comments = {tuple(at.path): at.leading_comments.strip() for at in proto.source_code_info.location}
        lines += [f"## {name}.proto", "", comments.get((12,), ""), ""]
        for number, service in enumerate(proto.service):
            lines += [f"### {service.name}", "", "| method | takes | returns | |", "|---|---|---|---|"]
            for at, method in enumerate(service.method):
                takes = ("stream " if method.client_streaming else "") + _short(method.input_type)
                gives = ("stream " if method.server_streaming else "") + _short(method.output_type)
                lines.append(f"| `{method.name}` | {takes} | {gives} | {_cell(comments.get((6, number, 2, at), ''))} |")
            lines.append("")
        for number, message in enumerate(proto.message_type):
            lines += _message(message, comments, (4, number), message.name)
        for number, enum in enumerate(proto.enum_type):
            lines += _enum(enum, comments, (5, number), enum.name)
    return "\n".join(lines)


def _field_comments(kind: type) -> dict[str, str]:
    """The fields that a class itself declares, each with the comment lines right above it."""
    source = inspect.getsource(kind).splitlines()
    (tree,) = ast.parse("\n".join(source)).body
    found = {}
    for node in cast("ast.ClassDef", tree).body:
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.dump(node.annotation):
            continue
        above = node.lineno - 1
        while source[above - 1].strip().startswith("#"):
            above -= 1
        comment = " ".join(line.strip().lstrip("# ") for line in source[above : node.lineno - 1])
        found[cast("ast.Name", node.target).id] = comment
    return found


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if type(value).__name__ == "SecretStr":
        return "a secret"
    return "none" if value in (None, "") else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _allowed(field: Any) -> str:
    bounds = {
        name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)
    }
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    kind = str(getattr(field.annotation, "__name__", field.annotation)).split(" |")[0]
    kind = {
        "str": "text",
        "SecretStr": "text",
        "pathlib.Path": "path",
        "Path": "path",
        "int": "integer",
        "float": "number",
    }.get(kind, kind)
    if "Literal" in str(field.annotation):
        kind = ", ".join(f"`{value}`" if value else "nothing" for value in field.annotation.__args__)
    return ", ".join([kind, *(f"{signs[name]} {value:,}" for name, value in bounds.items())])


def _command(command: Any, name: str, level: int) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    if level > 1:
        yield from (f"{'#' * min(level, 4)} {name}", "", (command.help or "").strip(), "")
        rows = [
            (
                ", ".join(param.opts + param.secondary_opts) if param.opts[0].startswith("-") else param.name.upper(),
                param,
            )
            for param in command.get_params(context)
            if not getattr(param, "hidden", False) and param.name != "help"
        ]
        if rows:
            yield from ("| | default | |", "|---|---|---|")
            for names, param in rows:
                default = (
                    param.default if not callable(param.default) and param.default not in (None, (), "", False) else ""
                )
                shown = f"`{default}`" if default != "" else ("required" if param.required else "")
                yield f"| `{names}` | {shown} | {_cell(getattr(param, 'help', None) or '')} |"
            yield ""
    for child, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            yield from _command(inner, f"{name} {child}", level + 1)


def _descriptors() -> list[Any]:
    """The protos as protoc reads them, comments included."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        paths = [str(path) for path in sorted((ROOT / "protos" / "freshet" / "v1").glob("*.proto"))]
        includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *includes, "--include_source_info", f"--descriptor_set_out={out}", *paths]):
            raise RuntimeError("protoc failed: see its message above")
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _message(message: Any, comments: dict[tuple[int, ...], str], path: tuple[int, ...], name: str) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield from (f"### {name}", "", comments.get(path, ""), "")
    if message.field:
        yield from ("| field | type | |", "|---|---|---|")
        for at, field in enumerate(message.field):
            kind = _short(field.type_name) if field.type_name else field.Type.Name(field.type)[5:].lower()
            repeated = "repeated " if field.label == field.LABEL_REPEATED else ""
            yield f"| `{field.name}` | {repeated}{kind} | {_cell(comments.get((*path, 2, at), ''))} |"
        yield ""
    for at, inner in enumerate(message.nested_type):
        yield from _message(inner, comments, (*path, 3, at), f"{name}.{inner.name}")
    for at, enum in enumerate(message.enum_type):
        yield from _enum(enum, comments, (*path, 4, at), f"{name}.{enum.name}")


def _enum(enum: Any, comments: dict[tuple[int, ...], str], path: tuple[int, ...], name: str) -> Iterator[str]:
    yield from (f"### {name}", "", comments.get(path, ""), "", "| value | |", "|---|---|")
    for at, value in enumerate(enum.value):
        yield f"| `{value.name}` | {_cell(comments.get((*path, 2, at), ''))} |"
    yield ""


def _short(name: str) -> str:
    return name.removeprefix(".freshet.v1.").removeprefix(".google.protobuf.")


def _cell(text: str) -> str:
    """A comment or help text as one table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write({"settings": settings_page, "commands": commands_page, "api": api_page}[sys.argv[1]]())
