"""ListDeadLetters and ReplayDeadLetter."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.contracts.dead_letters import LETTERED, Replayed
from services.contracts.topics.dead_letters import StoredLetter
from services.gateway.ports import DeadLetterLog
from services.platform.errors import InvalidRequest
from services.platform.stream.records import Position

DEFAULT_LETTERS, MAX_LETTERS = 50, 200
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The two handlers."""

    log: DeadLetterLog

    async def newest(self, topic: str, max_letters: int) -> tuple[Sequence[StoredLetter], bool]:
        """Return a topic's newest letters ("": of each), and whether there are older ones.

        Raises: InvalidRequest; DependencyUnavailable.
        """
        if max_letters > MAX_LETTERS:
            raise InvalidRequest.of("max_letters", max_letters, f"0-{MAX_LETTERS}")
        letters, has_older = await self.log.newest((_checked(topic),) if topic else LETTERED, _TIMEOUT_S)
        counts: Counter[str] = Counter()
        shown = []
        for letter in letters:
            counts[letter.topic] += 1
            if counts[letter.topic] <= (max_letters or DEFAULT_LETTERS):
                shown.append(letter)
        return shown, has_older or len(shown) < len(letters)

    async def replay(self, topic: str, place: Position, *, preview: bool) -> Replayed:
        """Write the record again, unless it was replayed or a later change would be undone.

        Raises: InvalidRequest; NotFound; DependencyUnavailable.
        """
        if place.partition < 0 or place.offset < 0:
            raise InvalidRequest.of("position", f"{place.partition}:{place.offset}", "as ListDeadLetters has it")
        return await self.log.replay(_checked(topic), place, preview=preview, timeout_s=_TIMEOUT_S)


def _checked(topic: str) -> str:
    if topic not in LETTERED:
        raise InvalidRequest.of("topic", topic[:80], ", ".join(LETTERED))
    return topic
