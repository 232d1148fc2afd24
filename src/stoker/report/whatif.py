"""Batch-size sweep results: what `--what-if batch` found, as text and as one page with a plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.formats.sizes import counted
from stoker.report.html import static_page
from stoker.report.page.markup import Html, join, tag
from stoker.report.units import amount, percent, seconds
from stoker.storage import new_file
from stoker.watch.runs.batches import Split, Timed
from stoker.watch.whatif import WhatIf

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 380, 70, 64, 44
_FIXED, _PROPORTIONAL = "communication, launches, optimizer", "compute, data"


def whatif_lines(found: WhatIf) -> list[str]:
    """What was found, or why nothing was."""
    failed = [f"batch {batch} failed with exit code {code}" for batch, code in sorted(found.failed.items())]
    if found.interrupted:
        return ["what if: interrupted before every batch size had its turn"]
    if found.split is None:
        return ["what if: fewer than two batch sizes had steps to measure", *_indented(failed)]
    return [
        f"what if: {found.flag} {found.given}, half and double of it",
        *_indented([*_size_lines(found.split), *failed, *_split_lines(found.split)]),
    ]


def write_whatif(found: WhatIf, path: Path) -> None:
    """Write the page; the file appears whole or not at all."""
    with new_file(path) as file:
        file.write(whatif_page(found).encode())


def whatif_page(found: WhatIf) -> str:
    title, *rest = whatif_lines(found)
    parts = {
        "head": join(tag("p", "stoker watch", class_="brand"), tag("h1", title)),
        "plot": plot(found.split) if found.split else Html(),
        "found": tag("ul", *(tag("li", line.strip()) for line in rest)) if rest else Html(),
    }
    return static_page(title, parts)


def plot(split: Split) -> Html:
    """Step time over batch size: the line, the sizes on it, and the two parts of a step below it."""
    right = split.sizes[-1].batch * 1.15
    highest = max(split.fixed_s + split.per_sample_s * right, *(size.step_s for size in split.sizes))
    axes = _Axes(right=right, top=1.1 * highest)
    said = ", ".join(f"batch {size.batch} {seconds(size.step_s)}" for size in split.sizes)
    return tag(
        "svg",
        tag("title", f"Step time by batch size: {said}"),
        *_parts(split, axes),
        *axes.drawn(),
        *(_size(size, axes, given=split.given) for size in split.sizes),
        *_legend(),
        class_="sweep",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        xmlns="http://www.w3.org/2000/svg",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axes:
    """Both begin at zero: only so the place where the line meets the left one is the fixed time."""

    right: float  # batch
    top: float  # seconds

    def x(self, batch: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 10) * batch / self.right, 1)

    def y(self, step_s: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - step_s / self.top), 1)

    def drawn(self) -> list[Html]:
        frame = f"M{self.x(0)} {self.y(self.top)}V{self.y(0)}H{self.x(self.right)}"
        return [
            tag("path", class_="axis", d=frame),
            tag("text", "0", x=_LEFT, y=self.y(0) + 18, text_anchor="middle"),
            tag("text", "step", x=_LEFT - 8, y=_TOP + 5, text_anchor="end"),
            tag("text", "batch size", x=self.x(self.right), y=_HEIGHT - 6, text_anchor="end"),
        ]


def _parts(split: Split, axes: _Axes) -> list[Html]:
    """The two areas and the line on top of them."""
    left, right = axes.x(0), axes.x(axes.right)
    fixed, end = axes.y(split.fixed_s), axes.y(split.fixed_s + split.per_sample_s * axes.right)
    return [
        tag("path", class_="fixed", d=f"M{left} {fixed}H{right}V{axes.y(0)}H{left}Z"),
        tag("path", class_="proportional", d=f"M{left} {fixed}L{right} {end}V{fixed}Z"),
        tag("path", class_="line", d=f"M{left} {fixed}L{right} {end}"),
        tag("text", seconds(split.fixed_s), x=left - 8, y=fixed + 5, text_anchor="end"),
    ]


def _size(size: Timed, axes: _Axes, *, given: int) -> Html:
    x, y = axes.x(size.batch), axes.y(size.step_s)
    return tag(
        "g",
        tag("circle", class_="given" if size.batch == given else "size", cx=x, cy=y, r=5),
        tag("text", str(size.batch), x=x, y=axes.y(0) + 18, text_anchor="middle"),
        tag("text", seconds(size.step_s), x=x, y=y - 12, text_anchor="middle"),
    )


def _legend() -> list[Html]:
    """Above the plot, where no line comes."""
    named = (("fixed", f"fixed: {_FIXED}"), ("proportional", f"proportional: {_PROPORTIONAL}"))
    return [
        tag(
            "g",
            tag("rect", class_=colour, x=_LEFT, y=20 * number, width=14, height=12),
            tag("text", name, x=_LEFT + 22, y=20 * number + 11),
        )
        for number, (colour, name) in enumerate(named)
    ]


def _size_lines(split: Split) -> list[str]:
    wide = len(str(split.sizes[-1].batch))
    return [
        f"batch {size.batch:>{wide}}: {seconds(size.step_s)} a step,"
        f" {amount(size.samples_per_s, 'samples/s')} ({counted(size.steps, 'step')} measured)"
        for size in split.sizes
    ]


def _split_lines(split: Split) -> list[str]:
    share = split.fixed_share
    lines = [
        f"a step is {seconds(split.fixed_s)} + {seconds(split.per_sample_s)} × batch:"
        f" {percent(share)} is fixed ({_FIXED}), {percent(1 - share)} proportional ({_PROPORTIONAL})",
        split.meaning,
    ]
    if split.doubling is not None:
        lines.append(f"twice the batch gave {split.doubling:.2f} times the samples a second")
    if split.residual is None:
        lines.append("two sizes only: nothing shows whether times lie on a line")
    else:
        lines.append(f"sizes lie {split.residual:.1%} of a step off the line")
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
