"""The page's server: local by default, with a token elsewhere, and closed when it is closed."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from stoker.errors import StorageError, UsageError
from stoker.report.live import Live
from stoker.report.serve import Address, Answer, Server, token_for
from stoker.report.summary import Summary

LOCAL = Address(port=0)
ROUTES = {"/": lambda: Answer(content_type="text/plain", body=b"hello")}
TOKEN = "a-token-of-some-length"


def ask(url: str, **headers: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port, timeout=10)
    try:
        connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(LOCAL, ROUTES) as server:
        yield server


def test_a_local_page_needs_no_token(server: Server) -> None:
    assert ask(server.url_of("/")) == (200, b"hello")


def test_a_caller_whose_host_is_no_name_is_refused(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(server.url_of("/"), Host="[")[0] == 401
    assert capfd.readouterr().err == ""


def test_an_unknown_path_is_not_found(server: Server) -> None:
    assert ask(server.url_of("/etc/passwd"))[0] == 404


def test_a_name_of_the_web_that_leads_here_reads_nothing(server: Server) -> None:
    assert ask(server.url_of("/"), Host="evil.example:80")[0] == 401
    assert ask(server.url_of("/"), Host="localhost:80")[0] == 200


def test_with_a_token_only_its_holder_reads() -> None:
    with Server(LOCAL, ROUTES, token=TOKEN) as server:
        assert ask(server.url_of("/"))[0] == 200
        bare = server.url_of("/").partition("?")[0]
        assert ask(bare)[0] == 401
        assert ask(f"{bare}?token=wrong")[0] == 401
        assert ask(bare, Authorization=f"Bearer {TOKEN}")[0] == 200


def test_a_token_that_was_given_is_not_told_to_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(LOCAL, ROUTES, token=TOKEN) as server:
        assert TOKEN in server.url_of("/"), "made here: who else should tell it"
        monkeypatch.setenv("STOKER_TOKEN", TOKEN)
        assert TOKEN not in server.url_of("/")


def test_others_may_not_be_let_in_without_a_token() -> None:
    with pytest.raises(UsageError, match="can be reached by others"):
        Server(Address(host="0.0.0.0", port=0), ROUTES)


def test_a_token_is_made_where_one_is_needed_and_none_was_set() -> None:
    everywhere = Address(host="0.0.0.0", port=0)
    assert token_for(Address(port=1), {"STOKER_TOKEN": TOKEN}) == ""
    assert token_for(everywhere, {"STOKER_TOKEN": TOKEN}) == TOKEN
    made = token_for(everywhere, {})
    assert len(made) > 20
    assert made != token_for(everywhere, {})


def test_a_port_in_use_is_an_error_that_says_so(server: Server) -> None:
    port = urlsplit(server.url_of("/")).port
    with pytest.raises(StorageError, match=f"cannot listen on 127.0.0.1:{port}"):
        Server(Address(port=port or 0), ROUTES)


def test_a_server_closes_twice_and_then_answers_nobody() -> None:
    server = Server(LOCAL, ROUTES)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server.url_of("/"))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", Address(port=8080)),
        ("0.0.0.0:80", Address(host="0.0.0.0", port=80)),
        ("[::1]:80", Address(host="::1", port=80)),
    ],
)
def test_addresses_are_written_as_people_do(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.parametrize("text", ["", "localhost", "8080x", "70000", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no port"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("", False)],
)
def test_only_the_loopback_is_local(host: str, local: bool) -> None:
    assert Address(host=host, port=1).local is local


def test_page_news_and_metrics_of_a_run_come_from_one_address(summary: Summary) -> None:
    with Live(lambda: summary, page=LOCAL, metrics=LOCAL) as live:
        assert live.page_url.startswith(live.metrics_url.removesuffix("metrics"))
        wait_for_a_look(live, summary)
        assert b"The GPU waits for data" in ask(live.page_url)[1]
        news = json.loads(ask(f"{live.page_url}page.json")[1])
        assert "61%" in news["sections"]["verdict"]
        assert not news["running"]
        assert (
            b'stoker_finding_active{job="python train.py --config gpt.yaml",kind="data_starvation"} 1.0'
            in (ask(live.metrics_url)[1])
        )


def test_nodes_that_share_a_run_folder_count_every_rank_once(summary: Summary) -> None:
    texts = []
    for node in ("node-0", "node-1"):
        with Live(lambda: summary, metrics=LOCAL, node=node) as live:
            wait_for_a_look(live, summary)
            texts.append(ask(live.metrics_url)[1].decode())
    counted = [sorted(set(re.findall(r'stoker_step_seconds_count.*rank="(\d)"', text))) for text in texts]
    assert counted == [["0", "1"], ["2", "3"]]
    found = [re.findall(r'stoker_finding_active.*kind="data_starvation"} (\S+)', text) for text in texts]
    assert found == [["1.0"], ["0.0"]]  # told by the node of rank 0


def test_a_second_port_that_is_taken_closes_the_first_again(server: Server, summary: Summary) -> None:
    taken = Address(port=urlsplit(server.url_of("/")).port or 0)
    with pytest.raises(StorageError, match="cannot listen"):
        Live(lambda: summary, page=LOCAL, metrics=taken)
    # the thread of the first server would fail this test


def test_nothing_is_exposed_before_the_first_look(summary: Summary) -> None:
    gate = threading.Event()

    def look() -> Summary:
        gate.wait(10)
        return summary

    with Live(look, metrics=LOCAL) as live:
        assert ask(live.metrics_url) == (200, b"")
        gate.set()


def test_a_look_that_fails_leaves_the_last_one_in_place(summary: Summary) -> None:
    looks = iter([summary])

    def look() -> Summary:
        try:
            return next(looks)
        except StopIteration:
            raise StorageError("the file is being written") from None

    with Live(look) as live:
        wait_for_a_look(live, summary)
    assert live.summary is summary
    assert isinstance(live.trouble, StorageError)


def test_a_browser_that_goes_away_is_no_news(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    parts = urlsplit(server.url_of("/"))
    for _ in range(5):
        client = socket.create_connection((str(parts.hostname), parts.port), timeout=10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed by a reset
        client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        client.close()
    assert ask(server.url_of("/"))[0] == 200
    assert capfd.readouterr().err == ""


def wait_for_a_look(live: Live, summary: Summary) -> None:
    while live.summary is not summary:
        time.sleep(0.005)
