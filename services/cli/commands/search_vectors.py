"""`freshet search-vectors`: the top K for a query vector, directly from a candidates process.

Use it for external embeddings and for tests of one algorithm. It shows scores, the certificate, and each pass with its
milliseconds and items touched.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.output import console, emit_json, reports_errors, usage_error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@reports_errors
def search_vectors(
    vectors: Annotated[Path, typer.Argument(help="A .npy file of query vectors (n, d), or one (d,).")],
    *,
    row: Annotated[int, typer.Option(min=0, help="Which of the query vectors.")] = 0,
    k: Annotated[int, typer.Option(help="How many items, 1-10,000.")] = 10,
    algorithm: Annotated[str, typer.Option(help="A loaded algorithm; default: the first that finishes in time.")] = "",
    allow_items: options.AllowItems = "",
    deny_items: options.DenyItems = "",
    allow_categories: options.AllowCategories = "",
    deny_categories: options.DenyCategories = "",
    where: options.Where = None,
    candidates: options.Candidates = options.DEFAULT_CANDIDATES,
    timeout_ms: options.TimeoutMs = 2000,
    as_json: options.AsJson = False,
) -> None:
    """Search by a vector of your own, in an index that `freshet index` made.

    Example:  freshet search-vectors queries.npy --row 3 --k 10
    """
    client.check_k(k, most="10000")
    vector = _read_vector(vectors, row)
    from freshet.v1 import candidates_pb2, common_pb2

    with client.candidates(candidates) as stub:

        def ask(method: Any, request: Any) -> Any:
            return client.call(method, request, target=candidates, timeout_s=timeout_ms / 1000, process="candidates")

        info = ask(stub.GetIndexInfo, candidates_pb2.GetIndexInfoRequest())
        answer = ask(
            stub.Search,
            candidates_pb2.SearchRequest(
                query_state=common_pb2.QueryState(
                    model_version=info.model_version,
                    components=vector.astype("<f2").tobytes(),
                    num_components=1,
                    component_width=len(vector),
                ),
                k=k,
                stage=candidates_pb2.STAGE_FULL,
                filter=client.filter_of(allow_items, deny_items, allow_categories, deny_categories, where or ()),
                algorithm=algorithm,
            ),
        )
    kind = common_pb2.Certificate.Kind.Name(answer.certificate.kind).removeprefix("KIND_").lower()
    if as_json:
        emit_json(
            {
                "items": [{"item_id": i, "score": s} for i, s in zip(answer.item_ids, answer.scores, strict=True)],
                "certificate": {"kind": kind, "gap": None if kind == "estimate" else answer.certificate.gap},
                "algorithm": answer.algorithm,
                "index_version": answer.index_version,
                "passes": [client.plain(one) for one in answer.passes],
            }
        )
        return
    out = console()
    for item_id, score in zip(answer.item_ids, answer.scores, strict=True):
        out.print(f"{score:10.6f}  {item_id}")
    gap = f", at most {answer.certificate.gap:.6f} off" if kind == "bounded" else ""
    out.print(f"{kind}{gap}; {answer.algorithm} on index {answer.index_version}", style="dim")
    for one in answer.passes:
        out.print(f"{one.milliseconds:8.3f} ms  {one.name}: {one.items_touched:,} items", style="dim")


def _read_vector(path: Path, row: int) -> "npt.NDArray[np.float32]":
    """Return row `row` of a .npy file, (d,). Its values must fit half precision, in which query states are sent."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise usage_error(f"{path}: not a .npy file of numbers ({error})", "np.save('queries.npy', vectors)") from error
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        raise usage_error(f"{path} holds {found.dtype} of shape {found.shape}; expected floating-point (n, d)")
    if row >= len(found):
        raise usage_error(f"row={row} allowed: 0-{len(found) - 1}")
    vector = np.asarray(found[row], dtype=np.float32)
    with np.errstate(over="ignore"):
        in_half = vector.astype(np.float16)
    if not np.isfinite(in_half).all():
        raise usage_error(f"{path} row {row} holds values that half precision can't: every |value| below 65504")
    return vector
