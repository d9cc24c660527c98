"""A refresher over a recorded log, in a process that is killed again and again; run by test_refresher_kills.py.

It forks a child per life, so that 200 lives cost seconds: the child folds and publishes, the parent kills it (SIGKILL)
after a random time and counts where it was. Checkpoints are real files; published batches are appended to a file, as a
topic keeps them. The last life is left alone, and ends in the digest.

python refresher_victim.py FOLDER SEED LIVES RECORDS
"""

import json
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path

# This checkout, whatever is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "refresher"))

import structlog
from fakes.refresher import MemoryLog
from refresher_scene import Running, World, fold_all, make_rules, random_records, readers_view

from services.refresher.adapters.checkpoint_topic import CheckpointFiles
from services.refresher.checkpoint import to_file

LISTED = {"item-12": False, "item-13": False}


class FileOutbox:
    """Batches appended record by record, each a while after the other: a kill leaves a part of one, as on a topic."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def publish(self, deltas, unreadable, tombstones=()):
        for delta in deltas:
            data = pickle.dumps(delta)
            with self._path.open("ab") as file:
                file.write(len(data).to_bytes(4, "little") + data)
            time.sleep(0.001)

    def close(self):
        """Nothing is held."""

    def read(self):
        data = self._path.read_bytes() if self._path.exists() else b""
        found, at = [], 0
        while at + 4 <= len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            found.append(pickle.loads(data[at + 4 : at + 4 + size]))
            at += 4 + size
        return found


class Folder:
    """Checkpoints as files, written aside and renamed: what a kill may leave of a topic's own is tested there."""

    def __init__(self, root: Path) -> None:
        self._root, self._parts = root, {}
        root.mkdir(exist_ok=True)

    def save(self, partition, values, parts):
        self._parts = {name: self._parts[name] if data is None else data for name, data in parts.items()}
        aside, newest = self._root / f".partition-{partition}.aside", self._root / f"partition-{partition}.checkpoint"
        aside.write_bytes(to_file(values, self._parts))
        # Time for a kill between the two steps, which alone take microseconds.
        time.sleep(0.002)
        aside.replace(newest)

    def load(self, partition):
        return CheckpointFiles(self._root).load(partition)

    def close(self):
        """Nothing is held."""


def refresher(world: World, folder: Path) -> Running:
    return world.refresher(
        checkpoints=Folder(folder / "checkpoints"),
        outbox=FileOutbox(folder / "deltas"),
        max_changes=5,
        checkpoint_s=0.01,
    )


def live_and_die(world: World, folder: Path, rng: random.Random) -> None:
    """Fork a life and kill it a random while into a random turn."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        running = refresher(world, folder)
        while True:
            running.refresher.step()
            os.write(writing, b"!")
    os.close(writing)
    turns = rng.randrange(12)
    while turns > 0:
        turns -= len(os.read(reading, turns))
    time.sleep(rng.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)


def main(folder: Path, seed: int, lives: int, count: int) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    rng = random.Random(seed)
    rules = make_rules(max_remembered=12)
    records = random_records(seed, count)
    world = World(rules, log=MemoryLog(poll_records=7))
    for item in LISTED:
        world.log.put(item)
    left_aside, half_batches = 0, 0
    for number in range(lives):
        # The log grows while refreshers live and die.
        for record in records[count * number // lives : count * (number + 1) // lives]:
            world.log.append(0, record)
        live_and_die(world, folder, rng)
        left_aside += bool(list((folder / "checkpoints").glob(".partition-*")))
        written = FileOutbox(folder / "deltas").read()
        half_batches += bool(written) and not written[-1].last_of_batch
        for left in (folder / "checkpoints").glob(".partition-*"):
            left.unlink()
    last = refresher(world, folder)
    last.settle()
    last.refresher.finish()
    batch = fold_all(rules, world.log, listed=LISTED)
    again = refresher(world, folder)
    again.settle()
    (state,) = again.held.partitions.values()
    written = FileOutbox(folder / "deltas").read()
    items, entries = readers_view(written)
    result = {
        "digests": [again.digests()[0], batch.digest()],
        "items": sorted(items),
        "live": sorted(item for item in state.sums if not again.publisher.reasons(state, [item])[0]),
        "entries": sorted(entries),
        "remembered": sorted(entry.entry_id for entry in batch.remembered.memory),
        "killed_in_a_checkpoint": left_aside,
        "killed_in_a_batch": half_batches,
        "deltas": len(written),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
