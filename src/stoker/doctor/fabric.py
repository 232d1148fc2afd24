"""RDMA and network checks: InfiniBand and RoCE ports, their speed, errors, addresses and MTU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stoker.doctor.check import Check, Seen, about, cards, fail, known, ok, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Nic, Port, Snapshot

# A cable that is plugged in, and a fabric that is brought up, count some of each.
_TOLERATED = {"link_downed": 5, "link_error_recovery": 5, "symbol_error": 1000}
_TOLERATED_ELSE = 100
_ROCE_MTU = 4200  # a frame that carries the 4,096 bytes which RDMA sends at once, and its headers
_V2 = "RoCE v2"


def ports_up(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    ports = rdma_ports(snapshot)
    if not ports:
        return
    told = {nic.name: f"{nic.name} {_state(port)}" for nic, port in ports if known(port.state) != "ACTIVE"}
    active = len(ports) - len(told)
    if not told:
        yield ok(f"{counted(active, 'port')} active")
        return
    tell = fail if not active and need.memlock_bytes else warn  # a job that talks over them has none
    first = next(iter(told))
    yield tell(
        f"{active} of {len(ports)} active; {', '.join(told.values())}",
        f"ibstat {first.partition(':')[0]}  # INIT: no subnet manager; DOWN: cable or switch port",
    )


def speed(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    active = [(nic, port) for nic, port in rdma_ports(snapshot) if port.state == "ACTIVE"]
    rates = {nic.name: nic.speed_bytes_s for nic, _ in active if isinstance(nic.speed_bytes_s, int)}
    if not rates:
        return
    best = max(rates.values())
    slow = [f"{name} {_gbit(rate)}" for name, rate in rates.items() if rate < best]
    narrow = [f"{nic.name} {port.lanes} lane" for nic, port in active if port.lanes == 1]
    if slow or narrow:
        yield warn(
            f"{', '.join([*slow, *narrow])}; the best port has {_gbit(best)}",
            f"mlxlink -d {(slow or narrow)[0].split()[0].partition(':')[0]} -m  # cable, module, switch port",
        )
    else:
        yield ok(f"{counted(len(rates), 'active port')} at {_gbit(best)}")


def errors(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    ports = rdma_ports(snapshot)
    if not ports:
        return
    many, few = [], 0
    for nic, port in ports:
        for name, count in known(port.faults).items():
            few += 1
            if count > _TOLERATED.get(name, _TOLERATED_ELSE):
                many.append(f"{nic.name} {name} {count:,}")
    if many:
        device = many[0].split()[0].partition(":")[0]
        yield warn(
            ", ".join(many),
            f"mlxlink -d {device} -c -e  # a cable or module that fails; perfquery -R counts from 0 again",
        )
    else:
        yield ok("no errors" if not few else f"{counted(few, 'counter')} above 0, as start-up leaves them")


def addresses(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """NCCL takes the address at NCCL_IB_GID_INDEX; from 2.21 on it finds one where that is unset."""
    ports = rdma_ports(snapshot)
    roce = [(nic, port) for nic, port in ports if port.layer == "Ethernet" and port.state == "ACTIVE"]
    if not roce:
        return
    kinds = {nic.name: known(port.gids) for nic, port in roce}
    bare = [name for name, gids in kinds.items() if not any(_V2 in kind for kind in gids.values())]
    if bare:
        yield warn(f"{', '.join(bare)}: no {_V2} address", "ip -br addr  # its interface wants an IP address")
        return
    good = [index for index in next(iter(kinds.values())) if _fits_all(index, kinds)]
    chosen = snapshot.environ.get("NCCL_IB_GID_INDEX", "")
    if chosen in ("", "-1") or chosen in good:
        yield ok(
            f"{_V2} at index {', '.join(good) or 'of each its own'}; NCCL_IB_GID_INDEX {chosen or 'unset'}"
        )
        return
    best = next((index for index in good if "IPv4" in next(iter(kinds.values()))[index]), (*good, "")[0])
    what = next(iter(kinds.values())).get(chosen)
    tell = fail if what is None else warn
    yield tell(
        f"NCCL_IB_GID_INDEX={chosen} is {what or 'no address'}",
        f"export NCCL_IB_GID_INDEX={best}" if best else "unset NCCL_IB_GID_INDEX",
    )


def frames(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """The interfaces below RoCE ports: InfiniBand has an MTU of its own."""
    under = {port.netdev for _, port in rdma_ports(snapshot) if port.layer == "Ethernet" and port.netdev}
    if not under:
        return
    read = {nic.name: known(nic.mtu) for nic in known(snapshot.nics) if nic.name in under}
    small = [name for name, mtu in read.items() if mtu < _ROCE_MTU]
    if small:
        yield warn(
            f"MTU {', '.join(f'{name} {read[name]}' for name in small)} under RoCE",
            *(f"ip link set dev {name} mtu 9000  # the switch must let such frames pass" for name in small),
        )
    elif read:
        yield ok(f"MTU {', '.join(f'{name} {mtu}' for name, mtu in read.items())}")


def rdma_ports(snapshot: Snapshot) -> list[tuple[Nic, Port]]:
    """The RDMA ports; none on a machine without cards, which nobody trains on."""
    if not cards(snapshot) or isinstance(snapshot.nics, Unknown):
        return []
    found = [(nic, known(nic.port)) for nic in snapshot.nics if nic.rdma]
    return [(nic, port) for nic, port in found if port is not None]


def _fits_all(index: str, kinds: Mapping[str, Mapping[str, str]]) -> bool:
    return all(_V2 in gids.get(index, "") for gids in kinds.values())


def _state(port: Port) -> str:
    return f"{known(port.state)} ({port.physical})" if isinstance(port.physical, str) else known(port.state)


def _gbit(rate: int) -> str:
    return f"{rate / 125_000_000:g} Gbit/s"


CHECKS = about(
    "network",
    Check(
        "RDMA ports",
        ports_up,
        "NCCL uses the ports that are active, and goes on without the others: one dead port of eight is an "
        "eighth of the fabric, told nowhere.",
    ),
    Check(
        "RDMA speed",
        speed,
        "A ring is as fast as its slowest port; a bad cable comes up at half speed, or on one lane of four.",
    ),
    Check(
        "RDMA errors",
        errors,
        "A link that has to repeat and recover stalls collectives for milliseconds to seconds, before it is "
        "down for good.",
    ),
    Check(
        "RoCE addresses",
        addresses,
        "With the index of another kind of address packets are not routed: NCCL hangs, or ends in error 12.",
    ),
    Check(
        "MTU",
        frames,
        "At 1,500 bytes RDMA sends 1,024 at once, and takes four times the packets.",
    ),
)
