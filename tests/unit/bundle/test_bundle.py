"""Bundles: what is written is what is read, and anything that disagrees is refused with file and both values."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather
from safetensors.numpy import load_file, save_file

from services.algorithms.bundles import tensor_file
from services.algorithms.bundles.event_schema import Role, default_schema
from services.algorithms.bundles.model_bundle import BundleError, load_bundle
from services.algorithms.bundles.model_manifest import FileEntry
from services.algorithms.bundles.sealed_files import check_file
from services.algorithms.items.catalogue import catalogue_from_bundle
from services.algorithms.scoring.states import ItemStates
from services.offline.bundles.folders import save_states, save_tensors
from services.offline.bundles.model import BundleContent, add_files, write_bundle
from tests.unit.bundle.bundle_scene import content, dot_content, edit_manifest, relist, resealed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundle", content())
    return tmp_path / "bundle"


def test_a_written_bundle_reads_back_equal(path: Path) -> None:
    written, bundle = content(), load_bundle(path)
    assert bundle.item_ids == list(written.item_ids)
    assert bundle.titles == list(written.titles)
    assert bundle.categories == list(written.categories)
    assert bundle.counts.tolist() == [0, 1, 2, 3, 4]
    assert bundle.item_index["film-3"] == 3
    assert bundle.user_index == {}
    np.testing.assert_array_equal(bundle.item_states.components, written.item_states.components)
    np.testing.assert_array_equal(bundle.item_states.gate, written.item_states.gate)
    assert bundle.pair_gate is not None
    np.testing.assert_array_equal(bundle.pair_gate.out_weight, written.pair_gate.out_weight)
    for name, weight in written.weights.items():
        np.testing.assert_array_equal(bundle.weights()[name], weight)
    assert (bundle.max_history, bundle.tau, bundle.num_query_components, bundle.num_items) == (8, 0.05, 2, 5)
    assert bundle.manifest.data == {"name": "test"}


@pytest.mark.parametrize("bundle", [content(), dot_content()])
def test_states_are_written_as_the_library_writes_them(bundle: BundleContent, tmp_path: Path) -> None:
    states = bundle.item_states
    arrays = {"components": states.components} | ({} if states.gate is None else {"gate": states.gate})
    save_tensors(arrays, tmp_path / "library")
    save_states(states, tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "library").stat().st_mode


def test_the_model_version_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    one = write_bundle(tmp_path / "one", content())
    same = write_bundle(tmp_path / "same", replace(content(), metrics={"hr@10": 0.1}))
    other = write_bundle(tmp_path / "other", content(seed=1))
    assert one.model_version == same.model_version != other.model_version
    assert len(one.model_version) == 16


EVENTS = b"types: {zap: {role: negative}}"


def test_what_types_of_events_mean_is_part_of_the_model(tmp_path: Path) -> None:
    silent = write_bundle(tmp_path / "silent", content())
    assert silent.event_schema is default_schema()
    told = write_bundle(tmp_path / "told", replace(content(), events_yaml=EVENTS))
    assert load_bundle(told.path).event_schema.of("zap").role is Role.NEGATIVE
    assert load_bundle(told.path).event_schema.of("rating").role is Role.NEUTRAL
    assert told.model_version != silent.model_version


def test_an_event_schema_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"events\.yaml: zap\.role='lukewarm'; allowed: positive"):
        write_bundle(tmp_path / "bundle", replace(content(), events_yaml=b"types: {zap: {role: lukewarm}}"))
    assert not (tmp_path / "bundle").exists()
    path = write_bundle(tmp_path / "bundle", replace(content(), events_yaml=EVENTS)).path
    (path / "events.yaml").write_bytes(EVENTS.replace(b"zap", b"zip"))
    with pytest.raises(BundleError, match=r"events\.yaml has sha256"):
        load_bundle(path)
    relist(path, "events.yaml")
    with pytest.raises(BundleError, match="model_version="):
        load_bundle(path)


def test_how_long_new_items_may_become_is_said_by_the_manifest_and_no_part_of_the_version(tmp_path: Path) -> None:
    silent = write_bundle(tmp_path / "silent", content())
    assert silent.manifest.new_item_length is None
    told = write_bundle(tmp_path / "told", replace(content(), new_item_length=0.9))
    assert (told.manifest.new_item_length, told.model_version) == (0.9, silent.model_version)
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(BundleError, match=rf"new_item_length={wrong}; allowed: more than 0, at most 1"):
            write_bundle(tmp_path / "wrong", replace(content(), new_item_length=wrong))


def test_a_newer_bundle_replaces_an_older_one(path: Path) -> None:
    before = load_bundle(path).model_version
    write_bundle(path, content(seed=1))
    assert load_bundle(path).model_version != before
    assert [entry.name for entry in path.parent.iterdir()] == ["bundle"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("kept")
    with pytest.raises(BundleError, match="refusing to replace"):
        write_bundle(tmp_path / "precious", content())
    assert (tmp_path / "precious" / "file").read_text() == "kept"


def test_added_files_are_listed_and_leave_the_version_alone(path: Path, tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(b"onnx")
    before = load_bundle(path).model_version
    add_files(path, {"inference_server/encoder/1/model.onnx": tmp_path / "made"})
    bundle = load_bundle(path)
    assert bundle.file("inference_server/encoder/1/model.onnx").read_bytes() == b"onnx"
    assert bundle.model_version == before
    with pytest.raises(BundleError, match="leaves the bundle"):
        add_files(path, {"../outside": tmp_path / "made"})


def test_a_cut_file_is_refused_with_both_sizes(path: Path) -> None:
    raw = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(raw[:-4])
    with pytest.raises(
        BundleError, match=rf"weights.safetensors holds {len(raw) - 4} bytes; manifest.json says {len(raw)}"
    ):
        load_bundle(path, verify=False)


def test_a_missing_file_is_named(path: Path) -> None:
    (path / "users.parquet").unlink()
    with pytest.raises(BundleError, match=r"users.parquet is missing"):
        load_bundle(path)


def test_a_name_that_no_file_can_have_is_refused(path: Path) -> None:
    with pytest.raises(BundleError, match=rf"{path}/n{{300}}, which manifest.json lists, cannot be opened: File"):
        check_file(path, "n" * 300, FileEntry(sha256="", bytes=1), verify=False)


def test_other_shapes_than_the_manifest_says_are_refused_with_both(path: Path) -> None:
    name = "item_states.safetensors"
    arrays = load_file(path / name)
    save_file({**arrays, "components": arrays["components"][:, :1].copy()}, path / name)
    resealed(path)
    with pytest.raises(BundleError, match=r"item_states.safetensors holds .*\(5, 1, 4\).*says .*\(5, 2, 4\)"):
        load_bundle(path)


def test_other_shapes_in_the_manifest_change_the_version_and_are_refused(path: Path) -> None:
    head = json.loads((path / "manifest.json").read_text())["head"]
    edit_manifest(path, head={**head, "component_width": 5})
    with pytest.raises(BundleError, match=r"model_version=[0-9a-f]{16}; the content hashes to [0-9a-f]{16}"):
        load_bundle(path)


def test_a_different_number_of_items_is_refused(path: Path) -> None:
    edit_manifest(path, num_items=6)
    with pytest.raises(BundleError, match=r"\(5, 2, 4\).*says .*\(6, 2, 4\)"):
        load_bundle(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "format=3; this program reads format 4; `freshet train` or `freshet index` writes it again"),
        ({"surprise": 1}, "fields .*'surprise'"),
        ({"num_items": 0}, "num_items=0; allowed: more than 0"),
        ({"num_users": 3}, "num_users=3; a model without user-id component has 0"),
        ({"encoder": {}}, "encoder has fields"),
        ({"head": []}, "head is a JSON list"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": "0"}}}, "files.'/etc/passwd'; allowed: paths inside"),
        ({"files": {"../other/x": {"bytes": 1, "sha256": "0"}}}, r"files.'\.\./other/x'; allowed: paths inside"),
    ],
)
def test_a_manifest_that_says_something_else_is_refused_by_field(
    path: Path, change: dict[str, object], message: str
) -> None:
    edit_manifest(path, **change)
    with pytest.raises(BundleError, match=message):
        load_bundle(path)


def test_no_manifest_and_no_json_are_said_plainly(tmp_path: Path, path: Path) -> None:
    with pytest.raises(BundleError, match="is missing; a bundle is a directory"):
        load_bundle(tmp_path)
    for text in ("{", "[" * 100_000):
        (path / "manifest.json").write_text(text)
        with pytest.raises(BundleError, match="is not JSON"):
            load_bundle(path)


def test_content_that_disagrees_with_itself_is_never_renamed_into_place(tmp_path: Path) -> None:
    wrong = replace(content(), item_states=ItemStates(components=np.zeros((4, 2, 4), np.float32)))
    with pytest.raises(BundleError, match="item_states"):
        write_bundle(tmp_path / "bundle", wrong)
    assert list(tmp_path.iterdir()) == []


def test_writing_to_arrays_leaves_the_file_alone(path: Path) -> None:
    weights = load_bundle(path).weights()
    weights["item_embedding.weight"][:] = 0
    load_bundle(path)


def items_of(path: Path) -> pa.Table:
    return feather.read_table(path / "items.arrow", memory_map=False)


def with_header(path: Path, header: object) -> None:
    """Another header in the place of a safetensors file's."""
    data = path.read_bytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :])


TENSOR = {"dtype": "F32", "shape": [5, 2, 4], "data_offsets": [0, 160]}
HEADERS = {
    "no object": [],
    "no tensor": {"components": 1},
    "no dtype": {"components": {"shape": [5, 2, 4], "data_offsets": [0, 160]}},
    "a list as dtype": {"components": TENSOR | {"dtype": ["F32"]}},
    "a text as shape": {"components": TENSOR | {"shape": "542"}},
    "halves in the shape": {"components": TENSOR | {"shape": [5, 2.0, 4]}},
    "a negative shape": {"components": TENSOR | {"shape": [-5, -2, 4]}},
    "an immense shape": {"components": TENSOR | {"shape": [2**62, 4, 2**62]}},
    "one offset": {"components": TENSOR | {"data_offsets": [0]}},
    "offsets from behind": {"components": TENSOR | {"data_offsets": [-160, 0]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_of_arrays_that_is_none_is_refused_by_file(path: Path, header: object) -> None:
    with_header(path / "item_states.safetensors", header)
    resealed(path)
    with pytest.raises(BundleError, match=r"item_states\.safetensors"):
        load_bundle(path)


FIELDS = {
    "a text as a number": ({"num_items": "5"}, r"manifest\.num_items='5'; allowed: int"),
    "true as a number": ({"num_items": True}, r"manifest\.num_items=True"),
    "a half as a number": ({"num_users": 0.5}, r"manifest\.num_users=0\.5"),
    "a list of files": ({"files": []}, r"manifest\.files=\[\]; allowed: dict"),
    "a list as data": ({"data": [1]}, r"manifest\.data="),
    "a width that is text": (("head", "component_width", "4"), r"head\.component_width='4'; allowed: int"),
    "a history of nothing": (("encoder", "max_history", 0), r"manifest\.json: .*max_history=0"),
    "a kind that is none": (("encoder", "kind", None), r"encoder\.kind=None; allowed: str"),
}


@pytest.mark.parametrize(("change", "message"), FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_type_is_refused_with_its_value(path: Path, change: Any, message: str) -> None:
    raw = json.loads((path / "manifest.json").read_text())
    if isinstance(change, tuple):
        part, name, value = change
        raw[part][name] = value
    else:
        raw |= change
    (path / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(BundleError, match=message):
        load_bundle(path)


@pytest.mark.parametrize("is_mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("damage", ["cut", "no text", "ends that decrease"])
def test_a_file_that_is_no_arrow_table_of_text_is_refused(
    path: Path, damage: str, is_mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_mapped:
        monkeypatch.setattr(tensor_file, "LOADED_BYTES", 0)
        monkeypatch.setattr(tensor_file, "_mapped", {})
    file = path / "items.arrow"
    data = file.read_bytes()
    ids = items_of(path).column("item_id").to_pylist()
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "no text":
        data = data.replace("".join(ids).encode(), b"\xff" * len("".join(ids)))
    else:
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
        assert data.count(ends.tobytes()) == 1
        data = data.replace(ends.tobytes(), np.where(np.arange(6) == 2, 1 << 20, ends).astype(np.int32).tobytes())
    file.write_bytes(data)
    resealed(path)
    with pytest.raises(BundleError, match=r"items\.arrow: not an Arrow file of items"):
        load_bundle(path)


def test_a_part_of_a_bundle_is_that_part_of_the_whole(path: Path) -> None:
    bundle = load_bundle(path)
    whole, rows = catalogue_from_bundle(bundle), np.array([3, 0])
    part = catalogue_from_bundle(bundle, rows)
    for one in (part, whole.part(rows)):
        assert (list(one.item_ids), list(one.titles)) == (["film-3", "film-0"], ["Film № 3", "Film № 0"])
        assert list(one.categories) == [("Drama", "War"), ()]
        assert one.index_version == whole.index_version
        assert one.attributes.num_items == 2
        np.testing.assert_array_equal(one.states.components, whole.states.components[rows])
        assert one.states.gate is not None
        assert whole.states.gate is not None
        np.testing.assert_array_equal(one.states.gate, whole.states.gate[rows])


@pytest.mark.parametrize(
    "name", ["item_states.safetensors", "items.arrow", "pair_gate.safetensors", "weights.safetensors"]
)
def test_files_that_were_cut_short_or_are_another_bundles_are_refused(path: Path, tmp_path: Path, name: str) -> None:
    data, other = (path / name).read_bytes(), write_bundle(tmp_path / "other", content(seed=1))
    (path / name).write_bytes(data[:-16])
    with pytest.raises(BundleError, match=rf"{name} holds {len(data) - 16} bytes; manifest\.json says {len(data)}"):
        load_bundle(path)
    altered = bytearray(data)
    altered[-9] ^= 1
    for wrong in (bytes(altered), *([(other.path / name).read_bytes()] if name != "items.arrow" else [])):
        (path / name).write_bytes(wrong)
        with pytest.raises(BundleError, match=rf"{name} has sha256 [0-9a-f]{{64}}; manifest\.json says [0-9a-f]{{64}}"):
            load_bundle(path)
    (path / name).write_bytes(data)
    assert list(catalogue_from_bundle(load_bundle(path), np.array([1])).item_ids) == ["film-1"]


def test_numbers_that_are_none_name_the_file(path: Path) -> None:
    states = (path / "item_states.safetensors").read_bytes()
    (path / "item_states.safetensors").write_bytes(states[:-4] + np.float32("nan").tobytes())
    resealed(path)
    with pytest.raises(BundleError, match=r"item_states\.safetensors: .* NaN or infinite"):
        catalogue_from_bundle(load_bundle(path))
    with pytest.raises(BundleError, match=r"item_states\.safetensors: .* NaN or infinite"):
        catalogue_from_bundle(load_bundle(path), np.array([1, 4]))


@pytest.mark.parametrize(
    ("is_own", "length", "most"),
    [(False, 1.0005, None), (False, 1.002, 1.001), (True, 65_504.0, None), (True, 3e38, 65_504.0)],
)
def test_item_states_are_of_length_1_unless_embeddings_were_brought_from_elsewhere(
    tmp_path: Path, is_own: bool, length: float, most: float | None
) -> None:
    states = np.zeros((5, 1, 8), dtype=np.float32)
    states[3, 0, 2] = length
    changes: dict[str, Any] = {"encoder": None, "weights": {}} if is_own else {}
    given = replace(dot_content(), item_states=ItemStates(components=states), **changes)
    bundle = write_bundle(tmp_path / "bundle", given)
    if most is None:
        np.testing.assert_array_equal(catalogue_from_bundle(bundle).states.components, states)
        return
    with pytest.raises(BundleError, match=r"item_states\.safetensors: components: row 3, component 0 has") as said:
        catalogue_from_bundle(bundle)
    assert str(said.value).endswith(f"allowed: at most {most}")


def test_an_item_gate_beyond_half_precision_is_refused(tmp_path: Path) -> None:
    base = content()
    gate = np.full_like(base.item_states.gate, -1e38)
    bundle = write_bundle(tmp_path / "b", replace(base, item_states=replace(base.item_states, gate=gate)))
    with pytest.raises(BundleError, match=r"item_states\.safetensors: gate: values from -1e\+38 .*allowed: -65504"):
        catalogue_from_bundle(bundle)
