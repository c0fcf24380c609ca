"""The decoder against transformers in float32, and packed sequences against each other."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.require import require
from torch import Tensor
from transformers import PreTrainedModel

from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.models.hf import copy_weights, load_decoder, named_tensors

LENGTHS = (11, 1, 23, 6)


def random_sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def packed_logits(decoder: Decoder, sequences: list[Tensor]) -> list[Tensor]:
    return segment_logits(decoder, sequences, parents=[-1] * len(sequences))


def segment_logits(decoder: Decoder, segments: list[Tensor], parents: list[int]) -> list[Tensor]:
    """Logits of every segment; those of a child continue the positions of its parent."""
    lengths = [len(segment) for segment in segments]
    offsets = [0 if parent < 0 else lengths[parent] for parent in parents]
    positions = torch.cat([torch.arange(length) + offset for length, offset in zip(lengths, offsets, strict=True)])
    attention = PackedAttention(torch.tensor(lengths), torch.tensor(parents))
    hidden = decoder(torch.cat(segments), positions, attention)
    return list(decoder.logits(hidden).split(lengths))


def ours(reference: PreTrainedModel, folder: Path) -> Decoder:
    reference.save_pretrained(folder)
    return load_decoder(folder, torch.float32, torch.device("cpu"))


def test_logits_are_those_of_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    decoder = ours(reference, tmp_path)
    sequences = random_sequences()
    with torch.no_grad():
        logits = torch.cat(packed_logits(decoder, sequences))
        expected = torch.cat([reference(sequence[None]).logits[0] for sequence in sequences])
    assert 0.3 < expected.std() < 10
    assert (logits - expected).abs().max() <= 1e-5


def test_equal_lengths_give_the_logits_of_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    decoder = ours(reference, tmp_path)
    batch = torch.stack(random_sequences((13, 13, 13)))
    with torch.no_grad():
        logits = torch.stack(packed_logits(decoder, list(batch)))
        expected = reference(batch).logits
    assert (logits - expected).abs().max() <= 1e-5


def test_continuations_of_one_prompt_give_the_logits_of_transformers(
    reference: PreTrainedModel, tmp_path: Path
) -> None:
    """Two prompts, the first continued three times and the second once, with a sequence of its own between."""
    decoder = ours(reference, tmp_path)
    parents = [-1, 0, 0, -1, -1, 4, 0]
    segments = random_sequences((7, 5, 9, 11, 12, 3, 1))
    with torch.no_grad():
        logits = segment_logits(decoder, segments, parents)
        for segment, parent, rows in zip(segments, parents, logits, strict=True):
            whole = segment if parent < 0 else torch.cat((segments[parent], segment))
            expected = reference(whole[None]).logits[0, -len(segment) :]
            assert (rows - expected).abs().max() <= 1e-5


def test_gradients_are_those_of_transformers(reference: PreTrainedModel, tmp_path: Path) -> None:
    decoder = ours(reference, tmp_path)
    sequences = random_sequences()
    torch.cat(packed_logits(decoder, sequences)).logsumexp(-1).sum().backward()
    torch.stack([reference(sequence[None]).logits.logsumexp(-1).sum() for sequence in sequences]).sum().backward()
    expected = reference.get_parameter("model.embed_tokens.weight").grad
    assert require(expected).abs().max() > 0.1
    torch.testing.assert_close(decoder.embed_tokens.weight.grad, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["qwen3", "mistral-tied-window"])
def test_a_sequence_neither_sees_nor_moves_another(
    case: str, make_reference: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    decoder = ours(make_reference(case), tmp_path)
    sequences = random_sequences()

    def third_logits_and_gradients(sequences: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        decoder.zero_grad()
        logits = packed_logits(decoder, sequences)[2]
        logits.logsumexp(-1).sum().backward()
        return logits.detach(), [torch.clone(require(parameter.grad)) for parameter in decoder.parameters()]

    logits, gradients = third_logits_and_gradients(sequences)
    others = [sequence if index == 2 else (sequence + 1) % 97 for index, sequence in enumerate(sequences)]
    new_logits, new_gradients = third_logits_and_gradients(others)
    assert torch.equal(new_logits, logits)
    for new_gradient, gradient in zip(new_gradients, gradients, strict=True):
        assert torch.equal(new_gradient, gradient)
    changed = [*sequences[:2], (sequences[2] + 1) % 97, sequences[3]]
    assert not torch.allclose(third_logits_and_gradients(changed)[0], logits, atol=0.1)


def test_a_token_sees_as_far_back_as_the_window(
    make_reference: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    """Through three layers of a window of 5, token 14 sees token 2 (three times 4 back) and not token 1."""
    decoder = ours(make_reference("mistral-tied-window"), tmp_path)
    (sequence,) = random_sequences((15,))
    with torch.no_grad():
        last = packed_logits(decoder, [sequence])[0][-1]
        for position, is_seen in ((1, False), (2, True)):
            changed = sequence.clone()
            changed[position] = (changed[position] + 1) % 97
            assert torch.equal(packed_logits(decoder, [changed])[0][-1], last) is not is_seen


def test_rotary_angles_stay_float32_in_a_bfloat16_model(
    make_reference: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    make_reference("llama").save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu"))
    cos, _ = decoder.rotary(torch.tensor([0, 201]), torch.bfloat16)
    # The first pair turns by one radian a position; bfloat16 positions would make 201 a 200 or a 202.
    assert cos.dtype == torch.bfloat16
    assert cos[1, 0, 0].item() == pytest.approx(torch.cos(torch.tensor(201.0)).item(), abs=4e-3)


@pytest.mark.parametrize("case", ["qwen2", "llama"])
def test_packed_weights_give_the_same_logits_and_follow_changes(
    case: str, make_reference: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    make_reference(case).save_pretrained(tmp_path)
    plain = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu"))
    packed = load_decoder(tmp_path, torch.bfloat16, torch.device("cpu"))
    packed.pack()
    assert packed.is_packed == torch.ops.mkldnn._is_mkldnn_bf16_supported()  # elsewhere it stays as it was
    sequences = random_sequences()
    with torch.no_grad():
        expected = torch.empty(0)
        for _ in range(2):
            expected = torch.cat(packed_logits(plain, sequences)).float()
            logits = torch.cat(packed_logits(packed, sequences)).float()
            assert (logits - expected).abs().max() <= 0.03 * expected.abs().max()
            changed = {name: tensor.flip(0) * 1.5 for name, tensor in named_tensors(plain).items()}
            for decoder in (plain, packed):
                copy_weights(decoder, changed)
        assert (torch.cat(packed_logits(plain, sequences)) - expected).abs().max() > 0.3 * expected.abs().max()


def test_float32_weights_are_not_packed(make_reference: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    """A packed product is no faster there, and slower for small models."""
    decoder = ours(make_reference("llama"), tmp_path)
    decoder.pack()
    assert not decoder.is_packed
