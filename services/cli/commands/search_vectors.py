"""`freshet search-vectors`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import client, options
from services.cli.option_groups import filters
from services.cli.output import answer, console, json_command, usage_error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from freshet.v1 import common_pb2


@json_command
@filters
def search_vectors(
    vectors: Annotated[Path, typer.Argument(help="A .npy file of query vectors (n, d), or one (d,).")],
    *,
    row: Annotated[int, typer.Option(min=0, help="Which of the query vectors.")] = 0,
    k: Annotated[int, typer.Option(help="How many items, 1-10,000.")] = 10,
    algorithm: Annotated[str, typer.Option(help="A loaded algorithm; default: the first that finishes in time.")] = "",
    allowed: "common_pb2.Filter",
    candidates: options.Candidates = options.DEFAULT_CANDIDATES,
    timeout_ms: options.TimeoutMs = 2000,
) -> None:
    """Search by a vector of your own, in an index that `freshet index` made.

    Example:  freshet search-vectors queries.npy --row 3 --k 10
    """
    client.check_k(k, most="10000")
    vector = _read_vector(vectors, row)
    from freshet.v1 import candidates_pb2, common_pb2
    from freshet_client.wire import read

    with client.process("candidates", candidates) as stub:

        def ask(method: Any, request: Any) -> Any:
            return client.call(method, request, target=candidates, timeout_s=timeout_ms / 1000, process="candidates")

        info = ask(stub.GetIndexInfo, candidates_pb2.GetIndexInfoRequest())
        found = ask(
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
                filter=allowed,
                algorithm=algorithm,
            ),
        )
    proof, items = read(found.certificate), list(zip(found.item_ids, found.scores, strict=True))

    def shown() -> None:
        out = console()
        for item_id, score in items:
            out.print(f"{score:10.6f}  {item_id}")
        gap = f", at most {proof.gap:.6f} off" if proof.kind == "bounded" else ""
        out.print(f"{proof.kind}{gap}; {found.algorithm} on index {found.index_version}", style="dim")
        for one in found.passes:
            out.print(f"{one.milliseconds:8.3f} ms  {one.name}: {one.items_touched:,} items", style="dim")

    facts = {
        "items": [{"item_id": item_id, "score": score} for item_id, score in items],
        "certificate": {"kind": proof.kind, "gap": proof.gap},
        "algorithm": found.algorithm,
        "index_version": found.index_version,
        "passes": [
            {"name": one.name, "milliseconds": one.milliseconds, "items_touched": one.items_touched}
            for one in found.passes
        ],
    }
    answer(facts, shown)


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
