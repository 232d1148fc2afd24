"""Copy benchmark: host and card, pageable and pinned, by size and direction, by NUMA node; card to card.

What the link could give comes from its generation and width, or from the table of cards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.bench.card.asking import Said, ask, check_device
from stoker.bench.figures import Bench, Figure, say_seconds
from stoker.errors import UsageError
from stoker.formats.sizes import counted, say_binary, say_size
from stoker.gpus import peaks_of
from stoker.machine.allowed import free_bytes
from stoker.machine.cards import read_cards
from stoker.machine.files import Files
from stoker.machine.host import read_cpu
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Gpu, PcieLink

TO, FROM, BOTH = "host to card", "card to host", "both at once"  # as copying.py writes them
USUAL_SIZES = (4 << 10, 64 << 10, 1 << 20, 32 << 20, 256 << 20)
ROOM = 256 << 20  # of a buffer, so that blocks do not come out of a processor's cache
_LARGE = 0.9  # of the best: a copy is long enough for its start not to count
_WORTH = 1.1  # times as fast: worth a word
_LANES = {1: 0.2, 2: 0.4, 3: 0.78, 4: 1.56, 5: 3.44, 6: 6.9}  # GB/s that a copy gets of a lane, by generation


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """Copies of one size, one way, from or to one kind of memory."""

    way: str
    pinned: bool
    bytes: int
    bytes_s: float
    each_s: float  # a copy among others
    alone_s: float  # one that is waited for
    cpu_s: float = 0.0
    card: int = 0
    node: int | None = None  # NUMA node of the memory, where there are several

    @property
    def kind(self) -> str:
        return "pinned" if self.pinned else "pageable"


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A card's way to the host."""

    name: str = ""
    words: str = ""  # PCIe 5 × 16
    bytes_s: float = 0.0  # what it gives at best; 0 where nobody knows
    node: int | None = None  # that it hangs at


def bench_copy(
    *,
    device: str = "cuda",
    sizes: Sequence[int] = USUAL_SIZES,
    seconds: float = 0.1,
    room: int = ROOM,
    said: Said = lambda name, done, of: None,
) -> Bench:
    """Measure with a process for each NUMA node, one after another."""
    sizes = sorted(set(sizes))
    check_device(device)
    _check(sizes, room)
    nodes = _nodes()
    copies, peers, cards = list[Copied](), list[dict[str, Any]](), list[dict[str, Any]]()
    for number, (node, cores) in enumerate(nodes):
        job = {
            "device": device,
            "sizes": sizes,
            "seconds": seconds,
            "room": room,
            "cores": cores,
            "peers": number == 0,
        }
        answer = ask("copying", job, seconds=600.0, said=said)
        copies += [Copied(node=node, **one) for one in answer["copies"]]
        peers, cards = peers or answer["peers"], answer["cards"]
    return report(copies, peers, links=[_link(card) for card in cards])


def report(copies: Sequence[Copied], peers: Sequence[Mapping[str, Any]], *, links: Sequence[Link]) -> Bench:
    figures = [_figure(one, copies, links) for one in copies]
    figures += [_peer(one) for one in peers]
    from_card = [one for one in copies if one.way == FROM and one.pinned]
    rate = max((one.bytes_s for one in from_card), default=0.0)
    names = dict.fromkeys(link.name for link in links if link.name)
    words = dict.fromkeys(link.words for link in links if link.words)
    of = ", ".join([*(names or ["memory to memory"]), *words])
    notes = [] if any(one.pinned for one in copies) else ["pinned memory: there is no card"]
    if len(links) == 1 and links[0].name:
        notes.append("card to card: there is one card")
    return Bench(
        verb="copy",
        of=f"{counted(len(links), 'card')}: {of}" if len(links) > 1 else of,
        figures=figures,
        advice=_advice(copies, links),
        measured={"snapshot_rate": rate} if rate else {},
        notes=notes,
    )


def link_of(name: str, card: Gpu | None) -> Link:
    """What a card's link gives: by its lanes as they are, or by the model."""
    known = peaks_of(name)
    usual = known.pcie_gb_s * 1e9 if known else 0.0
    pcie = card.pcie if card else None
    node = card.numa_node if card and isinstance(card.numa_node, int) else None
    gen, width = (pcie.gen, pcie.width) if isinstance(pcie, PcieLink) else (None, None)
    if isinstance(pcie, PcieLink) and isinstance(pcie.gen_max, int):
        gen = pcie.gen_max  # an idle card steps down, and up again for a copy
    if card and not isinstance(gen, int):
        gen, width = card.pcie_gen_max, card.pcie_width
    if isinstance(gen, int) and isinstance(width, int) and gen in _LANES:
        words = f"PCIe {gen} × {width}"
        return Link(name=name, words=words, bytes_s=_LANES[gen] * width * 1e9, node=node)
    return Link(name=name, bytes_s=usual, node=node)


def _link(card: Mapping[str, Any]) -> Link:
    if not card["name"]:
        return Link()
    found, _ = read_cards(Files(), os.environ)
    known = () if isinstance(found, Unknown) else found
    same = [one for one in known if one.bus == card["bus"]] or list(known if len(known) == 1 else ())
    return link_of(card["name"], same[0] if same else None)


def _nodes() -> list[tuple[int | None, list[int]]]:
    """NUMA nodes and those of their cores that we may use; one without a name where there is but one."""
    cpu = read_cpu(Files())
    if isinstance(cpu.numa_nodes, Unknown) or isinstance(cpu.usable, Unknown):
        return [(None, [])]
    ours = set(cpu.usable)
    found = [(node, sorted(ours & set(cores))) for node, cores in enumerate(cpu.numa_nodes)]
    found = [(node, cores) for node, cores in found if cores]
    return list(found) if len(found) > 1 else [(None, [])]


def _check(sizes: Sequence[int], room: int) -> None:
    if not sizes or sizes[0] < 1:
        raise UsageError("copies of no bytes cannot be", hint="--sizes 4KiB,1MiB,256MiB")
    wanted, free = 4 * max(room, sizes[-1]), free_bytes()
    if wanted > free // 2:
        raise UsageError(
            f"copies of {say_binary(sizes[-1])} need buffers of {say_size(wanted)}, "
            f"and {say_size(free)} are free",
            hint="give smaller --sizes",
        )


def _figure(one: Copied, copies: Sequence[Copied], links: Sequence[Link]) -> Figure:
    link = links[one.card]
    known = link.bytes_s * (2 if one.way == BOTH else 1)
    share = {"of_the_link_share": one.bytes_s / known} if known else {}
    return Figure(
        name=_name(one, len(links)),
        value=one.bytes_s,
        unit="B/s",
        limit=_limit(one, copies, link),
        beside={"each_s": one.each_s, "alone_s": one.alone_s, **share},
    )


def _name(one: Copied, cards: int) -> str:
    words = [f"{one.way}, {one.kind} {say_binary(one.bytes)}"]
    words += [f"card {one.card}"] if cards > 1 else []
    words += [f"node {one.node}"] if one.node is not None else []
    return ", ".join(words)


def _limit(one: Copied, copies: Sequence[Copied], link: Link) -> str:
    """Its start, where larger ones are faster; the driver's copy, where pinned ones are; else the link."""
    larger = [
        other.bytes_s for other in copies if _differ(one, other) == ["bytes"] and other.bytes > one.bytes
    ]
    if larger and one.bytes_s < _LARGE * max(larger):
        return "the start of each copy"
    if not link.name:
        return "memory and the processor"
    pinned = [other.bytes_s for other in copies if not one.pinned and _differ(one, other) == ["pinned"]]
    if pinned and max(pinned) > _WORTH * one.bytes_s:
        return "the driver's own copy into pinned memory"
    near = [other.bytes_s for other in copies if _differ(one, other) == ["node"] and other.node == link.node]
    if near and max(near) > _WORTH * one.bytes_s:
        return f"the way between NUMA nodes: the card hangs at {link.node}"
    if one.way == BOTH:
        return "the link, or the memory's reads and writes together"
    return f"the link, {link.words}" if link.words else "the link"


def _differ(one: Copied, other: Copied) -> list[str]:
    """In which of what was set two copies differ."""
    names = ("card", "node", "way", "pinned", "bytes")
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _peer(one: Mapping[str, Any]) -> Figure:
    return Figure(
        name=f"card {one['card']} to card {one['other']}, {say_binary(one['bytes'])}",
        value=one["bytes_s"],
        unit="B/s",
        limit="the link between them"
        if one["direct"]
        else "through the host: the cards do not reach each other",
        beside={"alone_s": one["alone_s"]},
    )


def _advice(copies: Sequence[Copied], links: Sequence[Link]) -> list[str]:
    said = []
    for card, link in enumerate(links):
        mine = [one for one in copies if one.card == card and one.way == TO]
        pinned = sorted((one for one in mine if one.pinned), key=lambda one: one.bytes)
        if not pinned:
            continue
        best = max(pinned, key=lambda one: one.bytes_s)
        pageable = replace(best, pinned=False)
        same = [one.bytes_s for one in mine if not _differ(one, pageable)]
        where = f" to card {card}" if len(links) > 1 else ""
        if same and best.bytes_s > _WORTH * same[0]:
            said.append(
                f"pinned copies{where} are {best.bytes_s / same[0]:.1f} times as fast as pageable ones: "
                "pin_memory=True, with non_blocking=True"
            )
        small = [one for one in pinned if one.bytes_s >= best.bytes_s / 2]
        if small[0].bytes > pinned[0].bytes:
            said.append(
                f"half of the best is reached at {say_binary(small[0].bytes)}: a copy that is waited for "
                f"takes {say_seconds(pinned[0].alone_s)} whatever its size, so bundle smaller ones"
            )
        if link.bytes_s and best.bytes_s < 0.8 * link.bytes_s:
            said.append(
                f"the best{where} is {best.bytes_s / link.bytes_s:.0%} of what its link gives "
                f"({say_size(link.bytes_s)}/s): `stoker doctor` looks at its lanes, NUMA node and IOMMU"
            )
        said += _nearest(pinned, best, where)
    return said


def _nearest(pinned: Sequence[Copied], best: Copied, where: str) -> list[str]:
    others = [one for one in pinned if _differ(best, one) == ["node"]]
    worst = min((one.bytes_s for one in others), default=best.bytes_s)
    if best.bytes_s <= _WORTH * worst:
        return []
    return [
        f"memory of NUMA node {best.node} is nearest{where}: {say_size(best.bytes_s)}/s, elsewhere down to "
        f"{say_size(worst)}/s: numactl --cpunodebind={best.node} --membind={best.node}"
    ]
