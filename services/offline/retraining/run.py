"""`freshet retrain`: train on the log up to a moment, evaluate on the events after it, install the model if it passes.

The moment is `hours` before the newest event. The evaluated model itself is installed (decision 059). An interrupted
run resumes from its checkpoint; a run with the previous run's data and settings does nothing.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from services.algorithms.bundles.event_schema import EVENTS_YAML
from services.algorithms.bundles.model_bundle import ITEMS, Bundle, load_bundle
from services.algorithms.bundles.model_manifest import BundleError, Manifest
from services.algorithms.bundles.sealed_files import MANIFEST
from services.algorithms.item_table.file import attributes_in
from services.offline.archive.files import Archive, is_archive
from services.offline.bundles.folders import require_target
from services.offline.datasets import Interactions, load_dataset
from services.offline.datasets.catalogue_file import Catalogue, attribute_columns
from services.offline.evaluation.bundles.judged import utc
from services.offline.retraining.gate import Verdict, judge
from services.offline.training.fit import NONE
from services.offline.training.run import run_training

HOURS = 24.0

Train = Callable[..., Mapping[str, Any]]


def retrain(
    *,
    serving: Path,
    data: str | Path | Interactions,
    out: Path,
    hours: float = HOURS,
    settings: Mapping[str, Any],
    console: Console | None = None,
    train: Train = run_training,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, Any]:
    """Train a bundle in `out`.held-back, evaluate it, and move it to `out` if it passes.

    A previous bundle becomes `out`.before. settings: arguments of `run_training`; event schema, attributes and actions
    default to the serving model's. Returns lineage, verdict, and whether anything was done.
    Raises: ValueError for data without times, `hours` that leave no events to train on, too few events to evaluate
    on, or a serving model that has trained on the evaluation events; BundleError for an unusable bundle.
    """
    say: Callable[[str], None] = console.print if console is not None else (lambda text: None)
    require_target(out)
    old = load_bundle(serving)
    events = data if isinstance(data, Interactions) else load_dataset(data)
    first = _first_judged(events, hours)
    _check_unseen(old, events, first)
    lineage = _lineage(old, events, first, data, settings)
    aside = out.with_name(f"{out.name}.held-back")
    for path in (out, aside):
        done = _noted(path, lineage)
        # If the bundle in `aside` passed, the previous run was interrupted before the move.
        if done is not None and "gate" in done and done["gate"]["passes"] == (path == out):
            say(f"{path} was made of these events with these settings already: nothing to do")
            return done | {"bundle": str(path), "is_new": False}
    if _noted(aside, lineage) is None:
        past = events.select(slice(0, first))
        # The new catalogue has only items with an event before row `first`.
        known = past.select(past.seen(old.event_schema)).keep_frequent(min_per_item=1)
        if aside.exists():
            shutil.rmtree(aside)
        options = {**_options_of(old), **settings}
        train(out=aside, interactions=known, split=NONE, resume=True, console=console, **options)
        _note(aside, lineage=lineage)
    new = load_bundle(aside)
    say(f"Judging by what people took of {len(events) - first:,} events from {utc(events.timestamps[first])} on")
    verdict = judge(old, new, events, first, clock=clock)
    report = {"lineage": lineage, "gate": _plain(verdict), "model_version": new.model_version}
    _note(aside, **report)
    if verdict.passes:
        if out.exists():
            load_bundle(out)  # only a bundle may be replaced
            before = out.with_name(f"{out.name}.before")
            shutil.rmtree(before, ignore_errors=True)
            out.rename(before)
        aside.rename(out)
    return report | {"bundle": str(out if verdict.passes else aside), "is_new": True}


def _first_judged(events: Interactions, hours: float) -> int:
    if not events.has_times:
        raise ValueError(f"{events.name} has no times by the clock; allowed: data that has")
    begin = int(events.timestamps[-1]) - round(hours * 3600)
    first = int(np.searchsorted(events.timestamps, begin, side="right"))
    if not first:
        raise ValueError(f"hours={hours:g}; allowed: less than the {events.name} data's hours")
    return first


def _check_unseen(serving: Bundle, events: Interactions, first: int) -> None:
    learnt, begin = serving.manifest.data.get("newest_time"), int(events.timestamps[first])
    if learnt is not None and learnt >= begin:
        raise ValueError(
            f"the serving model {serving.model_version} has learnt events up to {utc(learnt)} and would be judged "
            f"by those from {utc(begin)} on; allowed: newer data, or fewer hours"
        )


def _options_of(serving: Bundle) -> dict[str, Any]:
    options: dict[str, Any] = {"actions": bool(serving.encoder.actions)}
    if EVENTS_YAML in serving.manifest.files:
        options["events"] = serving.file(EVENTS_YAML)
    if serving.attributes.kinds:
        path = serving.path / ITEMS
        columns = attributes_in(pa.ipc.open_file(pa.memory_map(str(path))).read_all())
        attributes = attribute_columns(path, columns, without=())
        options["catalogue"] = Catalogue(rows=serving.item_index, attributes=attributes)
    return options


def _lineage(
    serving: Bundle, events: Interactions, first: int, data: Any, settings: Mapping[str, Any]
) -> dict[str, Any]:
    known = events.select(slice(0, first))
    lineage = {
        "serving": serving.model_version,
        "fingerprint": known.fingerprint(),
        "events": first,
        "newest_time": int(known.timestamps[-1]),
        "judged_events": len(events) - first,
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "code": version("freshet-recsys"),
    }
    if isinstance(data, str | Path) and is_archive(Path(data)):
        ends = {number: part.end for number, part in Archive.open(Path(data)).partitions.items()}
        lineage["offsets"] = {str(number): end for number, end in sorted(ends.items())}
    return lineage


def _noted(path: Path, lineage: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        noted = Manifest.read(path / MANIFEST).metrics.get("retraining")
    except BundleError:
        return None
    return noted if noted and noted.get("lineage") == lineage else None


def _note(path: Path, **said: Any) -> None:
    """Write to the manifest's metrics, which do not change the model's version."""
    manifest = Manifest.read(path / MANIFEST)
    plain = json.loads(json.dumps(said))
    replace(manifest, metrics={**manifest.metrics, "retraining": plain}).write(path / MANIFEST)


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {**json.loads(json.dumps(asdict(verdict))), "passes": verdict.passes}
