"""Before and after in goal space, as an SVG: where the held-out completions of the first and the last evaluation lie.

python examples/steering/plot.py outputs/steering_smollm2 length reading_difficulty --url http://127.0.0.1:8100
"""

import argparse
import asyncio
import json
from pathlib import Path

from tandem.rewards.goal_client import GoalClient, Vector
from tandem.rewards.servers import Servers
from tandem.utils.files import read_json_lines

SIZE, MARGIN = 320, 40


async def place(url: str, goals: list[str], texts: list[str]) -> list[Vector]:
    client = GoalClient(Servers([url]), goals, chunk_size=64, cache_size=10_000)
    try:
        return await client.place_all(texts)
    finally:
        await client.close()


def evaluations(run: Path) -> list[Path]:
    """The first and the last."""
    found = sorted((run / "samples").glob("eval_step_*.jsonl"))
    if len(found) < 2:
        raise SystemExit(f"{run}/samples has {len(found)} evaluations; two are needed")
    return [found[0], found[-1]]


def targets_of(samples: list[dict], goals: list[str]) -> list[Vector]:
    """Those that the tasks have in their answers; none where they have others."""
    try:
        targets = [json.loads(sample["answer"]) for sample in samples]
        return [tuple(float(target[goal]) for goal in goals) for target in targets]
    except (ValueError, KeyError, TypeError):
        return []


def panel(title: str, left: int, goals: list[str], reached: list[Vector], targets: list[Vector]) -> str:
    def dot(vector: Vector, colour: str, radius: float) -> str:
        x, y = left + MARGIN + vector[0] * SIZE, MARGIN + (1 - vector[1]) * SIZE
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" fill-opacity="0.6"/>'

    marks = [dot(target, "#d33", 2.5) for target in targets] + [dot(vector, "#36c", 3.5) for vector in reached]
    middle, bottom = left + MARGIN + SIZE / 2, MARGIN + SIZE
    return "\n".join(
        [
            f'<rect x="{left + MARGIN}" y="{MARGIN}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#999"/>',
            f'<text x="{middle}" y="{MARGIN - 14}" text-anchor="middle">{title}</text>',
            f'<text x="{middle}" y="{bottom + 24}" text-anchor="middle">{goals[0]}</text>',
            f'<text transform="translate({left + MARGIN - 14},{MARGIN + SIZE / 2}) rotate(-90)" '
            f'text-anchor="middle">{goals[1]}</text>',
            *marks,
        ]
    )


def main(run: Path, goals: list[str], url: str) -> Path:
    panels = []
    for number, (name, path) in enumerate(zip(("before", "after"), evaluations(run), strict=True)):
        samples = list(read_json_lines(path))
        reached = asyncio.run(place(url, goals, [sample["completion"] for sample in samples]))
        panels.append(panel(name, number * (SIZE + 2 * MARGIN), goals, reached, targets_of(samples, goals)))
    width, height = 2 * (SIZE + 2 * MARGIN), SIZE + 2 * MARGIN
    target = run / "goal_space.svg"
    content = "\n".join(panels)
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n{content}\n</svg>\n'
    )
    print(target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Before and after in goal space.")
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("goals", nargs=2, help="the goals of the two axes")
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="address of the goal-space server")
    arguments = parser.parse_args()
    main(arguments.run, arguments.goals, arguments.url)
