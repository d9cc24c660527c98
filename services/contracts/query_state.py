"""A user's query state as bytes, the same in Redis, on the stream and in Protobuf.

Only scorers convert it to arrays (`unpacked`).

Letters: P_q query components, P component pairs, d component width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from freshet.v1 import common_pb2

from services.platform.errors import InvalidRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQueryState:
    """Half-precision little-endian bytes, unchecked: components row-major (P_q, d), gate (P,) or empty for a plain dot
    product.
    """

    model_version: str
    components: bytes
    gate: bytes
    num_components: int
    component_width: int


def to_message(state: PackedQueryState) -> common_pb2.QueryState:
    return common_pb2.QueryState(
        model_version=state.model_version,
        components=state.components,
        gate=state.gate,
        num_components=state.num_components,
        component_width=state.component_width,
    )


def from_message(message: common_pb2.QueryState) -> PackedQueryState:
    return PackedQueryState(
        model_version=message.model_version,
        components=message.components,
        gate=message.gate,
        num_components=message.num_components,
        component_width=message.component_width,
    )


def unpacked(message: common_pb2.QueryState, unpack: Callable[..., T]) -> T:
    """Return a message's arrays. unpack: `algorithms.scoring.packed_state.unpack_query_state`. Raises:
    InvalidRequest.
    """
    try:
        return unpack(
            message.components,
            message.gate,
            num_components=message.num_components,
            component_width=message.component_width,
        )
    except ValueError as exc:
        raise InvalidRequest(f"query_state: {exc}") from exc
