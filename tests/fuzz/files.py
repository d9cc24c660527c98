"""Every reader of files: valid small files with something changed, and checksums computed again, so that the readers
read on.

A reader gives an object, all of which is then looked at, or raises the class that it documents, with a message that
names the file (of settings: the variable). It changes nothing on the disk.
"""

import hashlib
import json
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
from campaign import SLOWEST_S, Target, Violation, random_of
from fakes.certificates import made, of
from fakes.refresher import to_bytes
from generator import TEXTS, mutate_bytes, mutate_json
from generator_scenes import films
from offline.archive.test_archive import full
from offline.archive.test_archive import run as archive
from refresher.refresher_scene import World, make_rules, random_records
from scene import write_small_bundle

from services.algorithms.bundles.model_bundle import load_bundle, model_version_of
from services.algorithms.bundles.model_manifest import BundleError, Manifest
from services.algorithms.bundles.text_bundle import load_text_bundle, text_version_of
from services.algorithms.bundles.text_manifest import TextManifest
from services.algorithms.generation.phrases_part import load_phrases
from services.algorithms.indexes.mutable.snapshot import Snapshot, _checksum, load_snapshot, snapshots
from services.algorithms.items.catalogue import catalogue_from_bundle
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.candidates.bootstrap import host_build
from services.candidates.config import CandidatesSettings
from services.catalogue.snapshots import CatalogueSnapshots, started
from services.cli.backup import BackupError, _own_checksum, make_backup, read_backup
from services.contracts.topics.index_deltas import ItemDelta
from services.contracts.topics.items import CatalogueItem
from services.encoder.config import EncoderSettings
from services.gateway.config import GatewaySettings
from services.gateway.edge.api_keys import create_key, read_keys
from services.gateway.edge.roles import Role
from services.generator.config import GeneratorSettings
from services.offline.archive.files import open_whole
from services.platform.config import ConfigError, load_settings
from services.platform.errors import PreconditionFailed
from services.refresher.adapters.checkpoint_topic import CheckpointFiles
from services.refresher.checkpoint import MAGIC, CheckpointError
from services.refresher.config import RefresherSettings
from services.refresher.handlers.checkpoints import restore
from services.reranker.config import RerankerSettings


class Files(Target):
    """A folder of valid files: one is changed, the folder read, the file put back."""

    name = ""
    weight = 4
    episode = 64
    refusal: type[Exception] = BundleError

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[None]:
        """Make the valid files."""
        self.folder = folder
        self.root = self.make(folder)
        self.good = {path: path.read_bytes() for path in sorted(self.root.rglob("*")) if path.is_file()}
        self.read()
        yield

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        """One after the other; each begins with the valid files."""
        for number in numbers:
            try:
                self._one(random_of(seed, self.name, number))
            except Exception as exc:
                found(number, exc)
            finally:
                for path in {*self.root.rglob("*")} - self.good.keys():
                    if path.is_file():
                        path.unlink()
                for path, data in self.good.items():
                    if not path.is_file() or path.read_bytes() != data:
                        path.write_bytes(data)

    def _one(self, rng: Random) -> None:
        self.change(rng)
        changed = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        began = time.perf_counter()
        try:
            self.read()
        except self.refusal as exc:
            if not self.says_where(str(exc)):
                raise Violation(f"a refusal that does not say where: {exc}") from exc
        if (took := time.perf_counter() - began) > SLOWEST_S:
            raise Violation(f"it took {took:.1f} s")
        if {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()} != changed:
            raise Violation("reading changed the files")

    def make(self, folder: Path) -> Path:
        """The valid files, all below the folder that is returned."""
        raise NotImplementedError

    def change(self, rng: Random) -> None:
        """Change something; by default one file's bytes, or a file is gone."""
        path = rng.choice(list(self.good))
        if rng.random() < 0.05:
            path.unlink()
        else:
            path.write_bytes(mutate_any(rng, path, self.good[path]))

    def read(self) -> None:
        """Read all that there is. Raises: `refusal`."""
        raise NotImplementedError

    def says_where(self, said: str) -> bool:
        """Whether a refusal names the file."""
        return str(self.root) in said


def mutate_any(rng: Random, path: Path, data: bytes) -> bytes:
    """A file's content changed by what it is: JSON by its nodes, arrays by their header, Parquet by its table."""
    drawn = rng.random()
    if path.suffix == ".json" and drawn < 0.85:
        return json.dumps(mutate_json(rng, json.loads(data))).encode()
    is_arrays = path.suffix == ".safetensors" or (data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data))
    if is_arrays and drawn < 0.7:
        return mutate_arrays(rng, data)
    if path.suffix == ".parquet" and drawn < 0.6:
        return mutate_table(rng, path, data)
    return mutate_bytes(rng, data)


def mutate_arrays(rng: Random, data: bytes) -> bytes:
    """Another header (names, dtypes, shapes, offsets), or odd numbers in the arrays."""
    end = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        header = json.dumps(mutate_json(rng, json.loads(data[8:end]))).encode()
        return len(header).to_bytes(8, "little") + header + data[end:]
    body = np.frombuffer(data[end:], np.uint8).copy()
    odd = rng.choice((np.float32("nan"), np.float32("inf"), np.float32(-1e30), np.int32(-1), np.int64(2**62)))
    packed = np.frombuffer(odd.tobytes(), np.uint8)
    if len(body) >= len(packed):
        at = rng.randrange(len(body) // len(packed)) * len(packed)
        body[at : at + len(packed)] = packed
    return data[:end] + body.tobytes()


def mutate_table(rng: Random, path: Path, data: bytes) -> bytes:
    """Nulls, other types, doubled, missing or other rows and columns."""
    import pyarrow as pa

    table = pq.read_table(pa.BufferReader(data))
    name = rng.choice(table.column_names)
    at = table.column_names.index(name)
    rows = table.num_rows
    match rng.randrange(6):
        case 0:
            table = table.set_column(at, name, pa.nulls(rows, table.schema.field(name).type))
        case 1:
            table = table.set_column(
                at, name, pa.array([rng.choice((1, 2.5, None)) for _ in range(rows)], pa.float64())
            )
        case 2:
            table = table.set_column(at, name, pa.array([rng.choice(TEXTS) for _ in range(rows)]))
        case 3:
            table = table.drop_columns([name])
        case 4:
            table = table.slice(0, rng.randrange(rows + 1))
        case _:
            table = table.take([0] * rows) if rows else table
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def entry(path: Path) -> dict[str, Any]:
    """A file as manifests list it."""
    data = path.read_bytes()
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def _seal(rng: Random, folder: Path, field: str, version: Callable[[Path], str]) -> None:
    """Mostly compute a manifest's sizes, checksums and version again, so that the files that they guard are read."""
    path = folder / "manifest.json"
    if rng.random() < 0.15:
        return
    with suppress(Exception):  # it is read as it is
        raw = json.loads(path.read_text())
        for name in raw["files"]:
            if (folder / name).is_file():
                raw["files"][name] = entry(folder / name)
        path.write_text(json.dumps(raw))
        raw[field] = version(path)
        path.write_text(json.dumps(raw))


class ModelBundle(Files):
    """The model bundle, as candidates, gateway and encoder read it."""

    name, weight = "bundle", 3

    def make(self, folder: Path) -> Path:
        write_small_bundle(folder / "bundle")
        return folder / "bundle"

    def change(self, rng: Random) -> None:
        super().change(rng)

        def version(manifest: Path) -> str:
            said = Manifest.read(manifest)
            return model_version_of(said, self.root)

        _seal(rng, self.root, "model_version", version)

    def read(self) -> None:
        bundle = load_bundle(self.root)
        catalogue = catalogue_from_bundle(bundle)
        look = (bundle.item_ids, bundle.titles, bundle.categories, bundle.counts, bundle.item_index, bundle.user_index)
        assert look
        bundle.weights()
        if bundle.manifest.encoder is not None:
            assert bundle.max_history > 0
        LiveCatalogue(catalogue, build=host_build([]))


class Text(Files):
    """The text bundle, as the generator reads it."""

    name, weight = "text-bundle", 2

    def make(self, folder: Path) -> Path:
        films(folder)
        return folder / "text"

    def change(self, rng: Random) -> None:
        super().change(rng)
        _seal(rng, self.root, "text_version", lambda manifest: text_version_of(TextManifest.read(manifest)))

    def read(self) -> None:
        bundle = load_text_bundle(self.root)
        assert bundle.item_ids is not None
        assert bundle.texts is not None
        if bundle.manifest.text_mol is not None:
            assert bundle.item_states is not None
            assert bundle.pair_gate is not None or not bundle.text_mol.head.is_mixture
        if bundle.manifest.phrases is not None:
            load_phrases(bundle)


class Snapshots(Files):
    """Snapshots of the catalogue: a refused one is passed over and said."""

    name, weight = "snapshots", 2

    def make(self, folder: Path) -> Path:
        write_small_bundle(folder / "bundle")
        self.base = catalogue_from_bundle(load_bundle(folder / "bundle"))
        live = self._live()
        zeros = np.zeros((2, 8), np.float32)
        deltas = [
            ItemDelta(item_id=item, components=zeros + 0.25, gate=np.zeros(8, np.float32), model_share=0.5)
            for item in ("item-1", "new", "item-7")
        ]
        live.apply(4, deltas, mark="m", newest_recorded_ms=5)
        live.describe([CatalogueItem(item_id="item-7", withdrawn=True)])
        live.capture(written_s=round(time.time()))(folder / "kept")
        return folder / "kept"

    def _live(self, snapshot: Snapshot | None = None) -> LiveCatalogue:
        return LiveCatalogue(self.base, build=host_build([]), snapshot=snapshot)

    def change(self, rng: Random) -> None:
        super().change(rng)
        for path in self.root.rglob("manifest.json"):
            try:
                raw = json.loads(path.read_text())
                if rng.random() < 0.85:
                    for name in raw["files"]:
                        if (path.parent / name).is_file():
                            raw["files"][name] = entry(path.parent / name)
                    raw.pop("checksum", None)
                    raw["checksum"] = _checksum(raw)
                path.write_text(json.dumps(raw))
            except Exception:  # it is read as it is
                return

    def read(self) -> None:
        load = partial(load_snapshot, model_version=self.base.model_version)
        live, taken = started(self._live, self.root, found=snapshots, load=load)
        kept = CatalogueSnapshots(live, self.root, taken=taken, every_s=1e9)
        kept.first_offset(lambda position, mark: position == 4 and mark == "m")
        assert live.served is not None
        live.describe([CatalogueItem(item_id="item-7"), CatalogueItem(item_id="item-2", withdrawn=True)])
        live.reset()


class CheckpointFile(Files):
    """A refresher's checkpoint as a file, of today's form."""

    name, weight, refusal = "checkpoint-files", 4, CheckpointError

    def make(self, folder: Path) -> Path:
        self.rules = make_rules(max_remembered=10, max_pending=4)
        world = World(self.rules)
        for record in random_records(3, 80):
            world.log.append(0, record)
        running = world.settled()
        (folder / "kept").mkdir()
        (folder / "kept" / "partition-0.checkpoint").write_bytes(to_bytes(running.held.partitions[0]))
        return folder / "kept"

    def change(self, rng: Random) -> None:
        (path,) = self.good
        data = self.good[path]
        start = len(MAGIC) + 32
        length = int.from_bytes(data[start : start + 8], "little")
        header, rest = json.loads(data[start + 8 : start + 8 + length]), data[start + 8 + length :]
        if rng.random() < 0.6:
            text = json.dumps(mutate_json(rng, header)).encode()
            body = (len(text) if rng.random() < 0.95 else 2**63).to_bytes(8, "little") + text + rest
        else:
            body = mutate_bytes(rng, data[start:])
        sealed = MAGIC + hashlib.sha256(body).digest() + body
        path.write_bytes(sealed if rng.random() < 0.9 else mutate_bytes(rng, sealed))

    def read(self) -> None:
        for kept in CheckpointFiles(self.root).load(0):
            state = restore(*kept.read(), 0, self.rules, {})
            to_bytes(state)
            state.digest()

    def says_where(self, said: str) -> bool:
        """Whoever reads it names the file (`StoredCheckpoint.name`)."""
        return len(said) > 8


class Backups(Files):
    """A backup: manifest, bundle and checkpoints."""

    name, weight, refusal = "backup", 2, BackupError

    def make(self, folder: Path) -> Path:
        write_small_bundle(folder / "bundle")
        own = CheckpointFile()
        make_backup(
            folder / "set",
            bundle=folder / "bundle",
            checkpoints=CheckpointFiles(own.make(folder)).load,
            partitions=range(1),
            interactions={0: 11},
            epoch="e1",
        )
        return folder / "set"

    def change(self, rng: Random) -> None:
        super().change(rng)
        path = self.root / "manifest.json"
        try:
            raw = json.loads(path.read_text())
            if rng.random() < 0.85:
                for name in raw["files"]:
                    if (self.root / name).is_file() and rng.random() < 0.95:
                        raw["files"][name] = list(reversed(entry(self.root / name).values()))
                raw["sha256"] = _own_checksum(raw)
            path.write_text(json.dumps(raw))
        except Exception:  # it is read as it is
            return

    def read(self) -> None:
        read_backup(self.root).describe()


class Archives(Files):
    """An archive of interactions."""

    name, weight, refusal = "archive", 2, PreconditionFailed

    def make(self, folder: Path) -> Path:
        archive(folder / "archive", full(40))
        return folder / "archive"

    def change(self, rng: Random) -> None:
        """A table under the name that its content has, or the list changed."""
        path = self.root / "archive.json"
        raw = json.loads(path.read_text())
        if rng.random() < 0.5:
            number = rng.choice([number for number, part in raw["partitions"].items() if part["files"]])
            said = rng.choice(raw["partitions"][number]["files"])
            (old,) = self.root.glob(f"*-{said['sha256'][:12]}.parquet")
            data = mutate_any(rng, old, old.read_bytes())
            digest = hashlib.sha256(data).hexdigest()
            old.with_name(old.name.replace(said["sha256"][:12], digest[:12])).write_bytes(data)
            said |= {"sha256": digest, "bytes": len(data)}
        else:
            raw = mutate_json(rng, raw)
        if rng.random() < 0.9 and isinstance(raw, dict):
            rest = {name: value for name, value in raw.items() if name != "sha256"}
            raw = {**raw, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}
        path.write_text(json.dumps(raw, indent=1, sort_keys=True) + "\n")

    def read(self) -> None:
        whole = open_whole(self.root)
        for number in whole.partitions:
            for some in whole.records(number):
                assert some is not None


class Keys(Files):
    """The gateway's keys file."""

    name, weight, refusal = "api-keys", 6, ConfigError

    def make(self, folder: Path) -> Path:
        (folder / "keys").mkdir()
        path = folder / "keys" / "api-keys.json"
        create_key(path, id="shop", roles=frozenset({Role.INGEST}), requests_per_second=2.5, burst=4)
        create_key(path, id="other", roles=frozenset(Role))
        return folder / "keys"

    def read(self) -> None:
        from services.gateway.edge.door import AuditLog, Door

        Door(read_keys(self.root / "api-keys.json"), AuditLog(None))


class Certificates(Files):
    """PEM files that settings name."""

    name, weight, refusal = "certificates", 2, ConfigError

    def make(self, folder: Path) -> Path:
        whole = made(folder / "all")
        (folder / "own").mkdir()
        tls = of(whole, "gateway")
        for path in (tls.certificate, tls.key, tls.ca):
            shutil.copy(path, folder / "own" / path.name)
        return folder / "own"

    def change(self, rng: Random) -> None:
        """Text, or what is encoded in it."""
        path = rng.choice(list(self.good))
        data = self.good[path]
        lines = data.splitlines(keepends=True)
        match rng.randrange(4):
            case 0:
                data = mutate_bytes(rng, data)
            case 1:
                data = data + self.good[rng.choice(list(self.good))] if rng.random() < 0.5 else b"".join(lines[1:])
            case _:
                import base64

                der = mutate_bytes(rng, base64.b64decode(b"".join(lines[1:-1])))
                data = lines[0] + base64.encodebytes(der) + lines[-1]
        path.write_bytes(data)

    def read(self) -> None:
        files = {name: self.root / f"{stem}" for name, stem in _PEM.items()}
        found = load_settings(GatewaySettings, port=0, metrics_port=0, **files)
        assert found.tls is not None
        assert isinstance(found.tls.client_context(), ssl.SSLContext)


_PEM = {"tls_cert": "gateway.crt", "tls_key": "gateway.key", "tls_ca": "ca.crt"}


class Environment(Target):
    """The settings of every process, from its environment."""

    name, weight, episode = "environment", 10, 64
    kinds = (
        *(GatewaySettings, EncoderSettings, CandidatesSettings, RerankerSettings, RefresherSettings),
        GeneratorSettings,
    )
    values = (
        *("0", "1", "-1", "65535", "65536", "1e9", "nan", "inf", "-inf", "true", "no", "127.0.0.1", "::1", "0.0.0.0"),
        *(
            "localhost",
            "host:1",
            "host:99999",
            ":",
            "a:b:1",
            "1" * 5000,
            "١",
            "1_000",
            " 1 ",
            "0x10",
            "[]",
            "{}",
            "null",
        ),
        *("redis://u:p@h:1/0?x=%zz", "rediss://[::1", "unix:///x", "rating>=3.5:+1", "exact", "top_k_avg(0)", "a b"),
        *(
            "top_k_avg(99999999999999999999)",
            "clusters(-1,2)",
            "/dev/null",
            "/nonexistent",
            "/tmp",
            "SASL_SSL",
            "PLAIN",
        ),
        *("http://[", "redis://[x]:1", "0=1", "rating=1,click=2", "=", ",", "*", "1/0", "9" * 30, "debug", "\ud800x"),
    )

    @asynccontextmanager
    async def opened(self, folder: Path) -> AsyncIterator[None]:
        """Nothing is needed."""
        yield

    async def run(self, seed: int, numbers: Sequence[int], found: Callable[[int, BaseException], None]) -> None:
        """One after the other."""
        for number in numbers:
            try:
                self._one(random_of(seed, self.name, number))
            except Exception as exc:
                found(number, exc)

    def _one(self, rng: Random) -> None:
        kind = rng.choice(self.kinds)
        names = [
            field.validation_alias if isinstance(field.validation_alias, str) else f"FRESHET_{name.upper()}"
            for name, field in kind.model_fields.items()
        ]
        texts = [text for text in (*self.values, *TEXTS) if "\0" not in text]
        given = {rng.choice(names): rng.choice(texts) for _ in range(rng.choice((1, 1, 2, 3, 8)))}
        # As Python has an environment's bytes that are no UTF-8.
        given = {name: text.replace("\ud800", "\udcff") for name, text in given.items()}
        bare = {name: value for name, value in os.environ.items() if not name.startswith("FRESHET_")}
        with patch.dict(os.environ, {**bare, **given}, clear=True):
            try:
                found = load_settings(kind)
            except ConfigError as exc:
                if not any(name in str(exc) for name in names) and "FRESHET_" not in str(exc):
                    raise Violation(f"a refusal that names no variable: {exc}") from exc
                return
            json.dumps(found.describe())
            assert found.kafka is not None
            assert found.redis
            if kind is CandidatesSettings:
                from services.candidates.bootstrap import algorithms_for

                assert algorithms_for(found.algorithms, num_items=1, num_pairs=1)


def file_targets() -> list[Target]:
    """One for each kind of file, and the environment."""
    return [
        *(ModelBundle(), Text(), Snapshots(), CheckpointFile(), Backups(), Archives(), Keys(), Certificates()),
        Environment(),
    ]
