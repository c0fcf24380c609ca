"""Random number generators, taken to JSON and back."""

import json

import pytest
import torch

from tandem.trainer.checkpoints.random_state import capture_random_state, restore_random_state

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Generators:
    """Of GPUs, as torch keeps them."""

    def __init__(self) -> None:
        self.states = {GPU: torch.tensor([1, 2, 255], dtype=torch.uint8)}

    def get(self, device: torch.device) -> torch.Tensor:
        return self.states[device]

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device] = state


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    generators = Generators()
    monkeypatch.setattr(torch.cuda, "get_rng_state", generators.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", generators.set)
    return generators


def test_the_state_of_a_gpu_goes_with_the_others(generators: Generators) -> None:
    state = json.loads(json.dumps(capture_random_state(GPU)))
    expected = generators.states.pop(GPU)
    restore_random_state(state, GPU)
    assert torch.equal(generators.states[GPU], expected)


@pytest.mark.parametrize(("saved_on", "restored_on"), [(CPU, GPU), (GPU, CPU), (CPU, CPU)])
def test_on_another_kind_of_device_its_generator_stays_as_it_is(
    generators: Generators, saved_on: torch.device, restored_on: torch.device
) -> None:
    state = json.loads(json.dumps(capture_random_state(saved_on)))
    expected = torch.rand(3)
    before = generators.states.copy()
    restore_random_state(state, restored_on)
    assert generators.states == before
    assert torch.equal(torch.rand(3), expected)
