"""Every class of the tree has its status, its retry advice, and its way back from the wire."""

import grpc
import pytest

from services.platform import errors
from services.platform.rpc.client import translate

EXPECTED = {
    errors.InvalidRequest: (grpc.StatusCode.INVALID_ARGUMENT, False),
    errors.Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, False),
    errors.PermissionDenied: (grpc.StatusCode.PERMISSION_DENIED, False),
    errors.NotFound: (grpc.StatusCode.NOT_FOUND, False),
    errors.PreconditionFailed: (grpc.StatusCode.FAILED_PRECONDITION, False),
    errors.Conflict: (grpc.StatusCode.ABORTED, True),
    errors.Overloaded: (grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    errors.DependencyUnavailable: (grpc.StatusCode.UNAVAILABLE, True),
    errors.DeadlineExceeded: (grpc.StatusCode.DEADLINE_EXCEEDED, True),
}


def _failed(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    empty = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, empty, empty, details="why")


def test_every_class_of_the_tree_is_mapped() -> None:
    assert set(errors.FreshetError.__subclasses__()) == set(EXPECTED)


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_class_has_its_own_status_and_retry_advice(kind: type[errors.FreshetError]) -> None:
    assert (kind.status, kind("x").retriable) == EXPECTED[kind]


@pytest.mark.parametrize("kind", [k for k in EXPECTED if k not in (errors.Unauthenticated, errors.PermissionDenied)])
def test_a_status_from_the_wire_comes_back_as_its_class(kind: type[errors.FreshetError]) -> None:
    back = translate(_failed(kind.status), "encoder")
    assert type(back) is kind
    assert back.message == "encoder: why"


@pytest.mark.parametrize("kind", [errors.Unauthenticated, errors.PermissionDenied])
def test_a_peer_that_refuses_this_process_is_no_fault_of_the_caller(kind: type[errors.FreshetError]) -> None:
    back = translate(_failed(kind.status), "encoder")
    assert type(back) is errors.DependencyUnavailable
    assert not back.retriable


def test_a_bug_in_a_peer_reads_as_an_unavailable_dependency_not_worth_a_retry() -> None:
    back = translate(_failed(grpc.StatusCode.INTERNAL), "encoder")
    assert type(back) is errors.DependencyUnavailable
    assert not back.retriable


def test_invalid_request_names_field_value_and_allowed_range() -> None:
    error = errors.InvalidRequest.of("k", 0, "1-1000")
    assert str(error) == "k=0 allowed: 1-1000"
    assert len(str(errors.InvalidRequest.of("user_id", "x" * 10_000, "short"))) < 120
