"""Texts about answers, durations and dates."""

from collections.abc import Sequence
from datetime import UTC, datetime

from freshet_client import Certificate

# By degradation: what it means for the person at the console.
MEANINGS = {
    "stale_state": "the newest events are not reflected",
    "popular_fallback": "nothing is known of this person, so these are popular items",
    "state_store_down": "what is stored of people could not be read",
    "first_stage_order": "the reranker did not answer, so the order is the first stage's",
    "partial_catalogue": "a part of the catalogue did not answer",
    "not_fresh": "the stream is behind, so recent events may be missing",
    "token_not_honoured": "what was just done is not reflected yet",
    "partial_sources": "a source of items by words did not answer",
    "not_personalised": "the order is the same for everybody",
    "history_incomplete": "a part of the history is being read again",
    "busy": "the gateway had no time for more than popular items",
    "gap_not_proven": "less is proven than was asked for",
}


def about_answer(
    count: int, degradations: Sequence[str], certificate: Certificate | None, milliseconds: float | None
) -> str:
    """Return a sentence with the number of items, their exactness, the time that they took, and the degradations."""
    parts = [f"{count} items" if count != 1 else "1 item"]
    if certificate is not None and certificate.kind == "exact":
        parts.append("proven: nothing that is left out scores higher")
    elif certificate is not None and certificate.kind == "bounded":
        parts.append(f"nothing that is left out scores more than {certificate.gap:.3f} higher")
    if milliseconds is not None:
        parts.append(f"made in {milliseconds:,.1f} ms")
    parts += [MEANINGS.get(name, name) for name in degradations]
    return "; ".join(parts) + "."


def duration(seconds: float) -> str:
    """Return the duration in the largest unit that fits: "3 s", "5 min", "2 h", "4 days"."""
    if seconds < 1:
        return "less than a second"
    units = ((1, "s", 60), (60, "min", 3600), (3600, "h", 48 * 3600))
    size, name = next(((size, name) for size, name, most in units if seconds < most), (86_400, "days"))
    return f"{seconds / size:,.0f} {name}"


def ago(moment: datetime) -> str:
    """The time since `moment`."""
    return duration(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def date_text(moment: datetime | None) -> str:
    """The date and time in UTC; "" for None."""
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"
