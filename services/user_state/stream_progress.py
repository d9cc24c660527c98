"""Where this process stands in `interactions`, as the state store has it: epoch, watermarks, and which log it is.

Progress lives in the state store alone; Kafka's committed offsets serve lag monitoring, and say up to where
attributions went out before the state store was lost. It knows neither records' contents nor what is made of them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import structlog

from services.platform.errors import Conflict, DependencyUnavailable
from services.platform.stream.ports import Offsets, Reader
from services.platform.stream.record import SourceRecord
from services.user_state.keep_histories import KeepHistories
from services.user_state.log_identity import LogIdentity, LostTail
from services.user_state.ports import Store
from services.user_state.values import AdvanceStep, PopularityStep

log = structlog.get_logger()


class Advance(NamedTuple):
    """A partition was applied up to this offset, with these counts, and this became popular."""

    offset: int
    counts: Mapping[str, int]
    popular: PopularityStep | None


class StreamProgress:
    """Holds what the state store last said; `resync` asks it again.

    epoch: the store's. watermarks: of the partitions that are applied here. tails_lost: how often a log had lost its
    end, so that a new epoch was begun. model_version: of the process's own model. keep: the durable histories; None:
    over a store that loses nobody.
    """

    def __init__(self, store: Store, keep: KeepHistories | None, model_version: str) -> None:
        self._store, self._keep, self._model_version = store, keep, model_version
        self.epoch = ""
        self.watermarks: dict[int, int] = {}
        self.tails_lost = 0
        # By home partition: users written since its watermark moved.
        self._unfinished: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self._identity = LogIdentity()
        self._may_have_lost = False
        # Models that the store knows by name.
        self._named: set[str] = set()

    def resync(self, stream: Reader) -> bool:
        """Take epoch and watermarks from the store and seek the stream there; True when the epoch is new to us.

        The stream's partitions are those that are applied from now on.
        A store without an epoch gets one and everything is read again from the beginning; what was committed before
        then yields no attributions a second time. Where a log has lost its end, the store is emptied and gets a new
        epoch, too; attributions of that partition go out again (readers know them by their position).
        Raises: PreconditionFailed when the topic is another one than the one whose records were applied.
        """
        partitions = stream.partitions()
        epoch, _ = self._store.ensure_epoch(stream.num_partitions())
        self._named.clear()
        self.name_model(self._model_version)
        progress = self._store.begin(partitions, epoch)
        self._committed = dict(stream.committed())
        self.watermarks = {partition: progress[partition].watermark for partition in partitions}
        try:
            self._identity.resync(stream, self.watermarks, {p: progress[p].anchors for p in partitions})
        except LostTail as lost:
            self._begin_anew(stream, epoch, lost)
            return self.resync(stream)
        self._may_have_lost = False
        if self._keep is not None:
            self._keep.anchors = self._identity.text
            if self._keep.take_over(stream, epoch, progress):
                return self.resync(stream)
        self._unfinished = {partition: progress[partition].unfinished for partition in partitions}
        stream.seek({partition: watermark + 1 for partition, watermark in self.watermarks.items()})
        changed = epoch != self.epoch
        self.epoch = epoch
        return changed

    def is_held(self) -> bool:
        """Whether an import fills the store and the stream has to wait for it. Raises: DependencyUnavailable."""
        return self._store.is_held()

    def name_model(self, model_version: str) -> None:
        """Before its first state is stored. Raises: DependencyUnavailable."""
        if model_version not in self._named:
            self._store.add_model(model_version)
            self._named.add(model_version)

    def is_new(self, record: SourceRecord) -> bool:
        """Whether it lies behind the watermark."""
        return record.offset > self.watermarks[record.partition]

    def yields_attributions(self, partition: int, offset: int) -> bool:
        """Whether those of this record did not all go out in an earlier epoch."""
        return offset >= self._committed.get(partition, 0)

    def came(self, records: Sequence[SourceRecord]) -> None:
        """Records were read; by them the log is known again."""
        self._identity.came(records)

    def check_log(self, stream: Reader, partitions: Collection[int]) -> None:
        """Before records of these partitions are applied: whether they are the logs that they were.

        Raises: Conflict when one is not; DependencyUnavailable.
        """
        self._identity.check(stream, partitions)

    def unknown_logs(self, ends: Offsets) -> Offsets:
        """The ends of those partitions of which nothing is remembered that would tell another log."""
        return {partition: end for partition, end in ends.items() if partition not in self._identity.partitions}

    def check_epoch(self) -> None:
        """Raises: Conflict when the store lost or changed its epoch, or went back; DependencyUnavailable."""
        epoch = self._store.epoch()
        if epoch != self.epoch:
            raise Conflict(f"the state store's epoch is {epoch}, not {self.epoch}")
        self.check_in_step()
        # On a cluster models' names may be lost alone; a forget would leave the states of those models.
        self._named.clear()
        self.name_model(self._model_version)

    def check_in_step(self) -> None:
        """After users were loaded: what is published of an emptied or older store's could not be taken back.

        Raises: Conflict when the store is not where this writer left it; DependencyUnavailable.
        """
        found = self._store.progress(self.watermarks.keys(), self.epoch)
        if other := sorted(number for number, at in self.watermarks.items() if found[number].watermark != at):
            raise Conflict(f"the state store is not where it was left: partitions {other}")

    def wrote(self, homes: Collection[int]) -> None:
        """Users at home there were written, each home as often as it is named."""
        for home in homes:
            if home in self._unfinished:
                self._unfinished[home] += 1

    def advance(self, applied: Mapping[int, Advance]) -> None:
        """Move watermarks: by partition, up to where. Raises: Conflict when one of them is not where it was, or users
        written since are missing; DependencyUnavailable."""
        self._move(
            [
                AdvanceStep(
                    partition=partition,
                    from_watermark=self.watermarks[partition],
                    to_watermark=one.offset,
                    counts=one.counts,
                    anchors=self._identity.text(partition),
                    unfinished=self._unfinished[partition],
                    popular=one.popular,
                )
                for partition, one in applied.items()
            ]
        )

    def pass_over(self, positions: Offsets) -> None:
        """Nothing readable is left before these positions (aborted transactions and their marks, say): move the
        watermarks behind it. Raises: as `advance`."""
        steps = [
            AdvanceStep(
                partition=partition,
                from_watermark=watermark,
                to_watermark=positions[partition] - 1,
                counts={},
                unfinished=self._unfinished[partition],
            )
            for partition, watermark in self.watermarks.items()
            if positions.get(partition, 0) - 1 > watermark
        ]
        if steps:
            self._move(steps)

    def committable(self) -> dict[int, int]:
        """Offsets to commit: past the watermark, and never behind what was committed before."""
        return {
            partition: watermark + 1
            for partition, watermark in self.watermarks.items()
            if watermark + 1 > self._committed.get(partition, 0)
        }

    def _move(self, steps: Sequence[AdvanceStep]) -> None:
        self._store.advance(steps, self.epoch)
        self.watermarks.update({step.partition: step.to_watermark for step in steps})
        self._unfinished.update({step.partition: 0 for step in steps})

    def _begin_anew(self, stream: Reader, epoch: str, lost: LostTail) -> None:
        """Everything is read again from a log that lost its end. Raises: DependencyUnavailable when it looks so for the
        first time: a leader that was just elected may not know its end yet."""
        if not self._may_have_lost:
            self._may_have_lost = True
            raise DependencyUnavailable(f"{lost}, before what was applied; it is looked at once more")
        log.error("log_lost_its_tail", ends=dict(lost.ends), applied={p: self.watermarks[p] for p in lost.ends})
        stream.commit(dict.fromkeys(lost.ends, 0))
        self._identity.keep()
        if self._keep is not None:
            self._keep.void(stream.partitions(), stream.num_partitions())
        self._store.begin_anew(epoch)
        self.tails_lost += 1
