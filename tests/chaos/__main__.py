"""`make chaos`: run trials, keep what was found as JSON, and write docs/operate/reliability.md of it.

python tests/chaos simulated|reverted|real|page [--seeds N] [--first N] [--trials N] [--minutes M]
    [--brokers 1|3] [--kind FAULT] [--models | --cluster]
"""

import argparse
import json
import math
import signal
import statistics
import sys
import time
from collections import Counter
from typing import Any

import paths
from reverted import REVERTED
from scenario import FAULTS, draw

from services.offline.evaluation.common.report import stored

ROOT = paths.TESTS.parent
ROWS = ROOT / "docs" / "benchmarks" / "reliability.json"
TEMPLATE, PAGE = ROOT / "docs" / "operate" / "reliability.md.j2", ROOT / "docs" / "operate" / "reliability.md"
# Faults of the simulation whose names a page puts in the words of the glossary.
SHOWN = {
    "redis away": "Redis unavailable",
    "kafka away": "Kafka unavailable",
    "topic made anew": "topic recreated",
}


def read() -> dict[str, Any]:
    return json.loads(ROWS.read_text()) if ROWS.exists() else {}


def write(part: str, found: Any) -> None:
    """Replace one part of the stored results; `stored` gives each row a line."""
    ROWS.write_text(stored(read() | {part: found}))


def added(totals: list[dict[str, Any]], trial: dict[str, Any]) -> list[dict[str, Any]]:
    """The totals by setting after one more real trial: counts, seeds, failing seeds, recovery seconds by fault.

    Raises: ValueError for a seed that its setting has already.
    """
    by_setting = {total["setting"]: total for total in totals}
    counts = {"events": 0, "reads": 0, "seeds": [], "failed": {}, "recovered_s": {}, "in_failed": {}}
    total = by_setting.setdefault(trial["setting"], {"setting": trial["setting"]} | counts)
    if trial["seed"] in total["seeds"]:
        raise ValueError(f"seed {trial['seed']} of {trial['setting']!r} is counted already: choose another --first")
    total["seeds"] = sorted([*total["seeds"], trial["seed"]])
    total["events"] += trial["events"]
    total["reads"] += trial["reads"]
    if trial["violations"]:
        total["failed"][str(trial["seed"])] = trial["violations"]
    for fault in trial["faults"]:
        total["recovered_s"].setdefault(fault["kind"], []).append(fault["recovered_s"])
        total["in_failed"][fault["kind"]] = total["in_failed"].get(fault["kind"], 0) + bool(trial["violations"])
    return [by_setting[setting] for setting in sorted(by_setting)]


def say(text: str) -> None:
    sys.stderr.write(text + "\n")


def simulated(first: int, seeds: int, minutes: float) -> bool:
    """Run random trials; whether none failed."""
    trials, violations = Counter[str](), Counter[str]()
    failed: dict[int, str] = {}
    began, number = time.monotonic(), 0
    for seed in range(first, first + seeds):
        if time.monotonic() - began > 60 * minutes:
            break
        trial = draw(seed)
        violation = trial.run()
        number += 1
        trials.update(trial.faults)
        if violation:
            violations.update(trial.faults)
            failed[seed] = violation
            say(f"seed {seed}: {trial.faults}: {violation}")
    rows = [{"fault": kind, "trials": trials[kind], "violations": violations[kind]} for kind in FAULTS]
    seconds = time.monotonic() - began
    write("simulated", {"first": first, "seeds": number, "seconds": round(seconds), "rows": rows, "failed": failed})
    return not failed


def reverted(most: int) -> bool:
    """How many seeds it takes to find each fix taken back; whether all were found."""
    rows = []
    for case, (what, patch) in REVERTED.items():
        with patch():
            found = next(((seed, said) for seed in range(most) if (said := draw(seed).run())), None)
        say(f"{case}: {found}")
        rows.append({"case": case, "reverted": what, "seeds": found and found[0] + 1, "said": found and found[1][:120]})
    write("reverted", rows)
    return all(row["seeds"] for row in rows)


def real(first: int, trials: int, minutes: float, brokers: int, kind: str, models: bool, cluster: bool) -> bool:
    """Trials on the local stack, each added to the totals of its setting; whether none failed."""
    from real import run_trials

    well = True
    for row in run_trials(first, trials, minutes, brokers, kind, models, cluster):
        say(f"{row}")
        write("real", added(read().get("real", []), row))
        well = well and not row["violations"]
    return well


def ranges(seeds: list[int]) -> str:
    """Ascending seeds in words, runs of them as "first to last"."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and runs[-1][-1] == seed - 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def page() -> bool:
    """docs/operate/reliability.md of the rows."""
    rows = read()
    settings = rows.get("real", [])
    recovered: dict[str, list[float]] = {}
    in_failed = Counter[str]()
    for total in settings:
        for kind, seconds in total["recovered_s"].items():
            recovered.setdefault(kind, []).extend(seconds)
        in_failed.update(total["in_failed"])
    found = rows["simulated"]
    tables = {
        "SIMULATED": "\n".join(
            f"| {SHOWN.get(r['fault'], r['fault'])} | {r['trials']:,} | {r['violations']} |" for r in found["rows"]
        ),
        "SEEDS": f"{found['seeds']:,}",
        "RANGES": f"{found['first']} to {found['first'] + found['seeds'] - 1}",
        "SIM_SECONDS": f"{found['seconds']:,}",
        "SIM_FAILED": f"{len(found['failed'])} (seeds {', '.join(found['failed']) or 'none'})",
        "CASES": str(len(rows["reverted"])),
        "REVERTED": str(max(r["seeds"] or math.inf for r in rows["reverted"])),
        "REAL_TRIALS": str(sum(len(total["seeds"]) for total in settings)),
        "SETTINGS": "\n".join(
            f"| {one['setting']} | {len(one['seeds'])} | {len(one['failed'])} | {one['events']:,} | {one['reads']:,} | "
            f"{ranges(one['seeds'])} |"
            for one in settings
        ),
        "REAL": "\n".join(
            f"| {kind} | {len(seconds)} | {in_failed[kind]} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
            for kind, seconds in sorted(recovered.items())
        ),
    }
    text = TEMPLATE.read_text()
    for name, table in tables.items():
        text = text.replace("{" + name + "}", table)
    PAGE.write_text(text)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/chaos")
    parser.add_argument("part", choices=["simulated", "reverted", "real", "page"])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--brokers", type=int, choices=[1, 3], default=1)
    parser.add_argument("--kind", default="")
    parser.add_argument("--models", action="store_true", help="An operator changes version sets all the while.")
    parser.add_argument("--cluster", action="store_true", help="Redis is a cluster of three masters and replicas.")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a trial started ends with it
    well = {
        "simulated": lambda: simulated(asked.first, asked.seeds, asked.minutes),
        "reverted": lambda: reverted(asked.seeds),
        "real": lambda: real(
            asked.first, asked.trials, asked.minutes, asked.brokers, asked.kind, asked.models, asked.cluster
        ),
        "page": page,
    }[asked.part]()
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
