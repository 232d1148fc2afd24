"""Data starvation: the card waits for batches, because of storage, cores, workers or none of these."""

from __future__ import annotations

from stoker.diagnose import remedies
from stoker.diagnose.card import Card
from stoker.diagnose.features import Features, Loop
from stoker.diagnose.host import Host, ratio
from stoker.diagnose.hostcode import Spent, held, line_in, own_batches
from stoker.diagnose.pricing import idle, idle_in, of_judged, own_code, speedup
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, below, known, percent, priced
from stoker.findings import Finding
from stoker.formats.sizes import counted

KIND = "data_starvation"
_OF_THE_LOOP = ("lock", "unknown", "cpu")  # what a loop looks like that has its batch and not the interpreter


def data_starvation(features: Features) -> Finding | Abstention:
    """The loop waits for its loader, and the card with it."""
    own = own_batches(features)
    if own and own.share >= max(at("own_loop"), features.loop.share["data"]) and own.looks >= at("looks"):
        return _own_loop(features, own)
    if not features.loop.steps or "data" in features.loop.unseen:
        return _by_the_card(features)
    loop = features.loop
    wait = loop.share["data"]
    steady = wait * (1 - loop.first_steps_wait) / max(1 - loop.share["startup"], 0.05)
    crowded = _crowded_out(features)
    least = _least_share(features)
    if steady < least and not crowded:
        if wait >= least:
            why = f"the first batches took {percent(wait)} of this recording; later ones were in time"
            return Abstention(kind=KIND, why=why)
        return Abstention(kind=KIND, why=f"the loop waited {percent(wait)} of the time for batches")
    is_regular = loop.burst < at("burst")  # a few steps that all wait say more than as many hiccups
    if wait * features.judged_s < at("least_wait_s") and not is_regular and not crowded:
        why = f"{wait * features.judged_s:.2f} s of waiting for batches in all: too little to say of what"
        return Abstention(kind=KIND, why=why)
    if _overlapped(features.card, loop):
        why = f"the loop waits {percent(wait)} of the time, but the card works off queued steps meanwhile"
        return Abstention(kind=KIND, why=why)
    cause, signs, missing = find_cause(features)
    if cause in _OF_THE_LOOP and any(one.share >= wait / 2 for one in held(features)):
        return Abstention(
            kind=KIND, why="another thread holds the interpreter while the loop waits for batches"
        )
    lost = max(idle_in(features, "data"), min(crowded, idle(features)))
    if cause == "startup":  # workers that live on bring the other batches no sooner
        lost *= loop.epochs
    return priced(
        features,
        KIND,
        cause=cause,
        share=of_judged(features, lost),
        speedup=speedup(lost),
        confidence=_confidence(features, cause),
        summary=_summary(features, wait, cause) if wait >= crowded else _crowd(crowded),
        evidence=(*_evidence(features, wait), *signs),
        remedy=remedies.feed(features, cause),
        missing=missing,
    )


def _least_share(features: Features) -> float:
    """Of the time: a loader without workers makes its batches in the loop itself, and is judged as such."""
    alone = features.fact("num_workers") == 0 and features.host is not None and features.host.workers < 0.5
    return at("own_loop") if alone else at("data_share")


def _own_loop(features: Features, own: Spent) -> Finding:
    """The loop makes its batches itself, between two steps."""
    where = own.lines[0] if own.lines else "?"
    lost = own_code(features, own.share)
    return priced(
        features,
        KIND,
        cause="own_loop",
        share=of_judged(features, lost),
        speedup=speedup(lost),
        confidence=0.9 if own.looks >= 20 else 0.75,
        summary=f"the loop makes its batches itself, {percent(own.share)} of the time, in {where}",
        evidence=(
            f"{percent(own.share)} of {features.judged_s:.1f} s, {own.looks} looks at the loop's stack",
            *(f"seen in {line}" for line in dict.fromkeys(own.lines[:3])),
        ),
        remedy=remedies.OWN_LOOP,
    )


def _crowded_out(features: Features) -> float:
    """The share of time in which the loop itself had no core, because its loader asks for all of them: the
    batches are then in time only because the steps are late."""
    host = features.host
    if host is None or not above(host.loader_cores, host.allowed) or not above(host.rank_delay, at("delay")):
        return 0.0
    return min(host.rank_delay, 1.0)


def _overlapped(card: Card | None, loop: Loop) -> bool:
    if card is None or not above(card.util, at("overlapped_util")) or loop.share["data"] > 0.9:
        return False
    return above(card.sm, 70) or above(card.power, at("hot"))


def _confidence(features: Features, cause: str) -> float:
    seen = 0.95 if features.card and known(features.card.util) else 0.85
    return round(seen - (0.1 if cause == "unknown" else 0.0), 2)


def _summary(features: Features, wait: float, cause: str) -> str:
    because = {
        "storage": "storage delivers too slowly",
        "cpu": "making a batch takes the CPU too long",
        "contention": "others use the cores that the loader needs",
        "quota": "the CPU quota stops the loader",
        "too_few_workers": "too few workers make batches, and cores are idle",
        "small_reads": "the data is read in small pieces",
        "startup": "the loader starts anew at every epoch",
        "lock": "the loader's workers sleep, on neither disk nor CPU",
        "unknown": "why is not visible in this recording",
    }
    alone = features.host is None or not features.host.workers >= 0.5
    if cause == "lock" and alone:
        because["lock"] = "the loop itself makes them (num_workers=0) and sleeps, on neither disk nor CPU"
    where = line_in(features, "data") if alone else ""  # with workers it is but the line that waits for them
    within = f", in {where}" if where else ""
    return f"the GPU waits for data {percent(wait)} of the time: {because[cause]}{within}"


def _crowd(crowded: float) -> str:
    return f"the loader's workers want all cores: the loop itself had none {percent(crowded)} of the time"


def _evidence(features: Features, wait: float) -> tuple[str, ...]:
    loop, card = features.loop, features.card
    steps = counted(loop.steps, "step")
    said = [f"{percent(wait)} of {features.judged_s:.1f} s in the loader's next(), over {steps}"]
    if loop.burst >= at("burst"):
        said.append(f"{percent(loop.burst)} of that in a few long waits: the usual batch is in time")
    if card and known(card.util):
        power = f", power {percent(card.power)} of its limit" if known(card.power) else ""
        said.append(f"GPU utilisation {card.util:.0f}%{power}")
    return tuple(said)


# --- causes ---------------------------------------------------------------------------------------


def find_cause(features: Features) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Why batches are late: the cause, what shows it, and what could not be seen."""
    host, loop = features.host, features.loop
    if loop.epochs >= at("first_batch"):
        return (
            "startup",
            (f"{percent(loop.epochs)} of the wait is for first batches, at equal distances",),
            (),
        )
    if host is None:
        return "unknown", (), ("readings of the host: cores, disks, worker states",)
    for look in (_quota, _full, _delayed, _storage, _computing, _sleeping):
        cause, sign = look(host, features)
        if cause:
            return cause, (sign,), ()
    quiet = f"{host.wait_busy:.1f} cores busy and {host.iowait:.1f} in iowait while the loop waits"
    return "unknown", (quiet,), ("the loader workers' run states and stacks (stoker watch records them)",)


def _quota(host: Host, features: Features) -> tuple[str, str]:
    if above(host.throttled, at("throttled")):
        stopped = percent(host.throttled)
        return (
            "quota",
            f"the CPU quota of {counted(host.quota, 'core')} stopped the job {stopped} of the time",
        )
    if host.quota < host.cpus and above(_busy(host), at("cores_full") * host.quota):
        busy = f"{_busy(host):.1f} of the {counted(host.quota, 'core')} that the quota allows"
        return "quota", f"{busy} are busy; the host has {host.cpus}"
    return "", ""


def _busy(host: Host) -> float:
    return max(host.busy, host.wait_busy) if known(host.wait_busy) else host.busy


def _others(host: Host, features: Features) -> float:
    """Cores busy with others' work: read, or what more workers than we have must be."""
    if known(host.others):
        return host.others
    return _busy(host) - _workers_seen(host, features) - 1.0


def _workers_seen(host: Host, features: Features) -> float:
    return host.workers if known(host.workers) else features.fact("num_workers", "workers")


def _full(host: Host, features: Features) -> tuple[str, str]:
    """All cores busy: then slow-looking storage is a red herring, its readers do not get to run."""
    if known(host.delay) or not above(_busy(host), at("cores_full") * host.allowed):
        return "", ""  # where the time without a core was read, that says it better
    others = _others(host, features)
    if above(host.steal, 0.1 * host.allowed) or above(others, at("others") * host.allowed):
        return (
            "contention",
            f"all of {counted(host.allowed, 'core')} is busy, {max(others, 0):.1f} of them with others' work",
        )
    return (
        "cpu",
        f"{_busy(host):.1f} of {counted(host.allowed, 'core')} busy: there is none left for the loader",
    )


def _delayed(host: Host, features: Features) -> tuple[str, str]:
    crowded = above(host.others, at("others") * host.allowed)
    if crowded and above(host.rank_delay, max(at("delay"), host.delay)):  # it has its batch, and no core
        sign = f"the loop itself could run and got no core {percent(min(host.rank_delay, 1))} of the time"
        return "contention", f"{sign}; {host.others:.1f} cores are others'"
    if not above(host.delay, at("delay")):
        return "", ""
    sign = f"what makes batches could run and got no core {percent(min(host.delay, 1))} of the time"
    return ("contention" if crowded else "cpu"), f"{sign}; {max(host.others, 0):.1f} cores are others'"


def _storage(host: Host, features: Features) -> tuple[str, str]:
    blocked = ratio(host.workers_blocked, host.workers) if host.workers >= 0.5 else host.trainer_blocked
    idle = below(host.wait_busy, 0.5)
    waiting = above(host.iowait, at("iowait")) and not host.wait_busy > host.iowait
    ceiling = above(host.read_bytes_s, at("disk_full_s"))
    trickle = above(host.read_bytes_s, at("read_bytes_s")) and host.reading >= 0.5 and idle
    remote = above(host.remote_bytes_s, at("remote_bytes_s")) and idle
    if not (waiting or ceiling or trickle or remote or above(blocked, at("blocked"))):
        return "", ""
    said = f"{max(host.read_bytes_s, 0) / 1e6:.0f} MB/s read from disk, {host.iowait:.1f} cores in iowait"
    if known(blocked):
        said += f", what makes batches blocked {percent(min(blocked, 1))} of the time"
    often = above(host.read_bytes_s / host.read_bytes, at("small_reads_s"))
    if below(host.read_bytes, at("small_read")) and often:
        return "small_reads", f"{said}, {host.read_bytes / 1024:.0f} KiB a read"
    return "storage", said


def _computing(host: Host, features: Features) -> tuple[str, str]:
    if not above(host.wait_busy, at("wait_busy")):
        return "", ""
    workers = _workers_seen(host, features)
    sign = f"{host.wait_busy:.1f} cores busy while the loop waits, {host.allowed:g} allowed"
    # Workers that mostly sleep are not too few: one thing that all wait for computes.
    several = 1 <= workers <= 2 * host.wait_busy if known(workers) else host.wait_busy >= 1.7
    if several and host.allowed - _busy(host) >= 1.0:
        return "too_few_workers", sign
    return "cpu", sign


def _sleeping(host: Host, features: Features) -> tuple[str, str]:
    """Only run states tell a lock from what was not seen, and only if the loop waits often."""
    if features.loop.share["data"] < at("lock_share") * (1 - features.loop.share["startup"]):
        return "", ""
    if above(host.workers, 0.5) and below(ratio(host.workers_running, host.workers), 0.2):
        workers = counted(round(host.workers), "worker")
        return "lock", f"{workers} asleep, on neither disk nor CPU, while the loop waits"
    if host.workers < 0.5 and below(host.wait_busy, 0.3):
        return "lock", "the loop makes its batches itself and sleeps meanwhile, on neither disk nor CPU"
    return "", ""


# --- without a loader's wait ----------------------------------------------------------------------


def _by_the_card(features: Features) -> Finding | Abstention:
    """Nobody timed the loader: a card that works well and then not at all is most often starved."""
    card, loop = features.card, features.loop
    missing = ("the loader's wait: run it under stoker watch",)
    if card is None or not known(card.util):
        return Abstention(kind=KIND, why="neither the loader's wait nor the card was seen", missing=missing)
    idle = 1 - card.util / 100 - _told(loop)
    full_kernels = card.sm >= 0.5 * card.util if known(card.sm) else card.power >= 0.3
    if idle < 2 * at("data_share") or not full_kernels or card.util < at("idle_util"):
        return Abstention(
            kind=KIND, why="the card shows no idle time that a loader would explain", missing=missing
        )
    if features.host and above(features.host.write_bytes_s, at("saving_bytes_s")):
        return Abstention(
            kind=KIND, why="the disk is written to: saving may be what it waits for", missing=missing
        )
    cause, signs, unseen = find_cause(features)
    return priced(
        features,
        KIND,
        cause=cause,
        share=idle,
        confidence=0.5,
        summary=f"the GPU is idle {percent(idle)} of the time and works well in between: starved, it seems",
        evidence=(
            f"GPU utilisation {card.util:.0f}%, in {percent(card.idle_readings)} of the readings idle",
            *signs,
        ),
        remedy=remedies.feed(features, cause),
        missing=(*missing, *unseen),
    )


def _told(loop: Loop) -> float:
    """The share of time that other things than a loader explain."""
    if not loop.steps:
        return 0.0
    return min(sum(loop.share[name] for name in ("copy", "checkpoint", "startup")), 1.0)
