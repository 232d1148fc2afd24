"""A real S3 server for tests: rclone, with nginx before it.

rclone checks signatures, lists, takes uploads in parts; but it answers a Range request with all of the
object. So nginx serves GETs of objects from the same folder, plain ones and those of signed URLs, and passes
on everything else. The two would name different ETags for an object: rclone is told to name none.
"""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY, SECRET = "stokers-access-key-0001", "stokers-secret"

NGINX = """
daemon off;
{workers}
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
    access_log {folder}/access.log;
    client_max_body_size 0;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type application/octet-stream;
    {settings}
    server {{
        listen 127.0.0.1:{port}{tls};
        root {root};
        {locations}
        location / {{
            set $asked "$request_method $args";
            error_page 418 = @rclone;
            if ($asked !~ "^GET (.*X-Amz-Signature=.*)?$") {{ return 418; }}
            try_files $uri @rclone;
        }}
        location @rclone {{
            proxy_pass http://127.0.0.1:{rclone_port};
            proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_request_buffering off;
        }}
    }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class S3Server:
    """A running server; the folders of `root` are its buckets."""

    root: Path
    endpoint: str

    def environ(self, *, secret: str = SECRET) -> dict[str, str]:
        """What a client needs to know."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def serve(
    folder: Path,
    *,
    rclone: str,
    nginx: str,
    settings: str = "",
    locations: str = "",
    tls: bool = False,
    root: Path | None = None,
    workers: int = 0,
) -> Iterator[S3Server]:
    """Serve `folder/root`, or another, while the block runs; `settings` and `locations` are further lines for
    nginx, in its http block and in its server. The endpoint of one with TLS is https://localhost."""
    root = root or folder / "root"
    (root / "bucket").mkdir(parents=True, exist_ok=True)
    port, rclone_port = free_ports(2)
    config = folder / "nginx.conf"
    # Tests put files into the folder themselves: rclone may remember a listing for 10 ms (with none at
    # all it slows down a hundredfold).
    config.write_text(
        NGINX.format(
            folder=folder,
            root=root,
            port=port,
            rclone_port=rclone_port,
            settings=settings,
            locations=locations,
            workers=f"worker_processes {workers};\nuser root;" if workers else "master_process off;",
            tls=" ssl" if tls else "",
        )
    )
    with ExitStack() as stack:
        stack.enter_context(
            running(
                [
                    *(
                        rclone,
                        "serve",
                        "s3",
                        "--addr",
                        f"127.0.0.1:{rclone_port}",
                        "--dir-cache-time",
                        "10ms",
                        "--etag-hash",
                        "",
                    ),
                    *("--config", "/dev/null", "--auth-key", f"{KEY},{SECRET}", str(root)),
                ],
                port=rclone_port,
            )
        )
        stack.enter_context(running([nginx, "-p", str(folder), "-c", str(config)], port=port))
        yield S3Server(root=root, endpoint=f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def running(command: list[str], *, port: int) -> Iterator[None]:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        try:
            _wait_for(port, process)
            yield
        finally:
            process.terminate()
            process.communicate(timeout=20)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended: {process.communicate()[1].decode()}") from None
            time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} does not listen on port {port}")
