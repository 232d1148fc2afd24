"""Two nodes and an NFS server on one machine: real client kernels, each with caches of its own.

The server is nfs-ganesha; a node is a user-mode Linux kernel whose root is this machine's, read-only, and
whose first process is `nfs_guest.py`. All of it lives in a network namespace made for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import selectors
import signal
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stoker

if TYPE_CHECKING:
    from collections.abc import Iterator

GANESHA = """
NFS_CORE_PARAM {{ Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false; }}
NFSv4 {{ Graceless = true; Lease_Lifetime = 10; RecoveryRoot = "{folder}/recovery"; }}
EXPORT {{
    Export_Id = 1; Path = "{export}"; Pseudo = "/export"; Access_Type = RW; Squash = No_Root_Squash;
    SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }}
}}
"""

# This kernel saves 2.7 kB of a processor's registers and gives up where there are more (AMX). Told that the
# machine cannot say, it saves those of SSE, and so the guests must use no others.
WIDE = "AVX AVX2 AVX512F AVX512VL AVX512BW AVX512DQ AVX512CD AVX_Fast_Unaligned_Load ERMS FSRM XSAVE XSAVEC"
NO_WIDE_REGISTERS = ",".join(f"-{name}" for name in WIDE.split())


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running NFS server: the folder it exports, as this machine sees it, and where it listens."""

    folder: Path
    export: Path
    enter: tuple[str, ...]  # what to put before a command to run it in the namespace
    linux: str

    @contextmanager
    def boot(self, *numbers: int) -> Iterator[list[Node]]:
        """Boot nodes (of 1, 2, …) at the same time. They see the export as /mnt."""
        with ExitStack() as stack:
            nodes = [stack.enter_context(_node(self, number)) for number in numbers]
            for node in nodes:
                assert node.end() == "ready"
            yield nodes


class Node:
    """A guest kernel with a Python that does what it is told."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def ask(self, expression: str, *, seconds: float = 60.0) -> Any:
        """The value of an expression there."""
        self.begin("ask", expression)
        return self.end(seconds=seconds)

    def run(self, statements: str, *, seconds: float = 60.0) -> None:
        self.begin("run", statements)
        self.end(seconds=seconds)

    def begin(self, verb: str, code: str) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps([verb, code]).encode() + b"\n")
        self.process.stdin.flush()

    def end(self, *, seconds: float = 60.0) -> Any:
        answer = json.loads(self._line(time.monotonic() + seconds))
        assert "error" not in answer, answer["error"]
        return answer["value"]

    def pause(self) -> None:
        """Stop the kernel, and with it all that its processes ask of it."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Pull the plug."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not ready.select(deadline - time.monotonic()):
                    raise TimeoutError(f"no answer from the guest: {self._log.read_text()[-2000:]}")
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                assert piece, f"the guest ended: {self._log.read_text()[-2000:]}"
                line += piece
        return line


def refusal() -> str:
    """Why this machine cannot run nodes; empty if it can."""
    if os.geteuid() != 0 or platform.machine() != "x86_64":
        return "NFS nodes need root, on x86-64: run as root there"
    try:
        with _namespace(nodes=1):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot make a tap device in a network namespace: {error}"


@contextmanager
def serve(folder: Path, *, ganesha: str, linux: str, nodes: int) -> Iterator[Server]:
    """Serve `folder/export` to that many nodes while the block runs."""
    export, config = folder / "export", folder / "ganesha.conf"
    export.mkdir()
    (folder / "recovery").mkdir()
    config.write_text(GANESHA.format(folder=folder, export=export))
    with ExitStack() as stack:
        enter = stack.enter_context(_namespace(nodes))
        command = [
            ganesha,
            "-F",
            "-f",
            str(config),
            "-L",
            str(folder / "ganesha.log"),
            "-p",
            str(folder / "pid"),
        ]
        stack.enter_context(_running([*enter, *command]))
        _wait_for_port(enter, folder / "ganesha.log")
        yield Server(folder=folder, export=export, enter=enter, linux=linux)


@contextmanager
def _namespace(nodes: int) -> Iterator[tuple[str, ...]]:
    """A network namespace with a tap device for each node; it ends with the process that keeps it."""
    with subprocess.Popen(
        ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as keeper:
        assert keeper.stdin
        assert keeper.stdout
        keeper.stdin.write(b"\n")
        keeper.stdout.read(1)  # now it runs, and so in its namespace
        enter = ("nsenter", f"--net=/proc/{keeper.pid}/ns/net")
        lines = ["link set lo up"]
        for number in range(1, nodes + 1):
            tap = f"tap{number}"
            lines += [
                f"tuntap add dev {tap} mode tap",
                f"addr add 10.99.{number}.1/24 dev {tap}",
                f"link set {tap} up",
            ]
        subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
        yield enter


@contextmanager
def _node(server: Server, number: int) -> Iterator[Node]:
    log = server.folder / f"node-{number}.log"
    environ = {
        "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={NO_WIDE_REGISTERS}",
        "PYTHONPATH": str(Path(stoker.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    guest = [sys.executable, str(Path(__file__).with_name("nfs_guest.py")), str(number)]
    machine = ["mem=128M", f"umid=node-{number}", f"uml_dir={server.folder}/", f"eth0=tuntap,tap{number}"]
    lines = ["con=null", "con0=null,fd:2", "ssl=null", "ssl0=fd:0,fd:1", "quiet"]
    root = ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={guest[0]}"]
    values = [f"{name}={value}" for name, value in environ.items()]
    command = [*server.enter, server.linux, *machine, *lines, *root, *values, "--", *guest[1:]]
    with (
        log.open("wb") as said,
        _running(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said) as process,
    ):
        yield Node(process, log)


@contextmanager
def _running(command: list[str], **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process and all it starts, as a group of its own; killed at the end."""
    given: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(
        command, **{**given, **popen}, start_new_session=True, preexec_fn=_hide_extended_state
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _wait_for_port(enter: tuple[str, ...], log: Path) -> None:
    connect = "import socket; socket.create_connection(('127.0.0.1', 2049), timeout=1).close()"
    deadline = time.monotonic() + 20
    while subprocess.run([*enter, sys.executable, "-c", connect], stderr=subprocess.DEVNULL).returncode:
        assert time.monotonic() < deadline, f"the server does not listen: {log.read_text()[-2000:]}"


def _hide_extended_state() -> None:
    """Refuse ptrace(PTRACE_GETREGSET) to this process and its children: see NO_WIDE_REGISTERS."""
    load, equal, answer = 0x20, 0x15, 0x06
    ptrace, getregset, enodev, allow = 101, 0x4204, 0x00050000 | 19, 0x7FFF0000
    steps = [
        (load, 0, 0, 0),  # the number of the call
        (equal, 0, 3, ptrace),
        (load, 0, 0, 16),  # its first argument
        (equal, 0, 1, getregset),
        (answer, 0, 0, enodev),
        (answer, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    set_seccomp, filter_mode = 22, 2
    if libc.prctl(set_seccomp, filter_mode, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")
