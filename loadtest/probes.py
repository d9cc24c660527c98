"""Which written interactions can be seen in answers: the books of a served probe.

One interaction with an item of the probes' own; then somebody else's answers about that item are watched. An event
counts as reflected when an answer's score has moved and the served evidence behind the item has grown. Knows no clock
and no calls: the caller brings times and what answers said.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class _Item:
    score: float | None = None
    evidence: int = 0
    written_s: float | None = None


@dataclass(slots=True)
class ProbeBoard:
    """Items that take turns; each has at most one interaction under way."""

    item_ids: list[str]
    lags_s: list[float] = field(default_factory=list)
    _items: dict[str, _Item] = field(init=False)
    _turn: int = 0

    def __post_init__(self) -> None:
        self._items = {item_id: _Item() for item_id in self.item_ids}

    def baseline(self, item_id: str, score: float, evidence: int) -> None:
        """What is served of the item before anything is under way."""
        self._items[item_id] = _Item(score=score, evidence=evidence)

    def take(self) -> str | None:
        """The next item that is free to be written; None while all are under way or have no baseline."""
        for _ in self.item_ids:
            item_id = self.item_ids[self._turn % len(self.item_ids)]
            self._turn += 1
            item = self._items[item_id]
            if item.written_s is None and item.score is not None:
                return item_id
        return None

    def written(self, item_id: str, now_s: float) -> None:
        """Its interaction is acknowledged since `now_s`."""
        self._items[item_id].written_s = now_s

    @property
    def under_way(self) -> list[str]:
        """Items whose interaction has not been seen yet."""
        return [item_id for item_id, item in self._items.items() if item.written_s is not None]

    def moved(self, item_id: str, score: float) -> bool:
        """Whether an answer tells another score than before."""
        item = self._items[item_id]
        return item.written_s is not None and score != item.score

    def confirm(self, item_id: str, score: float, evidence: int, seen_s: float) -> bool:
        """The score moved at `seen_s`: true when the served evidence has grown too, then the lag is noted.

        A score may move for another reason (the memory's votes, say): then it is the new baseline.
        """
        item = self._items[item_id]
        item.score = score
        if item.written_s is None or evidence <= item.evidence:
            return False
        self.lags_s.append(seen_s - item.written_s)
        item.evidence, item.written_s = evidence, None
        return True
