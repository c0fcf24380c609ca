"""Every shipped algorithm learns: a policy that is a table, two tokens of four, one sequence that is right.

Options are those of examples/reverse_text/algorithms; updates, streams and advantages are as in a run.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.algorithms.losses.ppo import critic_loss, gae, moment_sums, token_rewards, whiten
from tandem.commands.rl import RLConfig
from tandem.config.base import load_config
from tandem.orchestrator.advantages import make_advantage_function
from tandem.trainer.losses import PolicyStreams, loss_denominator, make_policy_loss, needs_reference, token_weights

REVERSE_TEXT = Path(__file__).parents[4] / "examples" / "reverse_text"
NUM_SEQUENCES, GROUP_SIZE = 64, 8
RIGHT = (2, 1)


class Table(torch.nn.Module):
    """Logits of the first token, and of the second for each first; a value beside each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4, 4))
        self.first_value, self.second_value = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (sequences, 2) -> log-prob, entropy and value of each, end to end."""
        first = self.first.log_softmax(-1).expand(len(tokens), 4)
        second = self.second.log_softmax(-1)[tokens[:, 0]]
        distributions = torch.stack([first, second], dim=1)  # (sequences, 2, 4)
        logprobs = distributions.gather(-1, tokens[..., None]).squeeze(-1)
        values = torch.stack([self.first_value.expand(len(tokens)), self.second_value[tokens[:, 0]]], dim=1)
        entropy = -(distributions.exp() * distributions).sum(-1)
        return logprobs.flatten(), entropy.flatten(), values.flatten()

    @torch.no_grad()
    def sample(self, generator: torch.Generator, noise: float) -> tuple[Tensor, Tensor]:
        """By an engine whose logits are a little off: sequences, and the log-probs it reports."""
        engine = Table()
        for own, other in zip(engine.parameters(), self.parameters(), strict=True):
            own.copy_(other + noise * torch.randn(other.shape, generator=generator))
        first = torch.multinomial(engine.first.softmax(-1), NUM_SEQUENCES, replacement=True, generator=generator)
        second = torch.multinomial(engine.second.softmax(-1)[first], 1, generator=generator).squeeze(-1)
        tokens = torch.stack([first, second], dim=1)
        return tokens, engine(tokens)[0]

    @torch.no_grad()
    def chance_of_right(self) -> float:
        return float(self.first.softmax(-1)[RIGHT[0]] * self.second.softmax(-1)[RIGHT])


def rewards_of(tokens: Tensor) -> list[list[float]]:
    rewards = [1.0 if tuple(pair) == RIGHT else 0.2 if pair[0] == RIGHT[0] else 0.0 for pair in tokens.tolist()]
    return [rewards[start : start + GROUP_SIZE] for start in range(0, NUM_SEQUENCES, GROUP_SIZE)]


@pytest.mark.parametrize(
    "name",
    ["cispo", "dapo", "distillation", "dr_grpo", "gspo", "off_policy", "ppo", "reinforce_pp", "rloo", None],
)
def test_it_learns(name: str | None) -> None:
    files = [REVERSE_TEXT / "rl.toml", *([REVERSE_TEXT / "algorithms" / f"{name}.toml"] if name else [])]
    config = load_config(RLConfig, [part for path in files for part in ("@", str(path))])
    options = config.trainer.loss
    loss, advantage_of = make_policy_loss(options), make_advantage_function(config.orchestrator.advantage)
    generator = torch.Generator().manual_seed(0)
    policy, reference, teacher = Table(), Table(), Table()
    teacher.first.data[RIGHT[0]], teacher.second.data[RIGHT] = 5.0, 5.0
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    sequences = torch.arange(NUM_SEQUENCES).repeat_interleave(2)
    denominator = loss_denominator(options, 2 * NUM_SEQUENCES, NUM_SEQUENCES)
    weights = token_weights(options, sequences, NUM_SEQUENCES, torch.float32)
    before = policy.chance_of_right()

    for _ in range(120):
        tokens, sampled = policy.sample(generator, noise=0.3 if name == "off_policy" else 0.0)
        advantages = torch.tensor(advantage_of(rewards_of(tokens))).flatten()[sequences]
        with torch.no_grad():
            old, _, old_values = policy(tokens)
            known = reference(tokens)[0] if needs_reference(options) else None
            taught = teacher(tokens)[0]
        returns = old_values
        if options.type == "ppo":
            rewards = token_rewards(advantages, old, known, sequences, options.kl)
            advantages, returns = gae(rewards, old_values, sequences, options.ppo.gamma, options.ppo.lam)
            advantages = whiten(advantages, moment_sums(advantages))
        for _ in range(2):
            logprobs, entropy, values = policy(tokens)
            compared = old if options.old_logprobs == "recomputed" else sampled
            streams = PolicyStreams(
                logprobs, entropy, sampled, compared, advantages, sequences, NUM_SEQUENCES, known, taught
            )
            total = loss(streams).loss
            if options.type == "ppo":
                total = total + critic_loss(values, old_values, returns, weights, options.ppo).loss
            optimizer.zero_grad()
            (total / denominator).backward()
            optimizer.step()

    assert before == pytest.approx(1 / 16)
    assert policy.chance_of_right() > 0.85, policy.chance_of_right()
