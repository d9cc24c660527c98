"""The leases port in memory: members of one table, in one process, by a test's clock."""

from collections.abc import Callable, Collection, Sequence

from services.platform.stream.ports import Holding


class LeaseTable:
    """What Redis holds: members and leases with their ends, by `clock` in milliseconds."""

    def __init__(self, clock: Callable[[], int], lease_ms: int = 1000) -> None:
        self.clock, self.lease_ms = clock, lease_ms
        self.members: dict[str, int] = {}
        self.leases: dict[int, tuple[str, int]] = {}
        self.terms: dict[int, int] = {}


class MemoryLeases:
    """One member of a table. Renewed whenever it is asked what it holds, instead of by a thread."""

    def __init__(self, table: LeaseTable, owner: str) -> None:
        self._table, self._owner = table, owner
        self._partitions: list[int] = []
        self._is_closed = False

    def start(self, partitions: Sequence[int]) -> None:
        self._partitions = list(partitions)

    def holding(self) -> Holding:
        if self._is_closed:
            return Holding({})
        table = self._table
        now, end = table.clock(), table.clock() + table.lease_ms
        table.members[self._owner] = end
        table.members = {member: until for member, until in table.members.items() if until > now}
        table.leases = {partition: lease for partition, lease in table.leases.items() if lease[1] > now}
        fair = -(-len(self._partitions) // len(table.members))
        mine = [partition for partition, (owner, _) in table.leases.items() if owner == self._owner]
        for partition in self._partitions:
            if partition not in table.leases and len(mine) < fair:
                table.terms[partition] = table.terms.get(partition, 0) + 1
                mine.append(partition)
        table.leases |= dict.fromkeys(mine, (self._owner, end))
        terms = {partition: table.terms[partition] for partition in mine}
        return Holding(terms, max(0, len(mine) - fair))

    def release(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            if self._table.leases.get(partition, ("", 0))[0] == self._owner:
                del self._table.leases[partition]

    def close(self) -> None:
        self._is_closed = True
        self.release(self._partitions)
        self._table.members.pop(self._owner, None)
