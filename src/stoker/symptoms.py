"""Symptoms: which page of docs/symptoms explains a finding or an error.

People arrive with a text from a terminal. A page has it word for word; findings and errors name their page.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.findings import Finding

FOLDER = "docs/symptoms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """A page, the findings that lead to it (kind, or kind/cause), and signs in texts that do."""

    page: str
    findings: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.page}.md"


# Of two pages whose signs both stand in a text the first is taken: /dev/shm that is full is a full disk too.
SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(
        page="dataloader-worker-bus-error",
        findings=("shm_pressure",),
        signs=(
            "killed by signal: Bus error",
            "killed by SIGBUS",
            "out of shared memory",
            "unable to write to file </torch_",
            "/dev/shm: No space left on device",
        ),
    ),
    Symptom(
        page="too-many-open-files",
        signs=("Too many open files", "received 0 items of ancdata"),
    ),
    Symptom(
        page="dataloader-worker-exited-unexpectedly",
        findings=("crashed/worker",),
        signs=("exited unexpectedly", "DataLoader worker", "loader worker killed"),
    ),
    Symptom(
        page="cuda-out-of-memory",
        findings=("memory_pressure",),
        signs=("CUDA out of memory",),
    ),
    Symptom(
        page="nccl-watchdog-timeout",
        findings=("collective_hang", "crashed/nccl"),
        signs=("Watchdog caught collective operation timeout", "NCCL error"),
    ),
    Symptom(
        page="killed-exit-code-137",
        findings=("crashed/out_of_memory",),
        signs=("killed by SIGKILL", "exit 137"),
    ),
    Symptom(
        page="job-preempted",
        findings=("preempted",),
    ),
    Symptom(
        page="training-hangs",
        findings=("host_hang",),
    ),
    Symptom(
        page="training-slow-on-nfs",
        findings=("data_starvation/storage", "data_starvation/small_reads"),
    ),
    Symptom(
        page="gpu-utilization-0",
        findings=("data_starvation", "host_code", "evaluation", "h2d_copy", "launch_bound", "host_sync"),
    ),
    Symptom(
        page="gpu-utilization-100-but-slow",
        findings=("precision",),
    ),
    Symptom(
        page="gpu-throttled",
        findings=("throttling",),
    ),
    Symptom(
        page="more-gpus-not-faster",
        findings=("straggler", "communication_bound"),
    ),
    Symptom(
        page="checkpoint-saving-slow",
        findings=("checkpoint_stall",),
    ),
    Symptom(
        page="429-too-many-requests",
        signs=("the server answers 429", "the server answers 503", "SlowDown", "429 Too Many Requests"),
    ),
    Symptom(
        page="no-space-left-on-device",
        signs=("No space left on device", "CacheFullError"),
    ),
    Symptom(
        page="loss-differs-after-resume",
        signs=("the saved position belongs to another order", "the saved position is of version"),
    ),
)


def page_of(finding: Finding) -> str:
    """The page of a finding: of what a crash said, else of its cause, else of its kind; or nothing."""
    if finding.kind == "crashed" and (said := page_of_text("\n".join((finding.summary, *finding.evidence)))):
        return said
    named = {name: symptom.path for symptom in SYMPTOMS for name in symptom.findings}
    return named.get(f"{finding.kind}/{finding.cause}") or named.get(finding.kind, "")


def page_of_text(text: str) -> str:
    """The page of an error's text, or nothing."""
    return next((one.path for one in SYMPTOMS if any(sign in text for sign in one.signs)), "")
