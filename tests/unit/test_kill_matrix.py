"""What the kill matrix tells when it fails before, or after, there is a job."""

import pytest

from tests.e2e.kill_matrix import logs_told


def test_an_early_error_comes_through_and_what_logs_there_are_are_told(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    with pytest.raises(ValueError, match="no cluster"), logs_told(tmp_path):
        raise ValueError("no cluster")
    assert capsys.readouterr().err == ""
    (tmp_path / "logs/capture.log").write_text("the capture's end")
    (tmp_path / "job.log").write_text("x" * 10_000 + "the job's end")
    with pytest.raises(ValueError, match="later"), logs_told(tmp_path):
        raise ValueError("later")
    told = capsys.readouterr().err
    assert "the capture's end" in told
    assert "the job's end" in told
    assert len(told) < 7000


def test_nothing_is_told_of_a_good_end(tmp_path, capsys):
    (tmp_path / "job.log").write_text("all is well")
    with logs_told(tmp_path):
        pass
    assert capsys.readouterr().err == ""
