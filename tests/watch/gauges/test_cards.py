"""Cards from NVML (a fake library that replays a recording), from a dcgm exporter, from a dmon log."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.errors import BadInputError, StorageError, UsageError
from stoker.watch import runs
from stoker.watch.gauges.cards import open_cards
from stoker.watch.gauges.dcgm import Dcgm, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
TRACE = ROOT / "tests" / "recordings" / "runs" / "fed.jsonl"
COLUMNS = (
    "util", "mem_util", "power_w", "temp_c", "sm_mhz", "event_reasons", "fb_used", "sm_util",
    "any_tensor_util",
)  # fmt: skip


@pytest.fixture
def replayed(tmp_path: Path, require_binary: Callable[[str], str]) -> Any:
    """Rows of a real recording, a library that replays them, and the environment that finds it."""
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
    rows = [[float(line[name]) for name in COLUMNS] for line in lines if line["kind"] == "gpu"][:100]
    (tmp_path / "rows").write_text("\n".join(" ".join(map(str, row)) for row in rows))
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([require_binary("gcc"), "-shared", "-fPIC", "-o", library, source], check=True)
    return rows, {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML": str(tmp_path / "rows")}


def test_nvml_readings_are_those_of_the_recording(
    replayed: Any, run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    rows, environ = replayed
    some = "until [ $(cat run/gpu-*.rows 2>/dev/null | wc -c) -gt 600 ]; do sleep 0.05; done"
    done = run_stoker("watch", "--out", "run", "--hz", 20, "--", "sh", "-c", some, env=environ)
    assert done.rc == 0, done.stderr
    (card,) = runs.read_recording(tmp_path / "run").gpus
    assert (card.name, card.power_limit_w, card.memory_bytes) == ("Fake H200", 700.0, 150754820096)
    seen = len(card.samples.t)
    assert seen >= 3
    for name in ("power_w", "temp_c", "sm_util", "any_tensor_util"):
        told = [row[COLUMNS.index(name)] for row in rows[:seen]]
        assert np.allclose(card.samples.columns[name], told, atol=1e-2), name
    assert "mem_mhz" not in card.samples.columns, "what the card does not tell is absent"
    assert "energy_j" not in card.samples.columns


def test_a_machine_without_a_card_says_what_is_missing(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a card")
    assert run_stoker("watch", "--out", "run", "--", "true").rc == 0
    run = runs.read_recording(tmp_path / "run")
    assert run.gpus == ()
    assert any("no GPU samples" in line for line in run.facts["missing"])


def test_a_card_that_is_lost_keeps_no_program_from_being_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr("stoker.machine.samples.Nvml", lost)
    assert open_cards("nvml") == (None, [], ["no GPU samples: NVML: RuntimeError('GPU is lost')"])


# --- dcgm -----------------------------------------------------------------------------------------

PAGE = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H200",Hostname="a"} 98
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-1",modelName="NVIDIA H200"} 1024
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-1",modelName="NVIDIA H200"} 3072
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",modelName="NVIDIA H200"} 0.34
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",modelName="NVIDIA H200"} NOW
DCGM_FI_DEV_GPU_UTIL{gpu="1",modelName="NVIDIA H200"} 3
"""


@pytest.fixture
def exporter() -> Iterator[str]:
    """A dcgm exporter's page on loopback, whose energy counter goes up by 5 J at each look."""
    looks = iter(range(1_000_000, 2_000_000, 5_000))

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = PAGE.replace("NOW", str(next(looks))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_dcgm_exporter_is_read_in_our_units(exporter: str) -> None:
    cards, facts, missing = open_cards(exporter)
    assert cards is not None
    assert facts[0] == {"index": 0, "name": "NVIDIA H200", "power_limit_w": None, "memory_bytes": 4 << 30}
    first, second = cards.read(0.0), cards.read(1.0)
    assert (first[0]["util"], first[1]["util"]) == (98.0, 3.0)
    assert first[0]["any_tensor_util"] == pytest.approx(34.0)
    assert first[0]["fb_used"] == 1 << 30
    assert second[0]["energy_j"] - first[0]["energy_j"] == pytest.approx(5.0)
    assert "sm_util" in missing[0]


def test_an_exporter_that_does_not_answer_is_an_error_at_once() -> None:
    with pytest.raises(StorageError, match="cannot read"):
        open_cards("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 999\r\n\r\nDCGM_FI",
        b"\0\xff\r\n\r\n",
        b"HTTP/1.0 503 no\r\n\r\n",
        b"",
    ],
    ids=["cut", "no HTTP", "busy", "nothing"],
)
def test_a_page_that_does_not_come_whole_leaves_a_gap(exporter: str, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as broken:

        def serve() -> None:
            for _ in range(2):
                connection, _ = broken.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{broken.getsockname()[1]}"
        with pytest.raises(StorageError, match="cannot read"):
            open_cards(url)
        cards = Dcgm(exporter)
        cards._url = f"{url}/metrics"
        assert cards.read(1.0) == {}
        thread.join()


def test_a_value_that_is_no_number_hides_no_other() -> None:
    page = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} N/A\nDCGM_FI_DEV_POWER_USAGE{gpu="0"} 500\n'
    assert parse(page)[0]["readings"] == {"power_w": 500.0}


# --- dmon -----------------------------------------------------------------------------------------

LOG = """\
# gpu    pwr  gtemp  mtemp     sm    mem    enc    dec   mclk   pclk     fb
# Idx      W      C      C      %      %      %      %    MHz    MHz     MB
    0    676     61     70     98     50      0      0   3201   1600  20000
    1    120     35      -      0      0      0      0   3201    345      0
    0    670     62     70     97     49      0      0   3201   1590  20000
"""


def test_a_dmon_log_gives_one_line_a_card_for_each_sample(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    cards, facts, _ = open_cards(str(tmp_path / "log"))
    assert cards is not None
    assert [card["index"] for card in facts] == [0, 1]
    first, second, third = cards.read(0.0), cards.read(1.0), cards.read(2.0)
    assert (first[0]["power_w"], first[0]["util"], first[1]["power_w"]) == (676.0, 98.0, 120.0)
    assert second[0]["sm_mhz"] == 1590.0
    assert third == {}
    cards.close()


def test_a_dmon_log_that_is_being_written_goes_on(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    cards, _, _ = open_cards(str(tmp_path / "log"))
    assert cards is not None
    cards.read(0.0)
    cards.read(1.0)
    with (tmp_path / "log").open("a") as log:
        log.write("    0    500     60     70     80     40      0      0   3201   1500  2")
        log.flush()
        assert cards.read(2.0) == {}, "half a line is none"
        log.write("0000\n")
    assert cards.read(3.0)[0]["power_w"] == 500.0
    cards.close()


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("hello\n")
    with pytest.raises(BadInputError, match="no log"):
        open_cards(str(tmp_path / "log"))
    with pytest.raises(UsageError, match="no such file"):
        open_cards("nowhere.log")


def test_instances_of_one_card_do_not_overwrite_each_other() -> None:
    labels = 'gpu="1",modelName="NVIDIA A100",GPU_I_PROFILE="{}",GPU_I_ID="{}"'
    page = "\n".join(
        [
            'DCGM_FI_DEV_POWER_USAGE{gpu="1",modelName="NVIDIA A100"} 250',
            f"DCGM_FI_DEV_FB_USED{{{labels.format('1g.10gb', 3)}}} 100",
            f"DCGM_FI_DEV_FB_USED{{{labels.format('3g.40gb', 1)}}} 900",
            f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels.format('1g.10gb', 3)}}} 0.5",
        ]
    )
    cards = parse(page)
    assert {index: card["name"] for index, card in cards.items()} == {
        1: "NVIDIA A100",
        2003: "NVIDIA A100 MIG 1g.10gb",
        2001: "NVIDIA A100 MIG 3g.40gb",
    }
    assert [cards[index]["readings"].get("fb_used") for index in (1, 2003, 2001)] == [
        None,
        100 << 20,
        900 << 20,
    ]


def test_an_error_of_one_moment_ends_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    from stoker.machine.samples import _Card

    answers = {"util": pynvml.NVML_ERROR_TIMEOUT, "mem_mhz": pynvml.NVML_ERROR_NOT_SUPPORTED}
    card = _Card.__new__(_Card)
    card._nvml = pynvml

    def looking(name: str) -> Callable[[], float]:
        def look() -> float:
            if name in answers:
                raise pynvml.NVMLError(answers[name])
            return 7.0

        return look

    looks = {name: looking(name) for name in ("util", "mem_mhz", "temp_c")}
    assert card._look(looks) == {"temp_c": 7.0}
    answers.clear()
    assert card._look(looks) == {"util": 7.0, "temp_c": 7.0}, "what the card lacks is not asked for again"
