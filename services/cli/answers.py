"""Histories, rules and an answer's provenance, which several commands share."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.output import console, usage_error

if TYPE_CHECKING:
    from freshet.v1 import common_pb2, gateway_pb2

# Items without times become one event per minute, the newest now: the model reads only relative times.
_SECONDS_BETWEEN_ITEMS = 60


def history_of(item_ids: list[str]) -> "list[gateway_pb2.HistoryEvent]":
    """Return the items, oldest first, as a history that ends now."""
    from freshet.v1 import gateway_pb2

    newest_s = int(time.time())
    events = []
    for age, item_id in zip(range(len(item_ids) - 1, -1, -1), item_ids, strict=True):
        event = gateway_pb2.HistoryEvent(item_id=item_id)
        event.event_time.FromSeconds(newest_s - age * _SECONDS_BETWEEN_ITEMS)
        events.append(event)
    return events


def rules_of(path: Path | None) -> "list[common_pb2.Rule]":
    """Return the rules of a YAML file. Raises: CommandError naming file, rule and key."""
    from services.contracts.yaml_files import read_rules
    from services.platform.errors import InvalidRequest

    try:
        return [] if path is None else read_rules(path)
    except InvalidRequest as error:
        raise usage_error(error.message) from error


def degradation_names(
    answer: "gateway_pb2.RecommendResponse | gateway_pb2.GatewayServiceSearchResponse "
    "| gateway_pb2.GatewayServiceSimilarResponse | gateway_pb2.GetFreshnessResponse",
) -> list[str]:
    """Return the answer's degradations in lower case without the enum's prefix: `["stale_state"]`."""
    from freshet.v1 import gateway_pb2

    return [gateway_pb2.Degradation.Name(value).removeprefix("DEGRADATION_").lower() for value in answer.degradations]


def certificate_kind(answer: "gateway_pb2.RecommendResponse") -> str:
    """Return "exact", "bounded" or "estimate"."""
    from freshet.v1 import common_pb2

    name = common_pb2.Certificate.Kind.Name(answer.certificate.kind)
    return name.removeprefix("KIND_").lower()


def certificate_text(answer: "gateway_pb2.RecommendResponse") -> str:
    """Return "exact", "gap <= 0.0123" (similarity units) or "estimate"."""
    kind = certificate_kind(answer)
    return f"gap <= {answer.certificate.gap:.4f}" if kind == "bounded" else kind


def index_freshness(freshness: "common_pb2.IndexFreshness") -> dict[str, Any]:
    """Return the index's last change, and its lag in seconds from acknowledgement to serving."""
    newest = freshness.newest_recorded_time
    return {
        "deltas_offset": freshness.deltas_offset,
        "newest_recorded_time": newest.ToJsonString() if freshness.HasField("newest_recorded_time") else None,
        "lag_seconds": freshness.lag_seconds if freshness.HasField("lag_seconds") else None,
    }


def print_warnings(facts: Mapping[str, Any]) -> None:
    """Print an answer's warnings and degradations."""
    for warning in facts["warnings"]:
        console().print(warning, style="yellow")
    if facts["degradations"]:
        console().print(f"degraded: {', '.join(facts['degradations'])}", style="yellow")
