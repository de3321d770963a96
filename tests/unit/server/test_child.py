"""A restarted daemon listens where it listened before."""

from server.child import pinned


def test_port_zero_is_replaced_by_the_bound_port():
    arguments = [
        "--addr",
        "127.0.0.1:0",
        "--flight-addr",
        "127.0.0.1:0",
        "--http-addr",
        "127.0.0.1:0",
        "--data-dir",
        "d",
    ]
    endpoints = {"capture": "127.0.0.1:11", "flight": "127.0.0.1:12", "http": "127.0.0.1:13"}
    assert pinned(arguments, "capture", endpoints) == [
        *(
            "--addr",
            "127.0.0.1:11",
            "--flight-addr",
            "127.0.0.1:12",
            "--http-addr",
            "127.0.0.1:13",
            "--data-dir",
            "d",
        )
    ]


def test_flags_without_an_endpoint_stay():
    assert pinned(["--coordinator", "a:1"], "store", {"store": "b:2"}) == ["--coordinator", "a:1"]
