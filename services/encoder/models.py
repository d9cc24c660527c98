"""The models of one process: its own model, and the models of other version sets, which may change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.contracts.topics.version_sets import VersionSet, VersionSets
from services.encoder.domain import Vocabulary
from services.encoder.ports import SequenceEncoder

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model's vocabulary and encoder."""

    vocabulary: Vocabulary
    encoder: SequenceEncoder


class Models:
    """The own model and those of other version sets. `apply` belongs to one thread; the rest is thread-safe.

    open_model: opens a model from its bundle's folder. changed: called by `apply` with the other models, before it
    closes removed ones.
    """

    def __init__(
        self,
        own: Model,
        *,
        open_model: Callable[[Path], Model],
        changed: Callable[[tuple[Model, ...]], None],
        close: Callable[[Model], None],
    ) -> None:
        self.own, self.others = own, tuple[Model, ...]()
        self._open, self._changed, self._close = open_model, changed, close

    def drop(self, cache_keys: Sequence[int]) -> None:
        """Drop these cache keys in all models, the own model last. Raises: errors of an encoder."""
        for model in (*self.others, self.own):
            model.encoder.drop(cache_keys)

    def apply(self, sets: VersionSets) -> None:
        """Open these sets' models and close all others. A failing one is logged."""
        current = {one.vocabulary.model_version: one for one in self.others}
        wanted = {one.model_version: one for one in sets.sets.values()}
        wanted.pop(self.own.vocabulary.model_version, None)
        others = []
        for version, one in wanted.items():
            try:
                others.append(current.get(version) or self._opened(one))
            except Exception as exc:
                # Every error is caught, so that the stream and other models continue.
                log.error("version_set_not_held", set=one.name, reason=str(exc), error=type(exc).__name__)
        gone = [one for version, one in current.items() if version not in wanted]
        self.others = tuple(others)
        self._changed(self.others)
        for left in gone:
            self._close(left)

    def _opened(self, one: VersionSet) -> Model:
        """Open a model. Raises: BundleError; ValueError if the model does not fit the own model."""
        model, own = self._open(Path(one.bundle)), self.own.vocabulary
        found = model.vocabulary
        for what, theirs, wanted in (
            ("model", found.model_version, one.model_version),
            ("max_history", found.max_history, own.max_history),
            ("event schema", found.schema, own.schema),
        ):
            if theirs != wanted:
                self._close(model)
                raise ValueError(f"{one.bundle}: {what}={theirs!r:.80} allowed: {wanted!r:.80}")
        model.encoder.check()
        return model
