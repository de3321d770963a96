"""A few seconds of fuzzing; `python -m tests.fuzz.http2`, `tests.fuzz.capture_api` and
`tests.fuzz.services` do it for longer.
"""

from pathlib import Path

from server.rpc.config import Engine
from tests.attacks.der import Authority
from tests.attacks.target import coordinator
from tests.fuzz import services
from tests.fuzz.capture_api import defects
from tests.fuzz.capture_api import fuzz as fuzz_capture
from tests.fuzz.http2 import NAMES_UNREAD, fuzz_certificates, fuzz_frames

SECONDS, SEED = 5.0, 16


def test_mutated_conversations_end_their_connections_only(tmp_path: Path) -> None:
    with coordinator(tmp_path, Engine.NATIVE) as target:
        outcome = fuzz_frames(target, seconds=SECONDS, seed=SEED)
    print(f"seed {SEED}: {outcome}")
    assert outcome.tried > 20
    assert not outcome.errors, outcome.log[-5000:]
    assert outcome.grown_mib < 200


def test_mutated_certificates_end_their_connections_only(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with coordinator(tmp_path, Engine.NATIVE, authority) as target:
        outcome = fuzz_certificates(target, seconds=SECONDS, seed=SEED)
    print(f"seed {SEED}: {outcome}")
    assert outcome.tried > 20
    assert outcome.answered > 0
    assert outcome.errors <= outcome.log.count(NAMES_UNREAD), outcome.log[-5000:]
    assert outcome.grown_mib < 200


def test_mutated_requests_to_a_capture_are_refused_and_it_lives() -> None:
    outcomes, alive = fuzz_capture(SECONDS, SEED)
    print(f"seed {SEED}: {outcomes}")
    assert alive
    assert outcomes.total() > 50
    assert not defects(outcomes)


def test_odd_requests_to_coordinator_store_pump_and_gc_worker_end_none_of_them() -> None:
    outcomes, wrong = services.fuzz(SECONDS, SEED)
    print(f"seed {SEED}: {outcomes}")
    assert not wrong
    assert outcomes.total() > 30
    assert not list(services.defects(outcomes))
