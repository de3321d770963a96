"""A few hundred random requests to the HTTP API; more by `python -m tests.fuzz.http_api`."""

from tests.fuzz.http_api import life
from tests.integration.capture.processes import running_cluster


def test_whatever_is_asked_the_answer_is_what_the_document_says(tmp_path):
    with running_cluster(tmp_path) as cluster:
        answers = life(cluster, seed=20, requests=800)
        assert cluster.capture.process.poll() is None
    answered = {operation for (operation, status), _ in answers.items() if status == 200}
    assert {"get_changefeed", "pause_changefeed", "tso"} <= answered
    assert {status for _, status in answers} >= {200, 400, 405}
