"""The faults of deploy/chaos: from a seed, and what is asked for; with what it says otherwise."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.chaos.timeline import KINDS, LENGTHS_S, faults

ROOT = Path(__file__).parents[3]
SERVICES = ["capture", "capture-2", "etcd", "store"]


def first(count, *arguments):
    return list(itertools.islice(faults(*arguments), count))


@given(st.integers(), st.permutations(SERVICES))
def test_the_same_seed_gives_the_same_faults_in_whatever_order_services_are_found(seed, services):
    assert first(50, seed, services, KINDS, 15.0) == first(50, seed, SERVICES, KINDS, 15.0)


def test_every_service_has_every_kind_of_fault_in_time():
    many = first(500, 1, SERVICES, KINDS, 15.0)
    assert {(fault.kind, fault.service) for fault in many} == set(
        itertools.product(KINDS, SERVICES)
    )
    assert all(
        low <= fault.length_s <= high for fault in many for low, high in [LENGTHS_S[fault.kind]]
    )
    assert 12 < sum(fault.after_s for fault in many) / len(many) < 18
    assert {fault.kind for fault in first(50, 1, SERVICES, ["pause"], 1.0)} == {"pause"}


@given(st.integers(), st.integers(1, 5))
def test_each_service_has_its_fault_before_any_has_another(seed, rounds):
    many = first(rounds * len(SERVICES), seed, SERVICES, KINDS, 15.0)
    for begin in range(0, len(many), len(SERVICES)):
        turn = many[begin : begin + len(SERVICES)]
        assert sorted(fault.service for fault in turn) == SERVICES


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--socket", "/nowhere/docker.sock"], 1, "Docker does not answer at /nowhere/docker.sock"),
        (["--kinds", "kill,burn"], 2, "--kinds is made of kill, stop, pause, not 'kill,burn'"),
        (["--every", "0"], 2, "--every and --minutes are above 0"),
    ],
)
def test_what_cannot_be_is_told_by_name(flags, status, said):
    command = [sys.executable, "-m", "deploy.chaos", *flags]
    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr
