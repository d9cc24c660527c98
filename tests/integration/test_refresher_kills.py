"""kill -9 of the refresher at 200 random points: it ends in the batch's digest, and readers hold what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

VICTIM = Path(__file__).with_name("refresher_victim.py")
LIVES_PER_SEED = 50


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_killed_at_random_points_it_ends_in_the_digest_of_the_batch(seed: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(VICTIM), str(tmp_path), str(seed), str(LIVES_PER_SEED), "1500"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(
        f"seed {seed}: {LIVES_PER_SEED} lives, {result['killed_in_a_checkpoint']} ended inside a checkpoint, "
        f"{result['killed_in_a_batch']} inside a batch, {result['deltas']} deltas, digest {result['digests'][0]}\n"
    )
    assert result["killed_in_a_checkpoint"] + result["killed_in_a_batch"] > 0
    live, batch = result["digests"]
    assert live == batch
    assert result["items"] == result["live"]
    assert result["entries"] == result["remembered"]
