"""Short texts to rewrite, each to a length and a reading difficulty drawn for it. The prompt tells both."""

import json

from tandem.rewards.steering import draw_target
from tandem.types.rollout import Task

# Where targets are drawn from, between 0 and 1 over the ranges in reward_server.toml.
TARGETS = {"length": (0.15, 0.9), "reading_difficulty": (0.1, 0.8)}
MAX_WORDS, MAX_GRADE = 120, 16
TEXTS = (
    "A lighthouse warns ships of rocks. Its lamp turns all night, and its horn sounds in fog.",
    "Bees make honey from nectar. They carry it to the hive and dry it with their wings.",
    "The moon has no light of its own. We see the sunlight that it sends back to us.",
    "Bread rises because yeast eats sugar and gives off gas. The gas makes small holes in the dough.",
    "A bridge must carry its own weight first. Engineers add the weight of traffic, wind and snow.",
    "Maps are flat and the earth is round. Every map therefore gets some sizes or some shapes wrong.",
    "Salt melts ice because salty water freezes at a lower temperature than fresh water does.",
    "Old books turn yellow. Acid in cheap paper reacts with air and light, and slowly eats the page.",
    "Whales breathe air. They close their nostrils when they dive and open them again at the surface.",
    "A clock with a pendulum runs slow in summer, because the warm rod is a little longer than before.",
    "Rivers carry sand to the sea. Where they slow down they drop it, and a delta grows.",
    "Cats can turn in the air. They bend in the middle and turn one half of the body after the other.",
    "Glass is made of sand, soda and lime. It is melted, shaped while it is hot, and cooled slowly.",
    "Trains tilt in curves so that passengers are pressed into their seats and not against the wall.",
    "Leaves are green because they use red and blue light and send the green light back.",
    "Snow is quiet. The air between its flakes takes up sound instead of sending it on.",
)


class Rewrites:
    def __init__(self, num_train: int = 512, num_eval: int = 64, seed: int = 0) -> None:
        tasks = [make_task(number, TEXTS[number % len(TEXTS)], seed) for number in range(num_train + num_eval)]
        self.eval_tasks, self.train_tasks = tasks[:num_eval], tasks[num_eval:]

    async def score(self, task: Task, completion: str) -> float:
        raise NotImplementedError("this environment has no reward of its own; give [[orchestrator.env.rewards]]")


def make_task(number: int, text: str, seed: int) -> Task:
    target = draw_target(TARGETS, str(number), seed)
    words, grade = round(MAX_WORDS * target["length"]), round(MAX_GRADE * target["reading_difficulty"])
    prompt = (
        f"Rewrite this text in about {words} words, for readers of grade {grade}. Write only the new text.\n\n{text}"
    )
    info = {"source": text, "target": target}
    # The answer is for the samples, where the plot finds the target.
    return Task(number, [{"role": "user", "content": prompt}], json.dumps(target), info)
