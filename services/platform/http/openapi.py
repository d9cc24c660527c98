"""Answer `GET /openapi.json` with the JSON port's OpenAPI document, built from the services' descriptors.

The schemas follow Protobuf's JSON mapping: camel case, 64-bit numbers as strings, enums by name, bytes in base64.
"""

import json
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor, ServiceDescriptor

PATH = "/openapi.json"
_INTEGER = {"type": "integer"}
_KINDS: dict[int, dict[str, Any]] = {
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    # Not-a-number and the infinities are strings.
    FieldDescriptor.CPPTYPE_DOUBLE: {"type": ["number", "string"], "format": "double"},
    FieldDescriptor.CPPTYPE_FLOAT: {"type": ["number", "string"], "format": "float"},
    FieldDescriptor.CPPTYPE_INT32: {**_INTEGER, "format": "int32"},
    FieldDescriptor.CPPTYPE_UINT32: {**_INTEGER, "minimum": 0, "maximum": 2**32 - 1},
    # JavaScript has no whole numbers of 64 bits.
    FieldDescriptor.CPPTYPE_INT64: {"type": ["string", "integer"], "format": "int64"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": ["string", "integer"], "format": "uint64"},
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
}
_TIMESTAMP = {"type": "string", "format": "date-time"}
_ERROR = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {
        "code": {"type": "string", "examples": ["invalid_argument"]},
        "message": {"type": "string", "examples": ["k=0 allowed: 1-1000"]},
    },
}


def document(services: Collection[ServiceDescriptor]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document of the services' unary methods. Its version is the first service's package."""
    schemas: dict[str, Any] = {"connect.error": _ERROR}
    paths = {
        f"/{service.full_name}/{method.name}": {"post": _operation(service, method, schemas)}
        for service in services
        for method in service.methods
        if not method.client_streaming and not method.server_streaming
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Freshet",
            "version": next(iter(services)).file.package,
            "summary": "Recommendations, search and events of the gateway as JSON, by the Connect protocol.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        # {} allows calls without an API key, because the gateway requires none on loopback.
        "security": [{"key": []}, {}],
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "parameters": {
                "timeout": {
                    "name": "Connect-Timeout-Ms",
                    "in": "header",
                    "description": "The deadline of the call in milliseconds.",
                    "schema": {"type": "integer", "minimum": 1, "maximum": 9_999_999_999},
                }
            },
        },
    }


def _operation(service: ServiceDescriptor, method: MethodDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": f"{service.full_name}.{method.name}",
        "tags": [service.full_name],
        "parameters": [{"$ref": "#/components/parameters/timeout"}],
        "requestBody": {"required": True, "content": _json(_reference(method.input_type, schemas))},
        "responses": {
            "200": {"description": method.output_type.name, "content": _json(_reference(method.output_type, schemas))},
            "default": {
                "description": "An error; its HTTP status follows from its code.",
                "content": _json({"$ref": "#/components/schemas/connect.error"}),
            },
        },
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(of: Descriptor | EnumDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if of.full_name == "google.protobuf.Timestamp":
        return _TIMESTAMP
    if of.full_name not in schemas:
        if isinstance(of, EnumDescriptor):
            schemas[of.full_name] = {"type": "string", "enum": [value.name for value in of.values]}
        else:
            # Added before its fields, since a message may contain itself.
            schemas[of.full_name] = found = {"type": "object", "additionalProperties": False}
            found["properties"] = {field.json_name: _field(field, schemas) for field in of.fields}
    return {"$ref": f"#/components/schemas/{of.full_name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _value(inner.fields_by_name["value"], schemas)}
    one = _value(field, schemas)
    return {"type": "array", "items": one} if field.is_repeated else one


def _value(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if (named := field.message_type or field.enum_type) is not None:
        return _reference(named, schemas)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return {"type": "string", "contentEncoding": "base64"}
    return _KINDS[field.cpp_type]


class Described:
    """An ASGI application that answers GET and HEAD of PATH itself."""

    def __init__(self, application: Any, services: Collection[ServiceDescriptor]) -> None:
        self._application, self._services = application, services
        self._document = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != PATH or scope["method"] not in ("GET", "HEAD"):
            await self._application(scope, receive, send)
            return
        if not self._document:
            self._document = json.dumps(document(self._services)).encode()
        length = str(len(self._document)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._document if scope["method"] == "GET" else b""})
