"""Copies to a card and the way to it from storage: what is said of figures; all but CUDA is run on a CPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from stoker.bench.card.asking import ask
from stoker.bench.card.copy import BOTH, FROM, TO, Copied, Link, bench_copy, link_of, report
from stoker.bench.card.onward import Onward, usual_ways
from stoker.bench.drive import Workload
from stoker.bench.path import Trial, bench_path
from stoker.cli import run
from stoker.errors import StokerError, UsageError
from stoker.machine.snapshot import Gpu, PcieLink

H200 = Link(name="NVIDIA H200", words="PCIe 5 × 16", bytes_s=55e9)
QUICK = Workload(block=1 << 16, threads=2, seconds=0.01)


def quiet(name: str, done: int, of: int) -> None:
    """Nobody looks at the progress."""


def copied(rate: float, *, size: int = 32 << 20, pinned: bool = True, way: str = TO, **more) -> Copied:
    return Copied(way=way, pinned=pinned, bytes=size, bytes_s=rate, each_s=1e-3, alone_s=1e-5, **more)


def limits(copies, links=(H200,)):
    found = report(copies, [], links=links)
    return {one.name: one.limit for one in found.figures}


def test_a_copy_is_limited_by_its_start_then_by_the_link():
    said = limits([copied(0.4e9, size=4096), copied(54e9)])
    assert said == {
        "host to card, pinned 4 KiB": "the start of each copy",
        "host to card, pinned 32 MiB": "the link, PCIe 5 × 16",
    }


def test_pageable_memory_is_limited_by_the_driver_s_own_copy():
    found = report([copied(54e9), copied(11e9, pinned=False)], [], links=[H200])
    assert "the driver's own copy" in found.figures[1].limit
    assert "4.9 times as fast" in found.advice[0]
    assert "pin_memory=True" in found.advice[0]


def test_a_copy_is_compared_with_what_its_link_gives():
    found = report([copied(27.5e9), copied(60e9, way=BOTH)], [], links=[H200])
    assert found.figures[0].beside["of_the_link_share"] == pytest.approx(0.5)
    assert found.figures[1].beside["of_the_link_share"] == pytest.approx(60 / 110)
    assert any("50% of what its link gives" in line for line in found.advice)


def test_the_far_numa_node_is_named():
    link = replace(H200, node=0)
    found = report([copied(54e9, node=0), copied(30e9, node=1)], [], links=[link])
    assert found.figures[1].name.endswith("node 1")
    assert "NUMA" in found.figures[1].limit
    assert any("--cpunodebind=0" in line for line in found.advice)


def test_copies_from_the_card_go_into_a_plan():
    found = report(
        [copied(50e9), copied(40e9, way=FROM), copied(9e9, way=FROM, pinned=False)], [], links=[H200]
    )
    assert found.measured == {"snapshot_rate": 40e9}


def test_cards_that_do_not_reach_each_other_are_said_to_go_through_the_host():
    peers = [
        {"card": 0, "other": 1, "direct": False, "bytes": 1 << 28, "bytes_s": 20e9, "alone_s": 1e-2},
        {"card": 1, "other": 0, "direct": True, "bytes": 1 << 28, "bytes_s": 200e9, "alone_s": 1e-3},
    ]
    found = report([copied(50e9), copied(50e9, card=1)], peers, links=[H200, H200])
    assert found.of.startswith("2 cards: NVIDIA H200, PCIe 5")
    assert found.figures[-2].name == "card 0 to card 1, 256 MiB"
    assert "through the host" in found.figures[-2].limit
    assert found.figures[0].name.endswith("card 0")


@pytest.mark.parametrize(
    ("gen", "width", "rate"), [(5, 16, 55e9), (4, 16, 25e9), (4, 8, 12.5e9), (3, 16, 12.5e9)]
)
def test_a_link_gives_by_its_generation_and_lanes(gen, width, rate):
    card = Gpu(index=0, pcie=PcieLink(gen=1, gen_max=gen, width=width, width_max=16), numa_node=1)
    link = link_of("NVIDIA H200", card)
    assert link.bytes_s == pytest.approx(rate, rel=0.01)
    assert (link.words, link.node) == (f"PCIe {gen} × {width}", 1)


def test_a_card_in_a_virtual_machine_is_known_by_its_name():
    assert link_of("NVIDIA H200", Gpu(index=0)).bytes_s == 55e9
    assert link_of("Some Card", None) == Link(name="Some Card")


def test_without_a_card_memory_is_copied_to_memory():
    found = bench_copy(device="cpu", sizes=[4096, 1 << 16], seconds=0.005, room=1 << 20)
    assert [one.name for one in found.figures[:3]] == [
        "host to card, pageable 4 KiB",
        "card to host, pageable 4 KiB",
        "both at once, pageable 4 KiB",
    ]
    assert all(one.value > 0 and one.limit for one in found.figures)
    assert found.measured == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("copy --device cuda:77", "card"),
        ("copy --device toaster", "toaster"),
        ("copy --sizes 900TB --device cpu", "need buffers"),
        ("copy --sizes 0B --device cpu", "no bytes"),
        ("path . --device cuda:0", "add --gpu"),
        ("path . --engine cufile", "add --gpu"),
        ("path . --gpu --write --engine pread", "leave --gpu out"),
        ("path s3://bucket/x --gpu", "leave --gpu out"),
        ("path . --gpu --engine io_uring", "by pread or cuFile"),
        ("path . --block 8KiB", "--block is of one trial"),
        ("path . --random", "--random is of one trial"),
        ("path . --engine pread --depth 8", "one call on its way"),
    ],
)
def test_what_cannot_be_copied_is_refused_with_a_hint(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "hint:" in err or "Usage:" in err


def test_a_process_that_ends_without_an_answer_is_told_with_its_last_line(monkeypatch):
    with pytest.raises(StokerError, match=r"the measuring process ended with 1: .*nosuch"):
        ask("nosuch", {}, seconds=1, said=quiet)


def test_storage_is_read_on_to_the_card_and_the_folder_is_left_as_it_was(tmp_path):
    ways = [Onward(how=how, work=QUICK) for how in ("copy", "direct", "warm", "cufile")]
    found = bench_path(tmp_path, size=8 << 20, trials=[Trial(work=QUICK)], card="cpu", ways=ways)
    names = [one.name for one in found.figures]
    assert names[-3:] == [
        "pinned host to card, 64 KiB",
        "storage to host to card, direct, 64 KiB × 2 threads",
        "page cache to host to card, 64 KiB × 2 threads",
    ]
    assert all(one.value > 0 and one.limit for one in found.figures)
    assert any("cuFile" in note for note in found.notes)
    assert os.listdir(tmp_path) == []


def test_a_file_is_read_on_to_the_card_and_not_changed(tmp_path):
    path = tmp_path / "shard.bin"
    path.write_bytes(os.urandom(1 << 20))
    before = path.stat().st_mtime_ns
    found = bench_path(path, trials=[Trial(work=QUICK)], card="cpu", ways=[Onward(how="direct", work=QUICK)])
    assert found.figures[-1].name.startswith("storage to host to card")
    assert path.stat().st_mtime_ns == before


def test_ways_that_a_file_is_too_small_for_are_left_out_and_said(tmp_path):
    found = bench_path(tmp_path, size=4 << 20, trials=[Trial(work=QUICK)], card="cpu", ways=usual_ways(0.005))
    assert any("too few" in note for note in found.notes)


def test_the_command_measures_on_to_a_card(tmp_path, capsys):
    words = ["--gpu", "--device", "cpu", "--engine", "pread", "--block", "64KiB", "--size", "8MiB"]
    assert run(["bench", "path", str(tmp_path), *words, "--seconds", "0.01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"][-1]["name"] == "storage to host to card, direct, 64 KiB × 1 thread"


def test_a_card_that_is_not_there_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.bench.path.run_trial", lambda *given: pytest.fail("it was measured"))
    with pytest.raises(UsageError, match=r"no card|without CUDA"):
        bench_path(tmp_path, size=8 << 20, trials=[Trial(work=QUICK)], card="cuda:0")
    assert os.listdir(tmp_path) == []


def test_a_cufile_that_takes_its_process_down_costs_no_other_figure(tmp_path, monkeypatch):
    def asked(name, job, **options):
        if job["trials"][0]["how"] == "cufile":
            raise StokerError("the measuring process ended with -11: it said nothing", hint="")
        return ask(name, job, **options)

    monkeypatch.setattr("stoker.bench.card.onward.ask", asked)
    ways = [Onward(how=how, work=QUICK) for how in ("copy", "direct", "cufile")]
    found = bench_path(tmp_path, size=8 << 20, trials=[Trial(work=QUICK)], card="cpu", ways=ways)
    assert len(found.figures) == 4
    assert any("ended with -11" in note for note in found.notes)
