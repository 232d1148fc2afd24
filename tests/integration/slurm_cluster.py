"""A real Slurm cluster for a test: munged, slurmctld and two slurmd, as foreground children.

Nothing outside its folder is touched, no port is fixed, and it runs as root or as any user. The daemons
end with the `with` block, by their process ids.
"""

from __future__ import annotations

import os
import pwd
import secrets
import signal
import socket
import subprocess
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusters import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SBIN = "/usr/sbin"  # not on a normal user's PATH

_CONF = """\
ClusterName=stoker
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/completed.txt
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=3600
MaxArraySize={max_array_size}
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1
ReturnToService=2
{communication}
{settings}
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=2000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=2000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n0,n1 MaxTime=INFINITE State=UP PriorityTier=9
"""


@dataclass(frozen=True, kw_only=True)
class SlurmCluster:
    """A running cluster: the environment in which its commands, and stoker, find it."""

    environment: dict[str, str]
    user: str
    daemons: dict[str, subprocess.Popen[bytes]]
    start: Callable[[str], None]

    def ask(self, *command: str) -> str:
        """What a Slurm command says."""
        return subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def jobs(self, stage: str) -> dict[str, int]:
        """Every job ever submitted for a stage: its id, and how many elements it had."""
        lines = self.ask("squeue", "--noheader", "--array", "--states=all", "--format=%F %j").splitlines()
        return Counter(job for job, name in map(str.split, lines) if name.startswith(f"stoker-{stage}-"))

    def is_idle(self) -> bool:
        return not self.ask("squeue", "--noheader")

    def lose(self, node: str, *, processes: Sequence[int]) -> None:
        """The node is dead: its slurmd, and the steps that these processes belong to."""
        steps = {_step_of(pid) for pid in processes}
        for pid in (*steps, *processes, self.daemons[node].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons[node].wait()
        # what the controller does of itself after SlurmdTimeout, which a busy machine must not reach
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=dead")

    def bring_back(self, node: str) -> None:
        self.start(node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Jobs are queued while the block runs, and begin after it."""
        self.ask("scontrol", "update", "PartitionName=all", "State=DOWN")
        try:
            yield
        finally:
            self.ask("scontrol", "update", "PartitionName=all", "State=UP")


@contextmanager
def slurm_cluster(
    folder: Path, *, max_array_size: int, cpus: int = 2, settings: str = ""
) -> Iterator[SlurmCluster]:
    """Start the daemons, wait until both nodes are idle, and end everything afterwards."""
    _write_files(folder, max_array_size=max_array_size, cpus=cpus, settings=settings)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environment["PATH"] = f"{environment['PATH']}:{_SBIN}"
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as children:

        def start(name: str) -> None:
            child = _child(_daemons(folder)[name], environment, log=folder / f"{name}.out")
            daemons[name] = children.enter_context(child)

        cluster = SlurmCluster(environment=environment, user=_user(), daemons=daemons, start=start)
        for name in _daemons(folder):
            start(name)
            if name == "munged":
                wait_until((folder / "munge/socket").exists, "munged makes its socket")
        wait_until(lambda: _nodes_are_idle(cluster), f"both nodes are idle; see the logs in {folder}")
        yield cluster


def _daemons(folder: Path) -> dict[str, list[str]]:
    munge = folder / "munge"
    return {
        "munged": [
            # --force: folders of tests are private, and munged likes its socket open to all
            "munged", "--foreground", "--force",
            f"--key-file={munge}/key", f"--socket={munge}/socket",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        ],
        "slurmctld": ["slurmctld", "-D", "-c", "-i"],
        "n0": ["slurmd", "-D", "-N", "n0"],
        "n1": ["slurmd", "-D", "-N", "n1"],
    }  # fmt: skip


def _write_files(folder: Path, *, max_array_size: int, cpus: int, settings: str) -> None:
    for name in ("munge", "state", "spool-n0", "spool-n1"):
        (folder / name).mkdir(parents=True, mode=0o755)
    key = folder / "munge/key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    on_loopback = socket.gethostbyname(host).startswith("127.")
    conf = _CONF.format(
        folder=folder,
        host=host,
        user=_user(),
        ports=_free_ports(3),
        max_array_size=max_array_size,
        cpus=cpus,
        settings=settings,
        # Without it a daemon whose host name means loopback would listen where the others cannot reach it.
        communication="CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if on_loopback else "",
    )
    (folder / "slurm.conf").write_text(conf)


def _user() -> str:
    """By the process, not by LOGNAME, which survives a change of user."""
    return pwd.getpwuid(os.getuid()).pw_name


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _step_of(pid: int) -> int:
    """The slurmstepd that a process runs under."""
    while Path(f"/proc/{pid}/comm").read_text() != "slurmstepd\n":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _nodes_are_idle(cluster: SlurmCluster) -> bool:
    try:
        states = cluster.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
    except subprocess.CalledProcessError:  # the controller is not up yet
        return False
    return set(states) == {"idle"}


@contextmanager
def _child(
    command: Sequence[str], environment: dict[str, str], *, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        # A session of its own: Ctrl-C in the terminal of a test run is for pytest, which then ends us.
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
