"""What serving codes by, against training's exact weights, and what codebooks must hold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from embedding_scene import clustered

from services.algorithms.indexes.quantized.codebooks import Codebooks
from services.offline.training.codebooks.inverted_file import train_inverted_file
from services.offline.training.codebooks.product_quantizer import encode
from services.offline.training.codebooks.targets import relative_weights, score_aware_targets

POINTS = clustered(3_000, 24, 0)


@pytest.mark.parametrize(
    ("code_bits", "threshold", "rotate"), [(4, 0.2, True), (4, 0.2, False), (8, 0.4, True), (4, 0, True)]
)
def test_a_table_of_weights_makes_the_codes_of_exact_ones(code_bits: int, threshold: float, rotate: bool) -> None:
    codebooks = train_inverted_file(
        POINTS, num_cells=9, num_subspaces=6, code_bits=code_bits, threshold=threshold, rotate=rotate
    )
    new = 1.3 * clustered(2_500, 24, 1)
    new[::50] = 0
    codes = codebooks.coded(new)
    turned = new if codebooks.rotation is None else new @ codebooks.rotation
    wanted = np.square(turned[:, None] - codebooks.centres).sum(axis=2).argmin(axis=1)
    assert np.mean(codes.cells == wanted) > 0.999
    scale = float(np.sqrt(np.mean(np.square(POINTS).sum(axis=1))))
    weights = relative_weights(turned, threshold=threshold, scale=scale)
    targets = score_aware_targets(turned, weights, centres=codebooks.centres[codes.cells])
    by_training = encode(targets, torch.from_numpy(codebooks.codebooks))
    # A tie of two codewords may fall otherwise.
    assert np.mean(codes.codes == by_training.numpy()) > 0.9999
    assert codes.codes.dtype == np.uint8


def test_a_vector_has_one_code_whatever_else_is_coded() -> None:
    codebooks = train_inverted_file(POINTS, num_cells=9, num_subspaces=6, code_bits=4, rotate=True)
    whole, part = codebooks.coded(POINTS), codebooks.coded(POINTS[1_500:1_777])
    assert np.mean(part.codes == whole.codes[1_500:1_777]) > 0.9999
    assert np.array_equal(part.cells, whole.cells[1_500:1_777])
    assert codebooks.coded(POINTS[:0]).codes.shape == (0, 6)


def test_codebooks_are_named_by_their_content() -> None:
    codebooks = train_inverted_file(POINTS, num_cells=9, num_subspaces=6, code_bits=4, rotate=True)
    assert Codebooks(**codebooks.arrays).text == codebooks.text
    assert replace(codebooks, shortest=2 * codebooks.shortest).text != codebooks.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"centres": np.zeros((3, 22), np.float32)}, "centres and rotation must be 24 wide"),
        ({"rotation": np.eye(23, dtype=np.float32)}, "centres and rotation must be 24 wide"),
        ({"codebooks": np.zeros((6, 17, 4), np.float32)}, r"codebooks has shape \(6, 17, 4\); expected \(m, 16 or 256"),
        ({"codebooks": np.zeros((24, 16), np.float32)}, "codebooks has shape"),
        ({"shortest": np.zeros(0)}, r"shortest has shape \(0,\); expected 1 axes, none empty"),
        ({"stiffness": np.array([np.nan])}, "stiffness holds float64 values; allowed: finite"),
        ({"centres": np.zeros((3, 24), np.int64)}, "centres holds int64 values"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    codebooks = train_inverted_file(POINTS, num_cells=9, num_subspaces=6, code_bits=4)
    with pytest.raises(ValueError, match=message):
        replace(codebooks, **change)


@pytest.mark.parametrize("width", [20, 25])
def test_vectors_of_another_width_are_refused(width: int) -> None:
    codebooks = train_inverted_file(POINTS, num_cells=9, num_subspaces=6, code_bits=4)
    with pytest.raises(ValueError, match=f"vectors are {width} wide; these codebooks code 24"):
        codebooks.coded(clustered(5, width, 0))
