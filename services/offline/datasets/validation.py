"""Find the usual problems of interaction data before a training run.

An "error" makes the data unusable, or unusable for training alone (`only_training`); a "warning" makes results
misleading. The checks change nothing.

Letters: N rows.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.pefa.policy import TypeWeight
from services.contracts.topics.interactions import MAX_TYPE_BYTES, SEARCH_CLICK

from .catalogue_file import Catalogue
from .interactions import Interactions
from .type_names import near_type, rating_scale, scale_line, schema_line

Severity = Literal["error", "warning", "info"]
IntArray = npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.bool_]
_SHOWN = 5
MAX_ID_BYTES = 128
MIN_EVENTS_PER_USER = 3
# Training holds out two events of a user: one tests the model, one chooses its head.
MIN_EVENTS_TO_TRAIN = 4
MIN_EVENTS_PER_ITEM = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem. `where`: rows (file rows, or events in time order), ids or the column. `count` of `of` rows or ids
    are affected; `of` is 0 for the whole file. only_training: the error prevents training but not an import.
    """

    severity: Severity
    what: str
    where: str
    count: int
    of: int
    advice: str
    only_training: bool = False

    def __str__(self) -> str:
        share = f": {self.count:,} of {self.of:,}, {self.count / self.of:.1%} ({self.where})" if self.of else ""
        return _printable(self.what + share)

    @property
    def text(self) -> str:
        """Return two lines for a terminal."""
        return f"{self.severity:8} {self}\n         {self.advice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The findings, and the usable `interactions`; these are None if an error rejects the data.

    read_as: a sentence for each column's role.
    """

    source: str
    findings: list[Finding]
    interactions: Interactions | None
    num_rows: int
    num_blank: int = 0
    read_as: str = ""
    catalogue: Catalogue | None = None

    @property
    def summary(self) -> list[str]:
        """Return the lines that every command prints: the columns' roles and the findings."""
        return [*filter(None, [self.read_as]), *(finding.text for finding in self.findings)]

    @classmethod
    def of(cls, data: Interactions, findings: Iterable[Finding] = ()) -> Self:
        """Return a reading of loaded data."""
        return cls(source=data.source, findings=worst_first(findings), interactions=data, num_rows=len(data))

    def accepted(self, *, for_training: bool = False) -> Interactions:
        """Return the interactions. Raises: ValueError naming every error if the data are rejected."""
        errors = [one for one in self.findings if one.severity == "error" and (for_training or not one.only_training)]
        if self.interactions is None or errors:
            reasons = "; ".join(f"{one}: {one.advice}" for one in errors)
            raise ValueError(f"{self.source} is refused: {reasons}. {account_text(self.account(None))}")
        return self.interactions

    def account(self, used: Interactions | None, *, given: Interactions | None = None) -> dict[str, Any]:
        """Return the numbers of rows read, used (None: no row), and left out by reason; rows = used + left out.

        `used` is a selection of `given`; `given` is a selection of `interactions` (default: all).
        """
        left_out = Counter({"blank": self.num_blank})
        if used is None or self.interactions is None:
            left_out["refused"] = self.num_rows - self.num_blank
        else:
            given = self.interactions if given is None else given
            left_out["not before the split"] = len(self.interactions) - len(given)
            for name, before, after in zip(given.type_names, given.type_counts(), used.type_counts(), strict=True):
                left_out[f"type {name}"] = int(before - after)
        reasons = {reason: count for reason, count in left_out.most_common() if count}
        return {"rows": self.num_rows, "used": 0 if used is None else len(used), "left_out": reasons}


def account_text(account: dict[str, Any]) -> str:
    """Return `Reading.account` as a sentence."""
    reasons = account["left_out"]
    listed = ", ".join(f"{_printable(reason)} {count:,}" for reason, count in reasons.items())
    left_out = f"{sum(reasons.values()):,} left out" + (f" ({listed})" if listed else "")
    return f"{account['rows']:,} rows: {account['used']:,} used, {left_out}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return errors, warnings, then infos; within each, findings with the most rows come first."""
    return sorted(findings, key=lambda one: (("error", "warning", "info").index(one.severity), -one.count))


def unreadable(source: str, problem: str) -> Reading:
    """Return the reading of a file without a readable row."""
    advice = "the whole file is left out, and its rows are not counted"
    finding = Finding(severity="error", what=problem, where=source, count=1, of=0, advice=advice)
    return Reading(source=source, findings=[finding], interactions=None, num_rows=0)


@dataclass(frozen=True, slots=True)
class Rows:
    """The numbers (N,) that findings use for rows; `word` says what is numbered."""

    numbers: IntArray
    word: str = "rows"

    def finding(
        self, mask: MaskArray, severity: Severity, what: str, advice: str, *, only_training: bool = False
    ) -> Iterator[Finding]:
        """Yield a finding of the rows in the mask (N,), if any."""
        if mask.any():
            yield Finding(
                severity=severity,
                what=what,
                where=f"{self.word} {some([str(number) for number in np.sort(self.numbers[mask]).tolist()])}",
                count=int(np.count_nonzero(mask)),
                of=len(mask),
                advice=advice,
                only_training=only_training,
            )


@dataclass(frozen=True, slots=True)
class _Checked:
    data: Interactions
    rows: Rows
    has_value: MaskArray
    now_s: float


def check(
    data: Interactions,
    *,
    schema: EventSchema | None = None,
    now_s: float | None = None,
    rows: Rows | None = None,
    has_value: MaskArray | None = None,
) -> list[Finding]:
    """Return the findings in the data.

    Without `schema` types are not checked. `now_s`: unix seconds, default: now. `rows`: the events' row numbers in the
    file. has_value (N,): which events have a value; default: all.
    """
    if not len(data):
        advice = "give a table with at least one row"
        return [Finding(severity="error", what="no events", where="the whole table", count=1, of=0, advice=advice)]
    word = "events (in time order)" if data.has_times else "events (by position in their user's sequence)"
    checked = _Checked(
        data,
        Rows(np.arange(1, len(data) + 1), word) if rows is None else rows,
        np.ones(len(data), dtype=bool) if has_value is None else has_value,
        time.time() if now_s is None else now_s,
    )
    findings = [one for look in _CHECKS for one in look(checked)]
    return findings if schema is None else [*findings, *_check_types(checked, schema)]


def id_problem(text: str) -> str:
    """Return what is wrong with an id, or "": ids are UTF-8, 1 to 128 bytes, without control characters."""
    if not text:
        return "is empty"
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_ID_BYTES:
        return f"has {size} bytes"
    if any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text):
        return "holds a control character"
    return ""


def _check_twins(checked: _Checked) -> Iterator[Finding]:
    data = checked.data
    for role, codes, ids in (("user", data.users, data.user_ids), ("item", data.items, data.item_ids)):
        plain = np.array([text.strip().casefold() for text in ids], dtype=object).astype(str)
        _, group, sizes = np.unique(plain, return_inverse=True, return_counts=True)
        twins = sizes[group] > 1
        if twins.any():
            advice = f"{ids[int(np.argmax(twins))]!r} and a twin differ only by blanks or case; decide on one spelling"
            yield from checked.rows.finding(twins[codes], "warning", f"{role} ids that look alike", advice)


def _check_values(checked: _Checked) -> Iterator[Finding]:
    given = checked.has_value
    values = checked.data.values[given]
    if len(values) > 1 and np.ptp(values) == 0:
        advice = "it carries no signal; leave it out, or check that the right column was chosen"
        yield from checked.rows.finding(given, "info", f"value column is constant ({values[0]:g})", advice)


def _check_times(checked: _Checked) -> Iterator[Finding]:
    times, everywhere = checked.data.timestamps, np.ones(len(checked.data), dtype=bool)
    finding = checked.rows.finding
    if not checked.data.has_times:
        advice = "the order inside each user is known, times are not: leave-one-out is possible, a split by time is not"
        yield from finding(everywhere, "info", "order only, no timestamps", advice)
        return
    advice = "an event is at most one day ahead of the clock; check unit and time zone, or remove the rows"
    yield from finding(times > checked.now_s + 86_400, "error", "timestamp lies in the future", advice)
    if len(times) > 1 and np.ptp(times) == 0:
        advice = "no order can be learned and no time split made; give real times, or a counter from 1000000000 on"
        yield from finding(everywhere, "error", "all timestamps are equal", advice, only_training=True)
    elif len(times) > 1 and (times % 86_400 == 0).all():
        advice = "the order inside a day is the file's order; give times to the second if you have them"
        yield from finding(everywhere, "warning", "timestamps are whole days", advice)


def _check_duplicates(checked: _Checked) -> Iterator[Finding]:
    data = checked.data
    repeated = _repeats((data.users, data.items, data.types, data.timestamps))
    advice = "the same user, item, type and second again: remove the copies, or a model learns them as habit"
    yield from checked.rows.finding(repeated, "warning", "duplicate events", advice)
    again = _repeats((data.users, data.items, data.types)) & ~repeated
    advice = "fine if people repeat things; then ask for recommendations with exclude_seen off"
    yield from checked.rows.finding(again, "info", "a user takes the same item again later", advice)


def _check_amounts(checked: _Checked) -> Iterator[Finding]:
    data = checked.data
    for role, vocabulary in (("user", data.user_ids), ("item", data.item_ids)):
        if len(vocabulary) == 1:
            what = f"{role} column is constant ({vocabulary[0][:40]!r})"
            advice = "recommendations need many; check that the right column was chosen"
            yield from checked.rows.finding(np.ones(len(data), dtype=bool), "error", what, advice, only_training=True)
    of_users = data.user_counts()
    dominates = (of_users > max(0.2 * len(data), 100)) & (data.num_users > 1)
    few = f"fewer than {MIN_EVENTS_PER_USER} events: they train but are never tested; drop them if most are so"
    rare = f"fewer than {MIN_EVENTS_PER_ITEM} events: little can be learned of them; the literature drops them"
    heavy = "more than a fifth of all events: a robot or a shared account? Remove it or split it"
    rows: tuple[tuple[Severity, str, Sequence[str], MaskArray, str], ...] = (
        ("warning", "users with too few events", data.user_ids, of_users < MIN_EVENTS_PER_USER, few),
        ("info", "rare items", data.item_ids, data.item_counts() < MIN_EVENTS_PER_ITEM, rare),
        ("warning", "one user dominates", data.user_ids, dominates, heavy),
    )
    for severity, what, ids, mask, advice in rows:
        if mask.any():
            where, count = (
                f"ids {some([ids[code] for code in np.flatnonzero(mask).tolist()])}",
                int(np.count_nonzero(mask)),
            )
            yield Finding(severity=severity, what=what, where=where, count=count, of=len(ids), advice=advice)


def _check_type_names(checked: _Checked) -> Iterator[Finding]:
    wrong = {name for name in checked.data.type_names if not 1 <= len(name.encode()) <= MAX_TYPE_BYTES}
    advice = f"a type has 1 to {MAX_TYPE_BYTES} bytes; check that the right column was chosen"
    yield from checked.rows.finding(checked.data.of_types(wrong), "error", "type is empty or too long", advice)
    advice = "a table has no column for the words that were searched; call it click"
    yield from checked.rows.finding(checked.data.of_types({SEARCH_CLICK}), "error", f"type is {SEARCH_CLICK}", advice)


def _check_types(checked: _Checked, schema: EventSchema) -> Iterator[Finding]:
    data, finding = checked.data, checked.rows.finding
    means = {name: schema.of(name) for name in data.type_names}
    read = {name for name, one in means.items() if one.is_encoded}
    unknown = means.keys() - schema.types.keys() - read
    turned_down = {name for name, one in means.items() if one.history} - read
    own = "name them in a file for `freshet train --events` (docs/guide/events.md)"
    near = [(name, found) for name in sorted(unknown) if (found := near_type(name, schema))]
    meant = "".join(f"\n           {schema_line(name, schema.of(found))}  # {found}?" for name, found in near[:20])
    own_types = f"rename them, or {own}{meant}"
    left_out: tuple[tuple[Collection[str], Severity, str, str], ...] = (
        (unknown, "warning", "types that the event schema does not name", f"they teach nothing: {own_types}"),
        (
            means.keys() - read - unknown - turned_down,
            "info",
            "types that say nothing of an item",
            "neither training nor histories take them",
        ),
        (
            turned_down,
            "info",
            "types that turn an item down",
            "histories keep them; training reads them with --actions",
        ),
    )
    sizes = list(zip(data.type_names, data.type_counts(), strict=True))
    for names, severity, what, advice in left_out:
        counts = [f"{name} {count:,} ({count / len(data):.1%})" for name, count in sizes if name in names]
        yield from finding(data.of_types(names), severity, f"{what}: {some(counts)}", advice)
    encoded = data.of_types(read)
    if not encoded.any():
        yield from finding(~encoded, "error", "no row is of a type that an encoder reads", own)
    elif (data.select(encoded).user_counts() < MIN_EVENTS_TO_TRAIN).all():
        advice = "training learns from two, chooses by one and is tested by one; was the right column chosen?"
        what = f"no user has {MIN_EVENTS_TO_TRAIN} events that an encoder reads"
        yield from finding(encoded, "error", what, advice, only_training=True)
    for name, weight in ((name, one.weight) for name, one in means.items() if one.weight.centre is not None):
        of_type = data.of_types({name})
        advice = "it would count as 1; fill the cell, or give the row a type whose value does not count"
        yield from finding(of_type & ~checked.has_value, "error", f"{name} without a value", advice)
        yield from _check_scale(checked, name, weight, of_type & checked.has_value, own)


def _check_scale(checked: _Checked, name: str, weight: TypeWeight, given: MaskArray, own: str) -> Iterator[Finding]:
    centre, values = weight.centre or 0.0, checked.data.values
    if (scale := other_scale(checked.data, name, weight, given)) is not None:
        advice = f"`freshet train` without --events puts this line into the bundle's: {scale_line(name, scale)}"
        what = f"{name} goes from {scale[0]:g} to {scale[1]:g}, which the event schema does not expect"
        yield from checked.rows.finding(given, "warning", what, advice)
        return
    reach = weight.limit / abs(weight.slope) if weight.slope else np.inf
    low, high = centre - reach, centre + reach
    advice = f"they count as {low:g} or {high:g}; bring them onto that scale, or {own}"
    what = f"{name} has values outside {low:g} to {high:g}"
    yield from checked.rows.finding(given & ((values < low) | (values > high)), "warning", what, advice)
    if weight.slope and not (weight.slope * (values[given] - centre) > 0).any():
        advice = f"above {centre:g} a value speaks for its item: bring values onto that scale, or {own}"
        yield from checked.rows.finding(given, "warning", f"every {name} speaks against its item", advice)


def other_scale(
    data: Interactions, name: str, weight: TypeWeight, given: MaskArray | None = None
) -> tuple[float, float] | None:
    """Return the usual scale of a type's values if the schema's weight does not fit it; None for up to five stars."""
    chosen = data.of_types({name}) if given is None else given
    if weight.centre is None or not chosen.any() or not weight.slope:
        return None
    reach = weight.limit / abs(weight.slope)
    least, most = float(data.values[chosen].min()), float(data.values[chosen].max())
    scale = rating_scale(least, most)
    fits = scale is None or (weight.centre - reach <= scale[0] and scale[1] <= weight.centre + reach)
    return None if fits else scale


def lines_for_scales(data: Interactions | None, schema: EventSchema) -> dict[str, str]:
    """Return lines of `events.yaml`, for types with another scale than the schema expects."""
    weights = {} if data is None else {name: schema.of(name).weight for name in data.type_names}
    scales = {name: other_scale(data, name, weight) for name, weight in weights.items() if data is not None}
    return {name: scale_line(name, scale) for name, scale in scales.items() if scale is not None}


_CHECKS: tuple[Callable[[_Checked], Iterator[Finding]], ...] = (
    _check_twins,
    _check_values,
    _check_times,
    _check_duplicates,
    _check_amounts,
    _check_type_names,
)


def _repeats(keys: tuple[npt.NDArray[np.integer], ...]) -> MaskArray:
    order = np.lexsort(keys[::-1])
    equal = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        equal &= key[order][1:] == key[order][:-1]
    repeated = np.zeros(len(order), dtype=bool)
    repeated[order[1:]] = equal
    return repeated


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
