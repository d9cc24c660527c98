"""Every field of a shape is written and asked for; values that are not allowed are refused by name."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from bundle_scene import ENCODER, MIXTURE

from services.algorithms.bundles.model_manifest import AbsenceShape, BundleError, Manifest, NeighbourShape, build_part

SHAPES = (
    replace(
        ENCODER,
        kind="sasrec",
        norm_epsilon=1e-6,
        output_norm="layer",
        residual_of_norm=True,
        actions=("like", "rating -1"),
    ),
    replace(MIXTURE, query_activation="gelu"),
    NeighbourShape(num_neighbours=3, decay=0.5, model_share=0.25),
    AbsenceShape(floor_seconds=2048),
)
MANIFEST = Manifest(
    model_version="m",
    encoder=SHAPES[0],
    head=SHAPES[1],
    num_items=2,
    num_users=0,
    new_item_length=0.5,
    neighbours=SHAPES[2],
    absence=SHAPES[3],
    data={"name": "test"},
)


@pytest.mark.parametrize("shape", SHAPES, ids=["encoder", "head", "neighbours", "absence"])
def test_a_shape_comes_back_and_a_missing_field_is_refused_by_owner_and_name(shape: object) -> None:
    plain = json.loads(json.dumps(asdict(shape)))
    assert build_part(Path("manifest.json"), "shape", plain, type(shape)) == shape
    for name in plain:
        fewer = {other: value for other, value in plain.items() if other != name}
        with pytest.raises(BundleError, match=rf"manifest\.json: shape has fields .*; expected .*'{name}'"):
            build_part(Path("manifest.json"), "shape", fewer, type(shape))


@pytest.mark.parametrize("manifest", [MANIFEST, replace(MANIFEST, encoder=None, neighbours=None, absence=None)])
def test_a_manifest_has_every_field_and_comes_back(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    manifest.write(path)
    assert json.loads(path.read_text()).keys() == {field.name for field in fields(Manifest)}
    assert Manifest.read(path) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_norm": "batch"}, r"encoder\.output_norm='batch'; allowed"),
        ({"norm_epsilon": 0.0}, r"encoder\.norm_epsilon=0\.0; allowed: more than 0"),
        ({"kind": "hstu", "residual_of_norm": True}, r"encoder\.residual_of_norm=True with kind='hstu'"),
        ({"actions": ["like", 1]}, r"encoder\.actions=\['like', 1\]; allowed: a list of names"),
        ({"actions": ["like", "like"]}, r"encoder\.actions=\['like', 'like'\]; allowed: each name once"),
    ],
)
def test_an_encoder_of_unknown_values_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        replace(ENCODER, **change)
