"""A backup is one set: whole it comes back bit for bit, torn, altered or mixed it is refused with both values named."""

import json
import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from services.algorithms.bundles.model_bundle import EncoderShape, HeadShape, load_bundle
from services.algorithms.scoring.states import ItemStates
from services.cli.backup import MANIFEST, BackupError, make_backup, read_backup, restore_backup
from services.offline.bundles.model import BundleContent, write_bundle
from services.refresher.adapters.checkpoint_topic import CheckpointFiles
from services.refresher.checkpoint import to_file
from services.stack import Ports
from tests.unit.cli.shell import facts, refused, shown


def write_model(folder: Path, seed: int) -> str:
    content = BundleContent(
        encoder=EncoderShape(kind="sasrec", num_blocks=1, num_heads=1, width=4, d_qk=4, d_v=4, max_history=8),
        head=HeadShape(kind="dot", num_query_components=1, num_item_components=1, component_width=4, tau=0.05),
        weights={"w": np.full(1, seed, np.float32)},
        item_states=ItemStates(components=np.full((2, 1, 4), 0.5, np.float32)),
        pair_gate=None,
        item_ids=["a", "b"],
        titles=["A", "B"],
        categories=[["x"], []],
        counts=np.array([1, 3]),
    )
    write_bundle(folder, content)
    return load_bundle(folder).model_version


def checkpoint(number: int, offset: int) -> bytes:
    values = {"format": 4, "partition": number, "folded_offset": offset}
    return to_file(values, {"sums": bytes(range(offset + 1))})


class Site:
    """A state folder with a model and two checkpoints, 0 at offset 7 and 3 at offset 2."""

    def __init__(self, root: Path) -> None:
        self.bundle = root / "bundle"
        self.version = write_model(self.bundle, seed=1)
        self.checkpoints = root / "data" / "refresher"
        self.own = self.checkpoints / self.version
        self.own.mkdir(parents=True)
        self.before = root / "before"
        self.before.mkdir()
        (self.before / "partition-0.checkpoint").write_bytes(checkpoint(0, 5))
        (self.own / "partition-0.checkpoint").write_bytes(checkpoint(0, 7))
        (self.own / "partition-3.checkpoint").write_bytes(checkpoint(3, 2))

    def backup(self, folder: Path) -> None:
        make_backup(
            folder,
            bundle=self.bundle,
            checkpoints=lambda number: chain(*(CheckpointFiles(one).load(number) for one in (self.own, self.before))),
            partitions=range(8),
            interactions={0: 11},
            epoch="e1",
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "state")


def test_what_was_backed_up_comes_back_bit_for_bit(site: Site, tmp_path: Path) -> None:
    site.backup(tmp_path / "set")
    backup = read_backup(tmp_path / "set")
    assert backup.model_version == site.version
    assert dict(backup.positions.attributions) == {0: 7, 3: 2}
    assert (dict(backup.positions.interactions), backup.positions.epoch) == ({0: 11}, "e1")
    there = tmp_path / "elsewhere"
    assert restore_backup(backup, bundle=there / "bundle", checkpoints=there / "data", ends={0: 8, 3: 3}) == []
    assert load_bundle(there / "bundle").model_version == site.version
    for name in ("partition-0.checkpoint", "partition-3.checkpoint"):
        assert (there / "data" / site.version / name).read_bytes() == (site.own / name).read_bytes()


def test_a_torn_newest_checkpoint_gives_way_to_the_one_before(site: Site, tmp_path: Path) -> None:
    newest = site.own / "partition-0.checkpoint"
    newest.write_bytes(newest.read_bytes()[:-9])
    site.backup(tmp_path / "set")
    assert dict(read_backup(tmp_path / "set").positions.attributions) == {0: 5, 3: 2}


def test_without_a_whole_checkpoint_of_a_partition_nothing_is_written(site: Site, tmp_path: Path) -> None:
    (site.own / "partition-3.checkpoint").write_bytes(b"FRESHET\x02torn")
    with pytest.raises(BackupError, match=r"partition-3\.checkpoint: no checkpoint of this format"):
        site.backup(tmp_path / "set")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_checkpoints_of_another_model_stay_where_they_are(site: Site, tmp_path: Path) -> None:
    other = site.checkpoints / "another-model"
    other.mkdir()
    (other / "partition-5.checkpoint").write_bytes(checkpoint(5, 1))
    site.backup(tmp_path / "set")
    assert set(read_backup(tmp_path / "set").positions.attributions) == {0, 3}


def test_a_folder_that_exists_is_not_written_over(site: Site, tmp_path: Path) -> None:
    site.backup(tmp_path / "set")
    with pytest.raises(BackupError, match="exists already"):
        site.backup(tmp_path / "set")


@pytest.fixture
def made(site: Site, tmp_path: Path) -> Path:
    site.backup(tmp_path / "set")
    return tmp_path / "set"


def test_every_file_that_is_cut_altered_removed_or_added_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    names = [str(path.relative_to(made)) for path in sorted(made.rglob("*")) if path.is_file()]
    assert len(names) >= 6
    for name in names:
        for what in ("cut", "altered", "removed"):
            copy = tmp_path / "copy"
            shutil.copytree(made, copy)
            content = bytearray((copy / name).read_bytes())
            content[len(content) // 2] ^= 1
            if what == "removed":
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(bytes(content) if what == "altered" else bytes(content[: len(content) // 2]))
            with pytest.raises(BackupError, match=Path(name).name.replace(".", r"\.")):
                read_backup(copy)
            shutil.rmtree(copy)
    (made / "bundle" / "stray").write_text("x")
    with pytest.raises(BackupError, match="stray, which its manifest does not name"):
        read_backup(made)


def _sign_again(folder: Path) -> None:
    """As somebody would who mixes two sets and mends the checksums."""
    from services.cli.backup import _files, _own_checksum, _sha256

    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {str(path.relative_to(folder)): list(_sha256(path)) for path in _files(folder)}
    manifest["sha256"] = _own_checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_bundle_of_another_model_does_not_belong(made: Path, site: Site) -> None:
    shutil.rmtree(made / "bundle")
    other = write_model(made / "bundle", seed=2)
    _sign_again(made)
    with pytest.raises(BackupError, match=f"its bundle is {other}, its manifest says {site.version}"):
        read_backup(made)


def test_a_checkpoint_of_another_moment_does_not_belong(made: Path) -> None:
    (made / "checkpoints" / "partition-0.checkpoint").write_bytes(checkpoint(0, 6))
    _sign_again(made)
    with pytest.raises(BackupError, match=r"end at \{0: 6, 3: 2\}, its manifest says \{0: 7, 3: 2\}"):
        read_backup(made)


def test_a_log_that_ends_before_a_checkpoint_is_another_log(made: Path, tmp_path: Path) -> None:
    backup = read_backup(made)
    there = tmp_path / "elsewhere"
    for ends, said in (({0: 7, 3: 3}, "ends before offset 7"), ({0: 8}, "does not exist")):
        with pytest.raises(BackupError, match=said):
            restore_backup(backup, bundle=there / "bundle", checkpoints=there / "data", ends=ends)
    assert not there.exists()


def test_what_is_in_the_way_is_refused_or_set_aside_never_deleted(made: Path, site: Site) -> None:
    backup = read_backup(made)
    with pytest.raises(BackupError, match="is not empty; --replace sets it aside"):
        restore_backup(backup, bundle=site.bundle, checkpoints=site.checkpoints, ends=None)
    (site.own / "partition-0.checkpoint").write_bytes(checkpoint(0, 9))
    said = restore_backup(backup, bundle=site.bundle, checkpoints=site.checkpoints, ends=None, replace=True)
    assert len(said) == 2
    (before,) = site.checkpoints.glob(f"{site.version}.before-*")
    assert (before / "partition-0.checkpoint").read_bytes() == checkpoint(0, 9)
    assert (site.own / "partition-0.checkpoint").read_bytes() == checkpoint(0, 7)


def _note_ports(state: Path, bundle: Path) -> None:
    """Ports where nobody listens, so that no stack of this machine is asked."""
    (state / "run").mkdir()
    noted = {"ports": dict(Ports.free().numbers), "bundle": str(bundle)}
    (state / "run" / "stack.json").write_text(json.dumps(noted))


def test_the_commands_back_up_check_and_restore_a_stack_that_is_down(site: Site, tmp_path: Path) -> None:
    state = site.bundle.parent
    _note_ports(state, site.bundle)
    made = facts("backup", tmp_path / "set", "--state", state)
    assert made["positions"]["attributions"] == {"0": 7, "3": 2}
    assert made["notes"] == [
        "Redis did not answer: the set has no positions of `interactions`",
        "Kafka did not answer: the set has none of the checkpoints in its topic",
    ]
    assert "whole" in shown("restore", tmp_path / "set", "--check")
    assert "--replace" in refused(1, "restore", tmp_path / "set", "--state", state)
    assert "restored" in shown("restore", tmp_path / "set", "--state", state, "--replace")
