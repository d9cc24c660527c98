"""The rules of `services.algorithms.state_shapes` under the name that scoring code knows them by.

They lie outside this package because it loads the kernels, which code that only folds or checks states never calls.
"""

from services.algorithms.state_shapes import check_items, check_queries, check_shapes

__all__ = ["check_items", "check_queries", "check_shapes"]
