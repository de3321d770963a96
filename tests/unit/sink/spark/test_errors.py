import pickle

from pyspark_tidemark.errors import SourceError, from_text


def test_a_captures_error_is_cut_out_of_flights_text():
    text = (
        "Flight returned unavailable error, with message: [TM:ErrNotResolved] 7 is not resolved. "
        "gRPC client debug context: UNKNOWN:Error received from peer"
    )
    err = from_text(text, retryable=True)
    assert (err.code, err.message, err.retryable) == ("ErrNotResolved", "7 is not resolved", True)


def test_other_text_is_kept_whole():
    assert (
        str(from_text("connection refused", retryable=True)) == "[TM:ErrFlight] connection refused"
    )


def test_an_error_survives_the_way_from_an_executor():
    err = pickle.loads(pickle.dumps(SourceError("ErrX", "do y", retryable=True)))
    assert (str(err), err.retryable) == ("[TM:ErrX] do y", True)
