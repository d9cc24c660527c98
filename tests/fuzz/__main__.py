"""`make fuzz`: random inputs for every RPC, every topic's reader and every reader of files; what fails is printed.

python tests/fuzz [--inputs N] [--seed S] [--minutes M] [--target PREFIX] [--only TARGET:NUMBER] [--list]

Exit status 1 when an input failed or memory grew. The last line of stdout is JSON.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import paths  # noqa: F401
from campaign import MAX_GROWTH_BYTES, Campaign
from targets import all_targets


def tell(said: str) -> None:
    """As it comes."""
    sys.stderr.write(said)


def main() -> int:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--target", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    targets = [target for target in all_targets() if target.name.startswith(asked.target)]
    if asked.list:
        sys.stdout.write("\n".join(f"{target.name} (weight {target.weight})" for target in targets) + "\n")
        return 0
    campaign = Campaign(targets, asked.seed, tell=tell)
    with tempfile.TemporaryDirectory(prefix="freshet-fuzz-") as folder:
        if asked.only:
            name, _, number = asked.only.rpartition(":")
            asyncio.run(campaign.run_one(name, int(number), Path(folder)))
        else:
            asyncio.run(campaign.run(asked.inputs, Path(folder), minutes=asked.minutes))
    has_grown = campaign.grown_bytes > MAX_GROWTH_BYTES
    if campaign.findings:
        sys.stderr.write(campaign.said() + "\n")
    if has_grown:
        sys.stderr.write(f"memory grew by {campaign.grown_bytes >> 20} MiB; allowed: {MAX_GROWTH_BYTES >> 20}\n")
    sys.stdout.write(json.dumps(campaign.report()) + "\n")
    return 1 if campaign.findings or has_grown else 0


sys.exit(main())
