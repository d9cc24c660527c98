"""Fields that manifests got later: a bundle without them loads as what it was, and keeps its version."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from bundle_scene import ENCODER, MIXTURE

from services.algorithms.manifest import BundleError, EncoderShape, HeadShape, build_part

LATER = {
    "encoder": {
        "norm_epsilon": 1e-6,
        "output_norm": "layer",
        "residual_of_norm": True,
        "actions": ("like", "rating -1"),
    },
    "head": {"query_activation": "gelu"},
}


def test_defaults_are_left_out_and_other_values_are_kept() -> None:
    assert not (LATER["encoder"].keys() | LATER["head"].keys()) & (
        ENCODER.described().keys() | MIXTURE.described().keys()
    )
    encoder = replace(ENCODER, kind="sasrec", **LATER["encoder"])
    head = replace(MIXTURE, **LATER["head"])
    for shape, kind in ((encoder, EncoderShape), (head, HeadShape)):
        plain = json.loads(json.dumps(shape.described()))
        assert build_part(Path("manifest.json"), "shape", plain, kind) == shape


def test_a_shape_without_them_is_the_older_model() -> None:
    encoder = build_part(Path("manifest.json"), "encoder", ENCODER.described(), EncoderShape)
    assert (encoder.norm_epsilon, encoder.output_norm, encoder.residual_of_norm) == (1e-5, "length", False)
    assert encoder.actions == ()
    assert build_part(Path("manifest.json"), "head", MIXTURE.described(), HeadShape).query_activation == "silu"


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


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(BundleError, match=r"head\.query_activation='relu'; allowed"):
        replace(MIXTURE, query_activation="relu")
