"""Learning curves of one run or several as an SVG: held-out reward in full, training reward pale behind it.

python benchmarks/curve_plot.py outputs/sentences --title "Sentences in order" --output docs/curves/sentences.svg
python benchmarks/curve_plot.py outputs/shared outputs/colocated --output both.svg
"""

import argparse
import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tandem.utils.files import read_json_lines

Point = tuple[float, float]

WIDTH, HEIGHT, MARGIN = 440, 240, 44
COLOURS = ("#36c", "#d33", "#2a8", "#c80", "#83c", "#555")
MAX_TICKS = 7


@dataclass(frozen=True)
class Curve:
    name: str
    training: list[Point]  # step and mean reward
    held_out: list[Point]
    seconds: float  # from the first evaluation to the last


def read_curve(run: Path, name: str) -> Curve:
    lines = [line for line in read_json_lines(run / "metrics.jsonl") if line.get("process") == "orchestrator"]
    evaluations = {line["step"]: line for line in lines if "eval/reward" in line}
    if not evaluations:
        raise SystemExit(f"{run}/metrics.jsonl has no evaluation")
    times = [line["time"] for line in evaluations.values()]
    return Curve(
        name,
        sorted({line["step"]: line["reward/mean"] for line in lines if "reward/mean" in line}.items()),
        sorted((step, line["eval/reward"]) for step, line in evaluations.items()),
        max(times) - min(times),
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from one at or below `low` to one at or above `high`."""
    high = high if high > low else low + 1
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(step * times for times in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * times) <= MAX_TICKS - 1)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


class Axes:
    """Places points of the curves in the picture."""

    def __init__(self, curves: list[Curve]) -> None:
        points = [point for curve in curves for point in (*curve.training, *curve.held_out)]
        self.last_step = max(x for x, _ in points)
        self.x_ticks = [tick for tick in ticks(0, self.last_step) if tick <= self.last_step and tick == int(tick)]
        self.y_ticks = ticks(min(y for _, y in points), max(y for _, y in points))

    def place(self, point: Point) -> Point:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        x = MARGIN + WIDTH * point[0] / max(self.last_step, 1)
        return x, MARGIN + HEIGHT * (1 - (point[1] - low) / (high - low))

    def draw(self, title: str) -> list[str]:
        bottom, middle = MARGIN + HEIGHT, MARGIN + WIDTH / 2
        digits = max(0, -math.floor(math.log10(self.y_ticks[1] - self.y_ticks[0]) + 1e-9))
        lines = [
            f'<rect x="{MARGIN}" y="{MARGIN}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
            f'<text x="{middle}" y="{MARGIN - 16}" text-anchor="middle" font-size="13">{escape(title)}</text>',
            f'<text x="{middle}" y="{bottom + 32}" text-anchor="middle">step</text>',
        ]
        for tick in self.x_ticks:
            x, _ = self.place((tick, self.y_ticks[0]))
            lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:.0f}</text>')
        for tick in self.y_ticks:
            _, y = self.place((self.x_ticks[0], tick))
            lines.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.{digits}f}</text>')
            lines.append(f'<line x1="{MARGIN}" x2="{MARGIN + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        return lines


def draw_curve(curve: Curve, colour: str, axes: Axes) -> list[str]:
    def line(points: list[Point], style: str) -> str:
        placed = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(axes.place, points))
        return f'<polyline points="{placed}" fill="none" stroke="{colour}" {style}/>'

    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in map(axes.place, curve.held_out)]
    return [line(curve.training, 'stroke-opacity="0.3"'), line(curve.held_out, 'stroke-width="2"'), *dots]


def draw(curves: list[Curve], title: str) -> str:
    axes = Axes(curves)
    lines = axes.draw(title)
    for number, (curve, colour) in enumerate(zip(curves, COLOURS, strict=False)):
        lines += draw_curve(curve, colour, axes)
        text = f"{curve.name}, {curve.seconds:.0f} s"
        place = f'x="{MARGIN + WIDTH - 8}" y="{MARGIN + HEIGHT - 10 - 16 * (len(curves) - 1 - number)}"'
        lines.append(f'<text {place} text-anchor="end" fill="{colour}">{escape(text)}</text>')
    size = f'width="{WIDTH + 2 * MARGIN}" height="{HEIGHT + 2 * MARGIN}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


def table(curves: list[Curve]) -> list[str]:
    """Held-out rewards in Markdown, for docs/log.md."""
    steps = sorted({int(step) for curve in curves for step, _ in curve.held_out})
    head = "| held-out reward at step | " + " | ".join(map(str, steps)) + " | seconds |"
    lines = [head, "|---" * (len(steps) + 2) + "|"]
    for curve in curves:
        rewards = dict(curve.held_out)
        cells = [f"{rewards[step]:.3f}" if step in rewards else "" for step in steps]
        lines.append(f"| {curve.name} | " + " | ".join(cells) + f" | {curve.seconds:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--title", default="reward by step")
    parser.add_argument("--output", type=Path, default=Path("curves.svg"))
    args = parser.parse_args()
    curves = [read_curve(run, run.name) for run in args.runs]
    args.output.write_text(draw(curves, args.title))
    print("\n".join(table(curves)))
    print(args.output)


if __name__ == "__main__":
    main()
