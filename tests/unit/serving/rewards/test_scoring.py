"""The reward server without a network: batches of scores, requests that wait together, what is refused."""

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient
from tokenizers import Tokenizer as FastTokenizer

from tandem.config.inference import ServerConfig
from tandem.data.tokenizer import Tokenizer
from tandem.models.reward_model import new_scorer, scorer_config
from tandem.serving.rewards.batcher import Batcher
from tandem.serving.rewards.scores import ScoreModel
from tandem.serving.rewards.scoring import create_app
from tandem.serving.rewards.server import guards_of
from tandem.weights.files import WeightsPublisher

CPU = torch.device("cpu")
SEQUENCES = [[1, 40, 41, 42, 2], [1, 50, 2], [1, 60, 61, 62, 63, 64, 2], [1, 2], [1, 70, 71, 2]]


def test_scores_do_not_depend_on_what_is_scored_beside_them(tiny_model: Path) -> None:
    scorer = new_scorer(tiny_model, torch.float32, CPU, seed=0)
    alone = [ScoreModel(scorer, CPU, 1000).scores([sequence])[0] for sequence in SEQUENCES]
    assert len({round(score, 6) for score in alone}) == len(SEQUENCES)
    for bound in (1, 8, 12, 1000):
        assert ScoreModel(scorer, CPU, bound).scores(SEQUENCES) == pytest.approx(alone, abs=1e-6)
    assert ScoreModel(scorer, CPU, 8).scores([]) == []


def test_scores_are_those_of_transformers_where_the_end_is_padding_too(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    base = shutil.copytree(tiny_model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text()) | {"pad_token_id": None, "eos_token_id": 2}
    (base / "config.json").write_text(json.dumps(config))
    scorer = new_scorer(base, torch.float32, CPU, seed=0)
    publisher = WeightsPublisher(tmp_path, base, "float32", keep=1, config=scorer_config(base))
    theirs = AutoModelForSequenceClassification.from_pretrained(publisher.publish(scorer.named_tensors(), version=1))
    assert theirs.config.pad_token_id == 2
    width = max(map(len, SEQUENCES))
    with torch.no_grad():
        logits = theirs(torch.tensor([each + [2] * (width - len(each)) for each in SEQUENCES])).logits.squeeze(-1)
    assert ScoreModel(scorer, CPU, 1000).scores(SEQUENCES) == pytest.approx(logits.tolist(), abs=1e-5)


def test_requests_that_wait_together_are_scored_together() -> None:
    """While the first one is scored, three more arrive: two passes in all, and everybody gets their own."""
    passes: list[int] = []
    may_go_on = threading.Event()

    def score_all(sequences: list) -> list[float]:
        passes.append(len(sequences))
        may_go_on.wait(10)
        return [float(sequence[0]) for sequence in sequences]

    async def ask() -> list[list[float]]:
        batcher = Batcher(score_all)
        worker = asyncio.create_task(batcher.run())
        first = asyncio.create_task(batcher.score([[1]]))
        while not passes:
            await asyncio.sleep(0.001)
        asked: list[list[Sequence[int]]] = [[[2], [3]], [[4]], [[5], [6], [7]]]
        later = [asyncio.create_task(batcher.score(each)) for each in asked]
        await asyncio.sleep(0.01)
        later[1].cancel()  # a client that goes away
        await asyncio.sleep(0)
        may_go_on.set()
        answers = [await first, await later[0], await later[2]]
        worker.cancel()
        return answers

    assert asyncio.run(ask()) == [[1.0], [2.0, 3.0], [5.0, 6.0, 7.0]]
    assert passes == [1, 5]


def test_a_failure_reaches_those_who_asked_and_nobody_else() -> None:
    def score_all(sequences: list) -> list[float]:
        if [13] in sequences:
            raise RuntimeError("out of memory")
        return [0.5] * len(sequences)

    async def ask() -> None:
        batcher = Batcher(score_all)
        worker = asyncio.create_task(batcher.run())
        with pytest.raises(RuntimeError, match="out of memory"):
            await batcher.score([[13]])
        assert await batcher.score([[1]]) == [0.5]
        worker.cancel()

    asyncio.run(ask())


@pytest.fixture
def client(tiny_model: Path, tmp_path: Path) -> Iterator[TestClient]:
    def lengths(sequences: list) -> list[float]:
        return [float(len(sequence)) for sequence in sequences]

    # One token more than the model has embeddings.
    vocab_size = Tokenizer(tiny_model).vocab_size
    shutil.copytree(tiny_model, tmp_path / "model")
    grown = FastTokenizer.from_file(str(tiny_model / "tokenizer.json"))
    grown.add_special_tokens(["<pad2>"])
    grown.save(str(tmp_path / "model" / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "model")
    middleware = guards_of(ServerConfig(api_key="secret", max_body_mb=1), "secret")
    app = create_app(lengths, tokenizer, vocab_size=vocab_size, seq_len=20, middleware=middleware)
    with TestClient(app, headers={"Authorization": "Bearer secret"}) as opened:
        yield opened


def test_conversations_go_through_the_template_and_texts_do_not(client: TestClient) -> None:
    """<|im_start|> user \\n a b c <|im_end|> \\n: eight tokens."""
    conversation = [{"role": "user", "content": "abc"}]
    assert client.post("/score", json={"messages": [conversation]}).json() == {"scores": [8.0]}
    assert client.post("/score", json={"texts": ["abc", "ab"]}).json() == {"scores": [3.0, 2.0]}


def test_it_is_the_goal_space_server_with_the_model_as_its_goal(client: TestClient) -> None:
    """Lengths from -5 to 5: 3 is at 0.8. Texts are cut off at 20 tokens."""
    assert client.get("/goals").json() == {"goals": {"reward_model": {"lowest": -5.0, "highest": 5.0}}}
    texts = ["abc", "a" * 21]
    measured = client.post("/goalspace", json={"texts": texts, "normalize": False}).json()
    assert measured == {"reward_model": [3.0, 20.0]}
    assert client.post("/goalspace", json={"texts": texts}).json() == {"reward_model": [0.8, 1.0]}
    for text, message in (("", "has nothing to score"), ("b<pad2>", "holds the token '<pad2>'")):
        refused = client.post("/goalspace", json={"texts": [text]})
        assert refused.status_code == 500 and message in refused.text
    assert "tandem_goal_texts_total 4.0" in client.get("/metrics").text
    assert client.get("/goals", headers={"Authorization": "Bearer wrong"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "give either messages or texts"),
        ({"texts": ["a"], "messages": [[{"role": "user", "content": "a"}]]}, "give either messages or texts"),
        ({"texts": ["a" * 21]}, "texts.0 has 21 tokens, more than seq_len = 20"),
        ({"texts": ["a", ""]}, "texts.1 is empty"),
        ({"messages": [[{"role": "user"}]]}, "the chat template refuses these messages"),
        ({"text": ["a"]}, "text"),
        ({"texts": ["a", "b<pad2>"]}, "the text holds the token '<pad2>'"),
        ({"messages": [[{"role": "user", "content": "<pad2>"}]]}, "the text holds the token '<pad2>'"),
        ({"texts": ["a" * 70_000]}, "the text has 70000 bytes and cannot fit: a context of seq_len = 20 tokens"),
        ({"messages": [[{"role": "user", "content": "a" * 70_000}]]}, "bytes and cannot fit"),
        ({"texts": ["\ud800"]}, "surrogates not allowed"),
    ],
)
def test_requests_that_cannot_be_scored(client: TestClient, body: dict, message: str) -> None:
    response = client.post("/score", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_only_health_is_open_to_everybody(client: TestClient) -> None:
    client.headers.pop("Authorization")
    assert client.get("/health").status_code == 200
    assert client.post("/score", json={"texts": ["a"]}).status_code == 401
