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

ROOT = paths.TESTS.parent
ROWS = ROOT / "docs" / "benchmarks" / "reliability.json"
TEMPLATE, PAGE = ROOT / "docs" / "operate" / "reliability.template.md", ROOT / "docs" / "operate" / "reliability.md"


def write(part: str, found: Any) -> None:
    """Put one part's rows in the place of the ones before."""
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    ROWS.write_text(json.dumps(rows | {part: found}, indent=1) + "\n")


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
    """Trials on the local stack, each beside the ones before or in the place of its own; whether none failed."""
    from real import run_trials

    well = True
    for row in run_trials(first, trials, minutes, brokers, kind, models, cluster):
        say(f"{row}")
        before = json.loads(ROWS.read_text()).get("real", ()) if ROWS.exists() else ()
        others = [one for one in before if (one["setting"], one["seed"]) != (row["setting"], row["seed"])]
        write("real", sorted([*others, row], key=lambda one: (one["setting"], one["seed"])))
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
    rows = json.loads(ROWS.read_text())
    in_real: dict[str, list[dict[str, Any]]] = {}
    for trial in rows.get("real", ()):
        for fault in trial["faults"]:
            about = {**fault, "bad": bool(trial["violations"])}
            in_real.setdefault(fault["kind"], []).append(about)
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for trial in rows.get("real", ()):
        by_setting.setdefault(trial["setting"], []).append(trial)
    found = rows["simulated"]
    # Where trials of other seeds were added to the first ones.
    runs = [found, *([found["also"]] if "also" in found else [])]
    tables = {
        "SIMULATED": "\n".join(f"| {r['fault']} | {r['trials']:,} | {r['violations']} |" for r in found["rows"]),
        "SEEDS": f"{sum(run['seeds'] for run in runs):,}",
        "RANGES": ", ".join(f"{run['first']} to {run['first'] + run['seeds'] - 1}" for run in runs),
        "SIM_SECONDS": f"{sum(run['seconds'] for run in runs):,}",
        "SIM_FAILED": f"{len(found['failed'])} (seeds {', '.join(found['failed']) or 'none'})",
        "CASES": str(len(rows["reverted"])),
        "REVERTED": str(max(r["seeds"] or math.inf for r in rows["reverted"])),
        "REAL_TRIALS": str(len(rows.get("real", ()))),
        "SETTINGS": "\n".join(
            f"| {setting} | {len(ones)} | {sum(bool(one['violations']) for one in ones)} | "
            f"{sum(one['events'] for one in ones):,} | {sum(one['reads'] for one in ones):,} | "
            f"{ranges(sorted({one['seed'] for one in ones}))} |"
            for setting, ones in sorted(by_setting.items())
        ),
        "REAL": "\n".join(
            f"| {kind} | {len(ones)} | {sum(one['bad'] for one in ones)} | "
            f"{statistics.median(one['recovered_s'] for one in ones):.1f} | "
            f"{max(one['recovered_s'] for one in ones):.1f} |"
            for kind, ones in sorted(in_real.items())
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
