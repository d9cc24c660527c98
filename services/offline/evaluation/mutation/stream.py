"""A stream of inserts, updates and deletes, and what a catalogue holds after any number of them.

A third of the events each, so the catalogue keeps its size. An item is a number; its state is a number, too, in a pool
of states made beforehand, so a catalogue at any point of the stream is two arrays and can be searched exactly.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
GONE = -1


@dataclass(frozen=True, slots=True)
class Stream:
    """`num_items` items numbered from 0 with states of the same number, then events (n,): item and its new state.

    State -1 removes the item.
    """

    num_items: int
    item: IntArray
    state: IntArray

    def batch(self, start: int, end: int) -> tuple[list[int], list[int], list[int]]:
        """Events `start` to `end` as one change: items to write, their states, items to remove. Last words count."""
        last = dict(zip(self.item[start:end].tolist(), self.state[start:end].tolist(), strict=True))
        written = [item for item, state in last.items() if state != GONE]
        return written, [last[item] for item in written], [item for item, state in last.items() if state == GONE]

    def held(self, events: int) -> tuple[IntArray, IntArray]:
        """Items and their states after the first `events` events."""
        state = np.full(max(self.num_items, int(self.item[:events].max(initial=-1)) + 1), GONE)
        state[: self.num_items] = np.arange(self.num_items)
        state[self.item[:events]] = self.state[:events]  # of repeated items the last assignment stays
        items = np.flatnonzero(state != GONE)
        return items, state[items]


def make_stream(num_items: int, num_states: int, num_events: int, seed: int) -> Stream:
    """Draw events: inserts take new numbers or the longest removed ones, updates and removals any living item."""
    rng = np.random.default_rng(seed)
    kinds = rng.integers(3, size=num_events).tolist()
    draws = rng.random(num_events).tolist()
    states = rng.integers(num_states, size=num_events)
    living = list(range(num_items))
    removed: list[int] = []
    reused, unused = 0, num_items
    items: list[int] = []
    for number, (kind, draw) in enumerate(zip(kinds, draws, strict=True)):
        place = int(draw * len(living))
        if kind == 0:
            if len(removed) - reused > num_items // 10:
                items.append(removed[reused])
                reused += 1
            else:
                items.append(unused)
                unused += 1
            living.append(items[-1])
        elif kind == 1 or len(living) <= num_items // 2:
            items.append(living[place])
        else:
            items.append(living[place])
            living[place] = living[-1]
            living.pop()
            removed.append(items[-1])
            states[number] = GONE
    return Stream(num_items, np.array(items, dtype=np.int64), states)
