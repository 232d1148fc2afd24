"""What runs as the first process of a guest kernel: mounts the export, then does what the test says.

Called as `nfs_guest.py NUMBER`. Standard library only until a test asks for more. A request is one line of
JSON, ["run" | "ask", PYTHON]; so is the answer, {"value": …} or {"error": …}.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import traceback
import tty
from pathlib import Path
from typing import Any

MODULES = Path("/usr/lib/uml/modules") / os.uname().release
FINIT_MODULE = 313
libc = ctypes.CDLL(None, use_errno=True)


def main(number: str) -> None:
    os.environ["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
    mount("proc", "/proc", kind="proc")
    socket.sethostname(f"node-{number}")
    # Without a name of its own the server would take both guests for one client.
    load("kernel/fs/nfs/nfs.ko", options=f"nfs4_unique_id=node-{number}")
    load("kernel/fs/nfs/nfsv4.ko")
    for command in ("link set lo up", f"addr add 10.99.{number}.2/24 dev eth0", "link set eth0 up"):
        subprocess.run(["ip", *command.split()], check=True)
    server, client = f"10.99.{number}.1", f"10.99.{number}.2"
    options = f"vers=4.2,proto=tcp,sec=sys,addr={server},clientaddr={client}"
    mount(f"{server}:/export", "/mnt", kind="nfs4", options=options)
    with open("/dev/ttyS0", "r+b", buffering=0) as line:
        tty.setraw(line.fileno())
        answer_all(line)


def answer_all(line: Any) -> None:
    names: dict[str, Any] = {}
    line.write(b'{"value": "ready"}\n')
    for request in os.fdopen(os.dup(line.fileno()), "r"):
        verb, code = json.loads(request)
        try:
            value = eval(code, names) if verb == "ask" else exec(code, names)
            said = json.dumps({"value": value})
        except Exception:
            said = json.dumps({"error": traceback.format_exc()})
        line.write(f"{said}\n".encode())


def mount(source: str, target: str, *, kind: str, options: str = "") -> None:
    given = (source.encode(), target.encode(), kind.encode(), 0, options.encode())
    succeed(libc.mount(*given), target)


def load(module: str, *, options: str = "", loaded: set[str] = set()) -> None:  # noqa: B006 - of this kernel
    """Load a module after those it needs, once."""
    if module in loaded:
        return
    loaded.add(module)
    needed = dict(line.split(":") for line in (MODULES / "modules.dep").read_text().splitlines())
    for name in reversed(needed[module].split()):
        load(name, loaded=loaded)
    with (MODULES / module).open("rb") as file:
        succeed(libc.syscall(FINIT_MODULE, file.fileno(), options.encode(), 0), module)


def succeed(answer: int, what: str) -> None:
    if answer != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


if __name__ == "__main__":
    main(sys.argv[1])
