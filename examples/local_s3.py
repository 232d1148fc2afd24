"""A real S3 server on this machine, for the demo: rclone, which checks signatures and lists, and nginx before
it, since rclone answers a request for a range with the whole object. Without one of them there is none."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NGINX = """
daemon off; master_process off; pid {scratch}/pid; error_log {scratch}/error.log; events {{ }}
http {{
    access_log off; default_type application/octet-stream;
    client_body_temp_path {scratch}/a; proxy_temp_path {scratch}/b; fastcgi_temp_path {scratch}/c;
    uwsgi_temp_path {scratch}/d; scgi_temp_path {scratch}/e;
    server {{
        listen 127.0.0.1:{port}; root {root};
        location / {{
            set $asked "$request_method $args"; error_page 418 = @rclone;
            if ($asked !~ "^GET (.*X-Amz-Signature=.*)?$") {{ return 418; }}
            try_files $uri @rclone;
        }}
        location @rclone {{ proxy_pass http://127.0.0.1:{rclone}; proxy_set_header Host $http_host; }}
    }}
}}
"""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL under which `folder` can be staged: a bucket's while a server runs, else its own path."""
    rclone, nginx = _program("rclone"), _program("nginx")
    if not rclone or not nginx or not importlib.util.find_spec("obstore"):
        yield str(folder)
        return
    key, secret, ports = secrets.token_hex(10), secrets.token_hex(10), (_free_port(), _free_port())
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = scratch / "nginx.conf"
        config.write_text(NGINX.format(scratch=scratch, root=folder.parent, port=ports[0], rclone=ports[1]))
        serve = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{ports[1]}", "--config", "/dev/null"]
        stack.enter_context(_running([*serve, "--auth-key", f"{key},{secret}", str(folder.parent)], ports[1]))
        stack.enter_context(_running([nginx, "-p", str(scratch), "-c", str(config)], ports[0]))
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{ports[0]}",
            AWS_ACCESS_KEY_ID=key,
            AWS_SECRET_ACCESS_KEY=secret,
            AWS_REGION="us-east-1",
            NO_PROXY="127.0.0.1",
        )
        yield f"s3://{folder.name}"


def _program(name: str) -> str | None:
    places = [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"]
    return shutil.which(name, path=os.pathsep.join(places))


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            _wait_for(port)
            yield
        finally:
            server.terminate()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise RuntimeError(f"the S3 server does not listen on port {port}")
