"""`freshet search-vectors`: the top K for a query vector, asked of a candidates process directly.

For embeddings brought from elsewhere and for a look at one algorithm: it shows scores, certificate, and the passes with
their milliseconds and items touched.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client
from services.cli.output import CommandError, ExitStatus, console, emit_json, reports_errors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@reports_errors
def search_vectors(
    vectors: Annotated[Path, typer.Argument(help="A .npy file of query vectors (n, d), or one (d,).")],
    *,
    row: Annotated[int, typer.Option(min=0, help="Which of the query vectors.")] = 0,
    k: Annotated[int, typer.Option(help="How many items, 1-10,000.")] = 10,
    algorithm: Annotated[str, typer.Option(help="One that is loaded; default: the first one configured.")] = "",
    allow_items: Annotated[str, typer.Option(help="Only these item ids.")] = "",
    deny_items: Annotated[str, typer.Option(help="Never these item ids.")] = "",
    allow_categories: Annotated[str, typer.Option(help="Only items with one of these categories.")] = "",
    deny_categories: Annotated[str, typer.Option(help="No item with one of these categories.")] = "",
    candidates: Annotated[
        str, typer.Option(envvar="FRESHET_CANDIDATES", help="host:port.")
    ] = client.DEFAULT_CANDIDATES,
    timeout_ms: Annotated[int, typer.Option(min=1, help="Give up after this long.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Search by a vector of your own, in an index that `freshet index` made.

    Example:  freshet search-vectors queries.npy --row 3 --k 10
    """
    if not 0 <= k < 2**32:
        raise CommandError(f"k={k} allowed: 1 to 10000", advice="--k 10", status=ExitStatus.USAGE)
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
                filter=common_pb2.Filter(
                    allow_item_ids=client.split_ids(allow_items),
                    deny_item_ids=client.split_ids(deny_items),
                    allow_categories=client.split_ids(allow_categories),
                    deny_categories=client.split_ids(deny_categories),
                ),
                algorithm=algorithm,
            ),
        )
    kind = common_pb2.Certificate.Kind.Name(answer.certificate.kind).removeprefix("KIND_").lower()
    if as_json:
        passes = [
            {"name": one.name, "milliseconds": one.milliseconds, "items_touched": one.items_touched}
            for one in answer.passes
        ]
        emit_json(
            {
                "items": [{"item_id": i, "score": s} for i, s in zip(answer.item_ids, answer.scores, strict=True)],
                "certificate": {"kind": kind, "gap": answer.certificate.gap},
                "algorithm": answer.algorithm,
                "index_version": answer.index_version,
                "passes": passes,
            }
        )
        return
    out = console()
    for item_id, score in zip(answer.item_ids, answer.scores, strict=True):
        out.print(f"{score:10.6f}  {item_id}", markup=False)
    gap = f", at most {answer.certificate.gap:.6f} off" if kind == "bounded" else ""
    out.print(f"{kind}{gap}; {answer.algorithm} on index {answer.index_version}", style="dim", markup=False)
    for one in answer.passes:
        out.print(f"{one.milliseconds:8.3f} ms  {one.name}: {one.items_touched:,} items", style="dim", markup=False)


def _read_vector(path: Path, row: int) -> "npt.NDArray[np.float32]":
    """Row `row` of a .npy file, (d,); it travels in half precision, as all query states do."""
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path}: not a .npy file of numbers ({error})",
            advice="np.save('queries.npy', vectors)",
            status=ExitStatus.USAGE,
        ) from error
    if found.ndim == 1:
        found = found[None]
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.floating):
        raise CommandError(
            f"{path} holds {found.dtype} of shape {found.shape}; expected floating-point (n, d)",
            status=ExitStatus.USAGE,
        )
    if row >= len(found):
        raise CommandError(f"row={row} allowed: 0-{len(found) - 1}", status=ExitStatus.USAGE)
    vector = np.asarray(found[row], dtype=np.float32)
    with np.errstate(over="ignore"):
        in_half = vector.astype(np.float16)
    if not np.isfinite(in_half).all():
        raise CommandError(
            f"{path} row {row} holds values that half precision can't: every |value| below 65504",
            status=ExitStatus.USAGE,
        )
    return vector
