"""What Prometheus is told of a machine."""

from __future__ import annotations

from machines import machine

from stoker.doctor.examine import CHECKS, examine
from stoker.doctor.health import expose


def test_every_check_is_one_series_with_the_worst_it_saw() -> None:
    told = expose(examine(machine("nfs_node")), node='a"b')
    series = [line for line in told.splitlines() if not line.startswith("#")]
    assert len(series) == len({line.rpartition(" ")[0] for line in series})
    assert 'stoker_machine_check{node="a\\"b",subject="storage",check="access times"} 2' in series
    assert len(series) <= len(CHECKS)
    assert told.startswith("# HELP stoker_machine_check")


def test_a_good_machine_fails_in_nothing() -> None:
    told = expose(examine(machine("good_node")), node="n")
    assert not [line for line in told.splitlines() if line.endswith((" 2", " 3"))]
