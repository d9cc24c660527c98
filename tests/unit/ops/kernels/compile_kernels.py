"""Compiles the kernels for an H100/H200 at the papers' shapes, without a card: a program, as the interpreter and the
compiler cannot live in one process. Prints one JSON object per kernel: shared bytes, and whether Hopper's matrix
instructions are in it."""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.algorithms.ops.grouped_top_k import kernel as grouped_kernel
from services.algorithms.ops.mol_scores import kernel
from services.algorithms.ops.mol_scores.fused import TILE, PairShape

# ML-1M's shape compiles as ML-20M's does, with less of everything.
SHAPES = {"ml-20m": (8, 4, 128, 128), "books": (8, 8, 32, 128), "nq320k": (4, 4, 768, 128)}
HALF = {"queries", "items", "item_gate", "components", "hidden_weight", "out_weight"}
WHOLE = {
    "allowed_stride",
    "num_scored",
    "first_item",
    "upper_stride",
    "lower_stride",
    "num_queries",
    "queries_per_program",
    "width",
    "num_items",
    "num_rows",
    "num_groups",
    "num_tiles",
    "rows_per_query",
    "capacity",
    "num_values",
}
OTHER = {"rows": "*i64", "allowed": "*u8", "keys": "*i64", "places": "*i64", "counts": "*i32"}


def compile_for_hopper(name: str, function: object, constants: dict[str, object], warps: int, stages: int) -> None:
    signature, aligned = {}, {}
    for place, argument in enumerate(function.arg_names):  # type: ignore[attr-defined]
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in WHOLE:
            signature[argument] = "i32"
        else:
            signature[argument] = "*fp16" if argument in HALF else OTHER.get(argument, "*fp32")
        if argument == "width" or signature[argument].startswith("*"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = {"name": name, "shared": compiled.metadata.shared, "wgmma": "wgmma" in compiled.asm["ptx"]}
    found["tanh"] = "tanh.approx" in compiled.asm["ptx"]
    sys.stdout.write(json.dumps(found) + "\n")


def main() -> None:
    for name, (p_q, p_x, width, hidden) in SHAPES.items():
        shape = PairShape(query_components=p_q, item_components=p_x, width=width, hidden=hidden)
        sizes = {"P_q": p_q, "P_x": p_x, "Q": shape.q, "PX": shape.px}
        fast = {"FAST": True}
        for gathered in (False, True) if name == "books" else (False,):
            constants = {
                **sizes,
                **fast,
                "D": shape.d,
                "G": shape.g,
                "M": TILE,
                "HAS_PAIR_GATE": True,
                "HAS_STATE_GATES": name != "nq320k",
                "PRECOMPUTED": shape.precomputed,
                "GATHERED": gathered,
                "MASKED": gathered,
                "GROUPED": not gathered,
            }
            suffix = "-rows" if gathered else ""
            compile_for_hopper(f"{name}{suffix}", kernel.mol_scores_kernel, constants, 4, 1 if gathered else 2)
            if shape.precomputed:
                constants = {
                    **sizes,
                    **fast,
                    "QUERIES": 1 if gathered else 8,
                    "ITEMS": 128 // shape.px,
                    "STEP": 64,
                    "GATHERED": gathered,
                }
                compile_for_hopper(f"{name}-cosines{suffix}", kernel.cosines_kernel, constants, 4, 3)
    tile = {"ROWS": 64, "ITEMS": 128, "MASKED": True, "FAST": True}
    sizes = {**tile, "STEP": 64}
    compile_for_hopper("maxima", grouped_kernel.tile_maxima_kernel, {**sizes, "W": 64}, 4, 2)
    compile_for_hopper("collect", grouped_kernel.collect_kernel, sizes, 4, 2)
    compile_for_hopper("collect-values", grouped_kernel.collect_values_kernel, {"BLOCK": 1024}, 4, 3)


if __name__ == "__main__":
    main()
