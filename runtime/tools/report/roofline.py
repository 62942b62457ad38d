"""The roofline of a kernel: FLOPs of a step over the bytes that it loads, and measurements below both roofs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from codegen.arch import ARCHS
from codegen.devices import DEVICES
from codegen.plan import Plan
from runtime.tools.report.measurements import Row, current
from runtime.tools.report.svg import WIDTH, Drawing, number

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 260, 46, 18, 16, 34
LEAST_X, MOST_X = 1.0, 1024.0  # FLOP per byte


@dataclass(frozen=True)
class Roofline:
    """A drawn roofline.

    Attributes:
        picture: the drawing.
        caption: description of the drawing.
        share: the best measured figure relative to the roof, in words; "" without measurements.
    """

    picture: Markup
    caption: str
    share: str


def machine_of(device: str) -> str:
    """The architecture of a device; "" for an unknown device."""
    words = device.upper().replace("NVIDIA", "").strip()
    known = {name: arch for arch, names in DEVICES.items() for name in names}
    found = [name for name in known if f" {name.upper()} " in f" {words} "]
    return known[max(found, key=len)] if found else ""


def roofline(plan: Plan, rows: Sequence[Row]) -> Roofline | None:
    """The roofline of a plan; None for a plan without FLOPs."""
    if not plan.flops:
        return None
    measured = [row for row in current(rows) if row.unit == "TFLOPS" and row.ours and machine_of(row.device)]
    arch = machine_of(measured[0].device) if measured else plan.arch.name
    measured = [row for row in measured if machine_of(row.device) == arch]
    machine = ARCHS[arch].machine
    peak, bandwidth = machine.flops * machine.sms / 1e6, machine.bytes * machine.sms / 1e6  # TFLOPS, TB/s
    intensity = plan.flops / plan.bytes
    roof = min(peak, bandwidth * intensity)
    drawing = Drawing(f"Roofline: {intensity:.0f} FLOP per byte, below a roof of {roof:.0f} TFLOPS")
    scale = _Scale(peak * 1.6, min([bandwidth * LEAST_X, *_figures(measured)]) / 1.6)
    _axes(drawing, scale)
    ridge = peak / bandwidth
    drawing.path(
        f"M{scale.x(LEAST_X)} {scale.y(bandwidth * LEAST_X)}L{scale.x(ridge)} {scale.y(peak)}H{scale.x(MOST_X)}", "roof"
    )
    x = float(scale.x(min(max(intensity, LEAST_X), MOST_X)))
    drawing.line(x, float(scale.y(roof)), x, HEIGHT - BOTTOM, "dash")
    for row in measured:
        for figure, kind in (("back_to_back", "dot hollow"), ("single", "dot")):
            value = getattr(row.ours, figure)
            if value:
                what = f"{row.name} {row.data}".strip()
                drawing.circle(
                    x, float(scale.y(value)), 3.5, kind, f"{what}: {value:g} TFLOPS, {figure.replace('_', ' ')}"
                )
    devices = ", ".join(DEVICES[arch])
    caption = (
        f"A step is {plan.flops / 1e6:.2f} MFLOP on {plan.bytes / 1024:.1f} KB: {intensity:.0f} FLOP per byte. "
        f"The roofs are sustained rates of {arch} ({devices}) in codegen.select, so rows may lie slightly above: "
        f"{peak:.0f} TFLOPS of the tensor cores, {bandwidth:.1f} TB/s from the L2."
    )
    best = max(_figures(measured), default=0.0)
    share = f"The fastest row has {best:.0f} TFLOPS, {100 * best / roof:.0f}% of the roof above it." if measured else ""
    return Roofline(drawing.picture(HEIGHT), caption, share)


def _figures(rows: Sequence[Row]) -> list[float]:
    return [value for row in rows if row.ours for value in (row.ours.single, row.ours.back_to_back) if value]


@dataclass(frozen=True)
class _Scale:
    """Logarithms on both axes.

    Attributes:
        most: TFLOPS at the upper edge.
        least: TFLOPS at the lower edge.
    """

    most: float
    least: float

    def x(self, intensity: float) -> str:
        share = math.log(intensity / LEAST_X) / math.log(MOST_X / LEAST_X)
        return number(LEFT + share * (WIDTH - LEFT - RIGHT))

    def y(self, tflops: float) -> str:
        share = math.log(tflops / self.least) / math.log(self.most / self.least)
        return number(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP))


def _axes(drawing: Drawing, scale: _Scale) -> None:
    drawing.path(f"M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}", "axis")
    for power in range(0, 11, 2):
        x = float(scale.x(2.0**power))
        drawing.line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 4, "axis")
        drawing.text(x, HEIGHT - BOTTOM + 16, str(2**power), "small", "middle")
    drawing.text(WIDTH - RIGHT, HEIGHT - 4, "FLOP per byte loaded", "small", "end")
    for tflops in (0.1, 1, 10, 100, 1000):
        if scale.least < tflops < scale.most:
            y = float(scale.y(tflops))
            drawing.line(LEFT, y, WIDTH - RIGHT, y, "grid")
            drawing.text(LEFT - 6, y + 4, f"{tflops:g}", "small", "end")
    drawing.text(0, 10, "TFLOPS", "small")
