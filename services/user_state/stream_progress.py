"""This process's progress in `interactions`, from the state store: epoch, watermarks, and the identity of the log.

Kafka's committed offsets serve lag monitoring, and show which attributions were published before the store was lost.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import structlog

from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.records import SourceRecord
from services.user_state.log_identity import LogIdentity, LostTail
from services.user_state.ports import Store
from services.user_state.values import AdvanceStep, PopularityStep
from services.user_state.write_histories import WriteHistories

log = structlog.get_logger()


class StreamProgress:
    """Caches the state store's progress; `resync` reads it again.

    keep: the durable histories; None if the store cannot lose users. watermarks: by assigned partition. identity: the
    caller passes it the records that it reads, and lets it check the logs before it applies them. tails_lost: how many
    epochs began because a log lost its end.
    """

    def __init__(self, store: Store, keep: WriteHistories | None, model_version: str) -> None:
        self._store, self._keep, self._model_version = store, keep, model_version
        self.epoch = ""
        self.watermarks: dict[int, int] = {}
        self.tails_lost = 0
        # Users written since the watermark of their home partition moved.
        self._unfinished: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self.identity = LogIdentity()
        self._may_have_lost = False
        # Model versions in the store.
        self._named: set[str] = set()

    def resync(self, stream: Reader) -> bool:
        """Read epoch and watermarks from the store and seek the stream there. Return True if the epoch changed.

        A store without an epoch gets one. Each partition is then read from after its mark in `histories`, or from the
        beginning if it has no mark; records below the committed offsets yield no attributions again. If a log lost its
        end, the store is emptied and gets a new epoch too; that partition's attributions are published again.

        Raises: PreconditionFailed if the topic is not the one whose records were applied.
        """
        partitions = stream.partitions()
        epoch, _ = self._store.ensure_epoch(stream.num_partitions())
        self._named.clear()
        self.name_model(self._model_version)
        progress = self._store.begin(partitions, epoch)
        self._committed = dict(stream.committed())
        self.watermarks = {partition: progress[partition].watermark for partition in partitions}
        try:
            self.identity.resync(stream, self.watermarks, {p: progress[p].anchors for p in partitions})
        except LostTail as lost:
            self._replace_epoch(stream, epoch, lost)
            return self.resync(stream)
        self._may_have_lost = False
        if self._keep is not None:
            self._keep.anchors = self.identity.text
            if self._keep.take_over(stream, epoch, progress):
                return self.resync(stream)
        self._unfinished = {partition: progress[partition].unfinished for partition in partitions}
        stream.seek({partition: watermark + 1 for partition, watermark in self.watermarks.items()})
        changed = epoch != self.epoch
        self.epoch = epoch
        return changed

    def is_paused(self) -> bool:
        """Return whether the stream has to wait for an import. Raises: DependencyUnavailable."""
        return self._store.is_paused()

    def name_model(self, model_version: str) -> None:
        """Add a model version before its first state is stored. Raises: DependencyUnavailable."""
        if model_version not in self._named:
            self._store.add_model(model_version)
            self._named.add(model_version)

    def is_new(self, record: SourceRecord) -> bool:
        return record.offset > self.watermarks[record.partition]

    def yields_attributions(self, partition: int, offset: int) -> bool:
        """Return False if an earlier epoch has published all attributions of this record."""
        return offset >= self._committed.get(partition, 0)

    def unknown_logs(self, ends: Offsets) -> Offsets:
        """Return the ends of the partitions without anchors, whose log could change unnoticed."""
        return {partition: end for partition, end in ends.items() if partition not in self.identity.partitions}

    def check_epoch(self) -> None:
        """Raise Conflict if the store's epoch or watermarks differ from this process's, or DependencyUnavailable."""
        epoch = self._store.epoch()
        if epoch != self.epoch:
            raise Conflict(f"the state store's epoch is {epoch}, not {self.epoch}")
        self.check_in_step()
        # A cluster may lose only the list of models; forgetting a user would then miss the states of these models.
        self._named.clear()
        self.name_model(self._model_version)

    def check_in_step(self) -> None:
        """Raise Conflict if the store's watermarks are not this writer's, or DependencyUnavailable.

        Call it after loading users: what is published from an older store cannot be taken back.
        """
        found = self._store.progress(self.watermarks.keys(), self.epoch)
        if other := sorted(number for number, at in self.watermarks.items() if found[number].watermark != at):
            raise Conflict(f"the state store's watermarks changed: partitions {other}")

    def wrote(self, homes: Collection[int]) -> None:
        """Count written users. homes: one per user."""
        for home in homes:
            if home in self._unfinished:
                self._unfinished[home] += 1

    def advance(
        self,
        offsets: Offsets,
        counts: Mapping[int, Mapping[str, int]],
        popular: Mapping[int, PopularityStep] = MappingProxyType({}),
    ) -> None:
        """Move watermarks to these offsets. counts, popular: by partition, from the records since the watermark.

        Raises: Conflict if a stored watermark differs, or users written since the last move are missing;
        DependencyUnavailable.
        """
        steps = [
            AdvanceStep(
                partition=partition,
                from_watermark=self.watermarks[partition],
                to_watermark=offset,
                counts=counts[partition],
                anchors=self.identity.text(partition),
                unfinished=self._unfinished[partition],
                popular=popular.get(partition),
            )
            for partition, offset in offsets.items()
        ]
        self._store.advance(steps, self.epoch)
        self.watermarks.update(offsets)
        self._unfinished.update(dict.fromkeys(offsets, 0))

    def pass_over(self, positions: Offsets) -> None:
        """Move watermarks over offsets without records, such as aborted transactions. Raises: as `advance`."""
        last = {partition: position - 1 for partition, position in positions.items()}
        passed = {p: last[p] for p, watermark in self.watermarks.items() if last.get(p, -1) > watermark}
        if passed:
            self.advance(passed, {partition: {} for partition in passed})

    def committable(self) -> dict[int, int]:
        """Return the offsets to commit: one past the watermark, if `resync` found a lower committed offset."""
        return {
            partition: watermark + 1
            for partition, watermark in self.watermarks.items()
            if watermark + 1 > self._committed.get(partition, 0)
        }

    def _replace_epoch(self, stream: Reader, epoch: str, lost: LostTail) -> None:
        """Raise DependencyUnavailable the first time, because a newly elected leader may not know its end yet."""
        if not self._may_have_lost:
            self._may_have_lost = True
            raise DependencyUnavailable(f"{lost}, before the watermark; checking once more")
        log.error("log_lost_its_tail", ends=dict(lost.ends), applied={p: self.watermarks[p] for p in lost.ends})
        stream.commit(dict.fromkeys(lost.ends, 0))
        self.identity.keep()
        if self._keep is not None:
            self._keep.void(stream.partitions(), stream.num_partitions())
        self._store.start_new_epoch(epoch)
        self.tails_lost += 1
