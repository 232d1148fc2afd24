"""What URLs name, asked of real servers: buckets, the web, a hub; through proxies and secured connections."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from faults import faulty
from s3_server import S3Server, free_ports, serve

from stoker.errors import StorageError
from stoker.manifest import read_manifest
from stoker.stage.origins.origin import resolve
from stoker.stage.plan import units_of
from stoker.stage.wire.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]


def contents(url: str) -> dict[str, bytes]:
    """Every file of what the URL names, brought over the wire."""
    got: dict[str, bytes] = {}
    with Wire() as wire:
        wire.fetch_small(
            resolve(url).files,
            deliver=lambda landed: got.update((file.name, bytes(data)) for file, data in landed),
        )
    return got


# --- buckets --------------------------------------------------------------------------------------


def test_a_prefix_of_over_a_thousand_keys_is_listed_whole(bucket: Path) -> None:
    (bucket / "many").mkdir()
    for number in range(1203):
        (bucket / "many" / f"{number:05d}").write_bytes(b"x" * (number % 7))
    collection = resolve("s3://bucket/many")
    assert (collection.kind, len(collection.files)) == ("folder", 1203)
    assert sum(file.bytes for file in collection.files) == sum(number % 7 for number in range(1203))


@pytest.mark.parametrize("url", ["s3://bucket/a", "s3://bucket/a/"])
def test_a_prefix_ends_at_a_slash(url: str, bucket: Path) -> None:
    for folder in ("a", "ab"):
        (bucket / folder).mkdir()
        (bucket / folder / "x").write_bytes(folder.encode())
    assert contents(url) == {"x": b"a"}


@pytest.mark.parametrize(
    "name", ["with space", "ü/ö", "a%20b", "a+b&c=d", "hash#tag", "what?", "semi;colon,", "quote'\"", "a@b:c"]
)
def test_odd_keys_arrive_under_their_names(name: str, bucket: Path) -> None:
    (bucket / "odd" / name).parent.mkdir(parents=True)
    (bucket / "odd" / name).write_bytes(name.encode())
    assert contents("s3://bucket/odd") == {name: name.encode()}


@pytest.mark.parametrize("name", ["with space", "ü", "a%20b", "50%", "a+b&c=d", "hash#tag", "what?", "a@b:c"])
def test_a_url_names_a_key_as_it_is_written(name: str, bucket: Path) -> None:
    (bucket / name).mkdir()
    (bucket / name / name).write_bytes(b"content")
    assert contents(f"s3://bucket/{name}/{name}") == {name: b"content"}
    assert contents(f"s3://bucket/{name}") == {name: b"content"}


def test_one_object_is_a_file(bucket: Path) -> None:
    (bucket / "deep").mkdir()
    (bucket / "deep" / "x.bin").write_bytes(b"content")
    collection = resolve("s3://bucket/deep/x.bin")
    assert (collection.kind, [file.name for file in collection.files]) == ("file", ["x.bin"])
    assert contents("s3://bucket/deep/x.bin") == {"x.bin": b"content"}


def test_a_whole_bucket_can_be_named(bucket: Path) -> None:
    (bucket / "x").write_bytes(b"1")
    assert contents("s3://bucket") == {"x": b"1"}


def test_nothing_there_is_told(bucket: Path) -> None:
    with pytest.raises(StorageError, match="there is nothing at s3://bucket/none"):
        resolve("s3://bucket/none")


def test_a_public_bucket_is_read_without_keys(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bucket / "a b").write_bytes(b"open to all")
    files = resolve("s3://bucket").files
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    got: list[bytes] = []
    with Wire() as wire:
        wire.fetch_small(files, deliver=lambda landed: got.extend(bytes(data) for _, data in landed))
    assert got == [b"open to all"]


@contextmanager
def listing(*keys: tuple[str, int], more: str = "<IsTruncated>false</IsTruncated>") -> Iterator[str]:
    """A store that holds these keys and sizes, as far as a listing shows; nothing else is there."""
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-15T05:00:00.000Z</LastModified>"
        f'<ETag>"e"</ETag><Size>{size}</Size></Contents>'
        for key, size in keys
    )
    body = f'<?xml version="1.0"?><ListBucketResult>{more}{rows}</ListBucketResult>'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(body.encode() if "list-type" in self.path else b"")

        do_HEAD = do_GET

        def _send(self, data: bytes) -> None:
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None: ...

    with served(Handler) as endpoint:
        yield endpoint


def test_objects_that_stand_for_folders_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with listing(("p/", 0), ("p/sub/", 0), ("p/sub/x", 5)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        collection = resolve("s3://bucket/p")
    assert [(file.name, file.bytes, file.version) for file in collection.files] == [("sub/x", 5, '"e"')]


def test_a_listing_of_a_terabyte_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    objects, size = 20_000, 50 << 20
    with listing(*((f"p/{number:06d}.bin", size) for number in range(objects))) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        tracemalloc.start()
        try:
            collection = resolve("s3://bucket/p")
            units = units_of(collection, folder="s3/bucket/p")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sum(unit.bytes for unit in units) == objects * size > 10**12
    assert peak < objects * 3000  # of which the server's own page is a tenth


def test_a_listing_that_begins_again_and_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not heed the token it was given."""
    endless = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
    with listing(("p/a", 5), ("p/b", 5), ("p/c", 5), more=endless) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StorageError, match="begins again and again with a"):
            resolve("s3://bucket/p")


@pytest.mark.parametrize("key", ["p/a//b", "p/../x"])
def test_a_key_that_cannot_be_a_file_is_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with listing((key, 5)) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(StorageError, match="s3://bucket/p"):
            resolve("s3://bucket/p")


# --- datasets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["s3", "web", "folder"])
def test_a_dataset_is_known_by_its_manifest(
    place: str, s3: S3Server, bucket: Path, large_dataset: Path, snapshot: Any
) -> None:
    shutil.copytree(large_dataset, bucket / "set")
    (bucket / "set" / "stray.txt").write_bytes(b"not of the dataset")
    url = {"s3": "s3://bucket/set", "web": f"{s3.endpoint}/bucket/set", "folder": str(bucket / "set")}[place]
    collection = resolve(url)
    assert (collection.kind, {file.digest[:5] for file in collection.files}) == ("dataset", {"xxh3:"})
    own = {"manifest.json", "blocks.xxh3", *(record.name for record in read_manifest(large_dataset).files())}
    assert contents(url) == {name: data for name, data in snapshot(large_dataset).items() if name in own}


def test_a_dataset_can_be_named_by_its_manifest(bucket: Path, large_dataset: Path) -> None:
    shutil.copytree(large_dataset, bucket / "set")
    assert resolve("s3://bucket/set/manifest.json") == resolve("s3://bucket/set")


# --- the web --------------------------------------------------------------------------------------


def test_a_web_address_names_a_file(s3: S3Server, bucket: Path) -> None:
    (bucket / "a b.bin").write_bytes(b"content")
    assert contents(f"{s3.endpoint}/bucket/a%20b.bin") == {"a b.bin": b"content"}


def test_an_empty_file_of_the_web(s3: S3Server, bucket: Path) -> None:
    (bucket / "empty").write_bytes(b"")
    assert contents(f"{s3.endpoint}/bucket/empty") == {"empty": b""}


def test_a_web_address_that_is_refused_is_told(s3: S3Server, bucket: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*/bucket/none: the server answers 400"):
        resolve(f"{s3.endpoint}/bucket/none")


def test_a_host_that_is_not_there_is_told() -> None:
    (port,) = free_ports(1)
    with pytest.raises(StorageError, match=f"127.0.0.1 port {port}"):
        resolve(f"http://127.0.0.1:{port}/x")


def test_a_proxy_of_the_environment_is_used(
    s3: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bucket / "x").write_bytes(b"through the proxy")
    with faulty(s3.endpoint, lambda number, head: None) as proxy:
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{proxy.port}")
        assert contents("http://far-away.invalid/bucket/x") == {"x": b"through the proxy"}
    assert proxy.requests[-1].startswith("GET http://far-away.invalid:80/bucket/x HTTP/1.1\r\n")
    assert "Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=" in proxy.requests[-1]


# --- secured connections --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(require_binary: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for localhost that signs itself; its key is beside it."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    files = ("-keyout", path.with_suffix(".key"), "-out", path)
    make = (require_binary("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    subprocess.run([*make, *names, *files], check=True, capture_output=True)
    return path


@pytest.fixture
def secured(s3: S3Server, certificate: Path, require_binary: Any, tmp_path: Path) -> Iterator[str]:
    settings = f"ssl_certificate {certificate}; ssl_certificate_key {certificate.with_suffix('.key')};"
    programs = {"rclone": require_binary("rclone"), "nginx": require_binary("nginx")}
    with serve(tmp_path, **programs, settings=settings, tls=True) as server:
        (server.root / "bucket" / "x").write_bytes(b"s" * 3_000_000)
        yield server.endpoint.replace("http://127.0.0.1", "https://localhost")


def test_a_secured_connection_trusts_named_authorities(
    secured: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert contents(f"{secured}/bucket/x") == {"x": b"s" * 3_000_000}


def test_a_secured_connection_goes_through_a_proxy(
    secured: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    port = urlsplit(secured).port
    with faulty(f"http://127.0.0.1:{port}", lambda number, head: None) as proxy:
        monkeypatch.setenv("https_proxy", proxy.endpoint)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        assert contents(f"{secured}/bucket/x") == {"x": b"s" * 3_000_000}
    assert proxy.tunnels[0].startswith(f"CONNECT localhost:{port} HTTP/1.1\r\n")


def test_a_certificate_that_nobody_vouches_for_is_refused(secured: str) -> None:
    with pytest.raises(StorageError, match="certificate of localhost is not trusted") as caught:
        resolve(f"{secured}/bucket/x")
    assert "SSL_CERT_FILE" in caught.value.hint


# --- a hub ----------------------------------------------------------------------------------------

COMMIT, TOKEN = "c0ffee" * 6 + "c0ff", "hf_of_the_test"
HUB_FILES = {
    "config.json": b'{"layers": 2}',
    "data/model ü.safetensors": os.urandom(3_000_000),
    "data/empty.txt": b"",
}
LARGE = "data/model ü.safetensors"


class HubHandler(BaseHTTPRequestHandler):
    """As much of the hub's API as a listing and a download use; large files lie on another host."""

    protocol_version = "HTTP/1.1"
    cdn = ""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b'{"error": "Invalid credentials"}')
        elif path in ("/api/datasets/org/name", "/api/datasets/org/name/revision/v2"):
            self._send(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/datasets/org/name/tree/{COMMIT}":
            self._send(200, json.dumps([_tree_entry(*item) for item in HUB_FILES.items()]).encode())
        elif path == f"/datasets/org/name/resolve/{COMMIT}/{LARGE}":
            self._send(302, b"", ("Location", f"{self.cdn}/bucket/blob"))
        elif path.startswith(f"/datasets/org/name/resolve/{COMMIT}/"):
            self._send(200, HUB_FILES[path.removeprefix(f"/datasets/org/name/resolve/{COMMIT}/")])
        else:
            self._send(404, b'{"error": "Repository not found"}', ("X-Error-Code", "RepoNotFound"))

    def _send(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (
            *headers,
            ("Content-Length", str(len(body))),
            ("Content-Type", "application/json"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None: ...


def _tree_entry(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "path": path, "size": len(data), "oid": blob}
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return {**entry, "lfs": lfs} if path == LARGE else entry


@contextmanager
def hub_server(cdn: str) -> Iterator[str]:
    with served(type("Handler", (HubHandler,), {"cdn": cdn})) as endpoint:
        yield endpoint


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# A process of its own, as the hub's library reads its variables when it is first imported.
BRING = """
import sys, json, hashlib
from stoker.errors import StokerError
from stoker.manifest import read_manifest
from stoker.stage.origins.origin import resolve
from stoker.stage.plan import units_of
from stoker.stage.wire.wire import Wire
try:
    collection, got = resolve(sys.argv[1]), {}
    with Wire() as wire:
        wire.fetch_small(
            collection.files,
            deliver=lambda landed: got.update(
                (file.name, hashlib.sha256(data).hexdigest()) for file, data in landed
            ),
        )
    facts = {f.name: [f.digest, got[f.name]] for f in collection.files}
    print(json.dumps([collection.kind, collection.revision, facts]))
except StokerError as error:
    sys.exit(f"{error.message} / {error.hint}")
"""


@pytest.fixture
def bring(s3: S3Server, bucket: Path, stoker_environ: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    (bucket / "blob").write_bytes(HUB_FILES[LARGE])

    with hub_server(s3.endpoint) as endpoint:

        def run(url: str, *, token: str = TOKEN, hub: str = endpoint) -> Any:
            own = {
                "HF_ENDPOINT": hub,
                "HF_TOKEN": token,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path),
            }
            return subprocess.run(
                [sys.executable, "-c", BRING, url],
                env=stoker_environ(**own),
                capture_output=True,
                text=True,
                timeout=60,
            )

        yield run


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_hub_that_is_away_is_said(bring: Any) -> None:
    (port,) = free_ports(1)
    ran = bring("hf://datasets/org/name", hub=f"http://127.0.0.1:{port}")
    assert ran.returncode == 1
    assert ran.stderr.startswith("cannot list hf://datasets/org/name: ")
    assert "HF_ENDPOINT" in ran.stderr


@pytest.mark.parametrize("url", ["hf://datasets/org/name", "hf://datasets/org/name@v2"])
def test_a_repository_is_brought_at_one_commit(url: str, bring: Any) -> None:
    ran = bring(url)
    assert ran.returncode == 0, ran.stderr
    kind, revision, facts = json.loads(ran.stdout)
    assert (kind, revision) == ("hub", COMMIT)
    assert {name: got for name, (_, got) in facts.items()} == {n: sha256(d) for n, d in HUB_FILES.items()}
    assert facts[LARGE][0] == f"sha256:{sha256(HUB_FILES[LARGE])}"
    assert facts["config.json"][0].startswith("sha1git:")


def test_a_folder_of_a_repository(bring: Any) -> None:
    ran = bring("hf://datasets/org/name/data")
    assert ran.returncode == 0, ran.stderr
    assert set(json.loads(ran.stdout)[2]) == {"model ü.safetensors", "empty.txt"}


def test_a_repository_that_needs_another_token_is_told(bring: Any) -> None:
    ran = bring("hf://datasets/org/name", token="hf_wrong")
    assert (ran.returncode, "cannot list hf://datasets/org/name" in ran.stderr) == (1, True)
    assert "HF_TOKEN" in ran.stderr
