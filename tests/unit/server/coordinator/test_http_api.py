"""PD's document of safe points, and what a query may ask of `gc explain`."""

import pytest

from gcsafepoint.state.rules import ServiceSafePoint
from server.coordinator.explain_service import ExplainRequestError
from server.coordinator.http_api import _limit, _removed, safe_points_document
from server.routes import Request, json_answer
from tests.unit.gcsafepoint.explain.situations import NOW_S, ago, service, view


def test_the_document_is_pds_and_the_lowest_comes_first() -> None:
    gone = ServiceSafePoint("gone", NOW_S - 1, 5)
    document = safe_points_document(
        view([service("b", 100), service("a", 50), gone], gc_safe_point=7)
    )
    assert [it["service_id"] for it in document["service_gc_safe_points"]] == [
        "gone",
        "gc_worker",
        "b",
        "a",
    ]
    assert document["service_gc_safe_points"][2] == {
        "service_id": "b",
        "expired_at": NOW_S + 86_400,
        "safe_point": ago(100),
    }
    assert (document["min_service_gc_safe_point"], document["gc_safe_point"]) == (ago(600), 7)


def test_a_minimum_of_0_is_left_out_as_pd_leaves_it_out() -> None:
    assert "min_service_gc_safe_point" not in safe_points_document(view(worker_ts=0))


def test_an_id_that_is_no_unicode_can_be_answered() -> None:
    assert b"\\udcff" in json_answer(safe_points_document(view([service("a\udcff", 1)]))).body


def request(**query: str) -> Request:
    return Request("GET", "/", {name: [value] for name, value in query.items()})


def test_names_to_think_away() -> None:
    assert _removed(request()) == []
    assert _removed(request(what_if="remove:a,b")) == ["a", "b"]
    for text in ("a", "remove:", "delete:a"):
        with pytest.raises(ExplainRequestError, match="write what_if=remove:NAME"):
            _removed(request(what_if=text))


def test_a_limit_is_a_number() -> None:
    assert _limit(request(limit="5")) == 5
    with pytest.raises(ExplainRequestError):
        _limit(request(limit="1e9"))
