"""nginx over a folder, for tests that count the bytes it served."""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from s3_server import free_ports, running

from stoker.formats.checksums import hash_file
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A small send buffer: what the kernel has taken from nginx but no client read counts as served.
NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    log_format served "$status $body_bytes_sent $request_uri";
    access_log {folder}/access.log served;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type application/octet-stream;
    server {{
        listen 127.0.0.1:{port} sndbuf=64k;
        root {root};
        {settings}
    }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class WebServer:
    """A running server; `root` is what it serves."""

    root: Path
    url: str
    log: Path

    def served_bytes(self, below: str = "/") -> int:
        """What was sent of the files below a path so far; a request is logged when it ends."""
        return sum(
            int(count)
            for _, count, path in (line.split(" ", 2) for line in self._settled())
            if path.startswith(below)
        )

    def _settled(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        while True:
            time.sleep(0.05)  # connections of killed clients are closed by the kernel, then logged
            now = self.log.read_text().splitlines()
            if len(now) == len(lines):
                return now
            lines = now


@contextmanager
def serve_folder(folder: Path, *, nginx: str, settings: str = "") -> Iterator[WebServer]:
    """Serve `folder/root` while the block runs; `settings` are further lines for nginx."""
    root = folder / "root"
    root.mkdir(parents=True)
    (port,) = free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, root=root, port=port, settings=settings))
    with running([nginx, "-p", str(folder), "-c", str(config)], port=port):
        yield WebServer(root=root, url=f"http://127.0.0.1:{port}", log=folder / "access.log")


def write_noise(folder: Path, *, shards: int, shard_bytes: int) -> None:
    """A dataset of shards of noise, which nobody loads, with small files beside them."""
    folder.mkdir()
    records, blocks = [], []
    for number in range(shards):
        files = []
        for name, size in ((f"s{number}.bin", shard_bytes), (f"s{number}.idx", 100_000)):
            (folder / name).write_bytes(random.Random(number).randbytes(1 << 16) * (size >> 16))
            with (folder / name).open("rb") as file:
                hashed = hash_file(file)
            files.append(FileRecord(name=name, bytes=hashed.bytes, xxh3=hashed.digest()))
            blocks += hashed.blocks()
        records.append(ShardRecord(name=f"s{number}", samples=1, tokens=1, files=tuple(files)))
    manifest = Manifest(format="webdataset", shards=tuple(records))
    write_manifest(open_store(folder), manifest, blocks=np.array(blocks, np.uint64))
