"""A Parquet table of answers in parts, so that an interrupted command can continue.

A part is written under another name and renamed. At the end the parts are joined into the table and deleted.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.cli.output import CommandError, ExitStatus
from services.offline.backfill.answer_rows import SCHEMA


class RowParts:
    """The folder next to `out` with the parts of one batch.

    batch: JSON values that identify the batch. Raises: CommandError if the folder has parts of another batch.
    """

    def __init__(self, out: Path, batch: Mapping[str, Any]) -> None:
        self._out, self._folder = out, out.with_name(out.name + ".parts")
        self._batch = dict(batch)
        self._folder.mkdir(parents=True, exist_ok=True)
        note = self._folder / "batch.json"
        if note.exists():
            if json.loads(note.read_text(encoding="utf-8")) != self._batch:
                raise CommandError(
                    f"{self._folder} holds parts of another batch: other users, another request, model or log",
                    advice="remove the folder, or name another --out",
                    status=ExitStatus.USAGE,
                )
        else:
            self._rename(note, lambda path: path.write_text(json.dumps(self._batch), encoding="utf-8"))
        self._model = next(self._models(), "")

    @property
    def found(self) -> int:
        """Number of existing parts."""
        return len(list(self._folder.glob("part-*.parquet")))

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, table: pa.Table) -> None:
        """Write a part. Raises: CommandError if the batch's answers are of several models."""
        models = set(table.column("model_version").to_pylist()) | ({self._model} if self._model else set())
        if len(models) > 1:
            raise CommandError(
                f"the model changed during the batch: answers are of {' and '.join(sorted(models))}",
                advice=f"remove {self._folder} and begin again, for one model",
            )
        self._model = models.pop() if models else ""
        self._rename(self._path(number), lambda path: pq.write_table(table, path))

    def join(self) -> dict[str, Any]:
        """Build the table of all parts, and delete them."""
        counts: dict[str, int] = {}

        def all_parts(path: Path) -> None:
            with pq.ParquetWriter(path, SCHEMA) as writer:
                for number in range(self.found):
                    table = pq.read_table(self._path(number), schema=SCHEMA)
                    for source in table.column("state_source").to_pylist():
                        counts[source] = counts.get(source, 0) + 1
                    writer.write_table(table)

        self._rename(self._out, all_parts)
        shutil.rmtree(self._folder)
        return {"model_version": self._model, "state_sources": counts, "out": str(self._out)}

    def _models(self) -> Iterator[str]:
        for path in self._folder.glob("part-*.parquet"):
            yield from pq.read_table(path, columns=["model_version"]).column(0)[:1].to_pylist()

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:06d}.parquet"

    @staticmethod
    def _rename(path: Path, write: Callable[[Path], Any]) -> None:
        aside = path.with_name(f".{path.name}.new")
        write(aside)
        aside.replace(path)
