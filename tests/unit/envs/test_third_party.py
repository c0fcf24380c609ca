"""Tasks of other packages, as they are: reasoning-gym and verifiers, each with the real package."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.envs.scripted import Scripted, call, say

from tandem.envs.config import EnvConfig
from tandem.envs.model import ContextFull, Reply
from tandem.envs.process import open_environment
from tandem.envs.registry import make_environment
from tandem.envs.results import Result
from tandem.envs.trial import ScriptedModel, try_environment
from tandem.isolation.failures import failure_of
from tandem.utils.errors import UserError


def make(name: str, **args: Any) -> Any:
    return make_environment(EnvConfig(id=name, args=args))


class TestReasoningGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_a_dataset_by_name(self) -> None:
        made = make("reasoning-gym", dataset="chain_sum", config={"max_terms": 3}, num_train=6, num_eval=2)
        assert (len(made.train_tasks), len(made.eval_tasks)) == (6, 2)
        task = made.train_tasks[0]
        assert made.score(task, f"I think <answer>{task.answer}</answer>") == 1.0
        assert made.score(task, task.answer) == 1.0
        assert made.score(task, "") < 1.0
        again = make("reasoning-gym", dataset="chain_sum", config={"max_terms": 3}, num_train=6, num_eval=2)
        assert [task.messages for task in again.train_tasks] == [task.messages for task in made.train_tasks]

    def test_a_composite(self) -> None:
        parts = [{"name": "chain_sum", "weight": 3}, {"name": "leg_counting", "config": {"max_animals": 3}}]
        made = make("reasoning-gym", datasets=parts, num_train=40, num_eval=4, system_prompt="default")
        sources = [task.info["metadata"]["source_dataset"] for task in made.train_tasks]
        assert sources.count("chain_sum") > sources.count("leg_counting") > 0
        assert all(made.score(task, f"<answer>{task.answer}</answer>") == 1.0 for task in made.eval_tasks)
        assert made.train_tasks[0].messages[0]["role"] == "system"

    def test_an_answer_that_a_dataset_cannot_parse_is_worth_nothing_and_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        names = ["boxnet", "coin_flip", "game_of_life", "prime_factorization"]
        made = make("reasoning-gym", datasets=[{"name": name} for name in names], num_train=40, num_eval=1)
        malformed = ["", "x", "[]", "[[]]", '["x"]', '{"a": 1}', "1e999", "2 × x"]
        for task in made.train_tasks:
            assert all(made.score(task, f"<answer>{answer}</answer>") < 1.0 for answer in malformed)
        logged = [record.message for record in caplog.records]
        assert len(logged) == len(names)
        assert all(any(f"reasoning-gym's {name} raises" in line for line in logged) for name in names)

    def test_a_dataset_that_raises_on_the_right_answer_too_has_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = make("reasoning-gym", dataset="chain_sum", num_train=1, num_eval=1)
        monkeypatch.setattr(type(made._dataset), "score_answer", lambda *_: {}["lexicon"])
        with pytest.raises(KeyError, match="lexicon"):
            made.score(made.train_tasks[0], "7")

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({"dataset": "chain_sums"}, r"'chain_sums' is not one of the \d+ datasets .* did you mean 'chain_sum'\?"),
            ({"dataset": "chain_sum", "config": {"max_term": 3}}, "reasoning-gym refuses it"),
            ({}, "give either dataset or datasets"),
            ({"dataset": "chain_sum", "system_prompt": "x"}, r"system_prompt = 'x' is not known; it is one of"),
        ],
    )
    def test_mistakes(self, args: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            make("reasoning-gym", **args)


# Two environments as their authors would write them: one turn with two rewards, and turns with tools.
MODULE = """\
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"say {word}", "answer": word} for word in "abcdefgh"])

def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)

def short(completion, **kwargs):
    return float(len(completion[-1]["content"]) < 3)

def careless(completion, answer):
    return {"b": 1.0}[completion[-1]["content"]]

def silent(completion):
    return None

def double(x: int) -> int:
    \"\"\"Double a number.\"\"\"
    return 2 * x

def load_environment(kind="single", num_rows=8):
    rows, rubric = ROWS.select(range(num_rows)), vf.Rubric(funcs=[right, short], weights=[1.0, 0.5])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=rows, eval_dataset=ROWS.select([0, 1]), rubric=rubric, system_prompt="Obey.")
    if kind in ("careless", "silent"):
        part = vf.SingleTurnEnv(dataset=rows, rubric=vf.RubricGroup([rubric, vf.Rubric(funcs=[globals()[kind]])]))
        return vf.EnvGroup(envs=[part], env_names=["part"])
    if kind == "broken":
        return 1 / 0
    return vf.ToolEnv(dataset=rows, rubric=rubric, tools=[double], max_turns=3)
"""


# What versions have that cannot be installed beside the one that works.
OTHER_VERSIONS = {
    "0.1.9": "class Environment: ...\ndef load_environment(env_id): ...",
    "0.1.11": "class Client: ...\nclass Environment: build_eval_dataset = None\ndef load_environment(env_id): ...",
    "0.4.0": "__all__ = ['v1']",
}


# The package and what it imports warn of their own affairs.
@pytest.mark.filterwarnings("ignore")
class TestVerifiers:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pytest.importorskip("verifiers")
        (tmp_path / "words_of_a_test.py").write_text(MODULE)
        monkeypatch.syspath_prepend(tmp_path)
        yield
        sys.modules.pop("words_of_a_test", None)

    def play(self, made: Any, *replies: Reply | Exception) -> tuple[Result, Scripted]:
        model = Scripted(*replies)
        return asyncio.run(made.rollout(made.train_tasks[0], model)), model

    def test_a_single_turn(self) -> None:
        made = make("verifiers", id="words-of-a-test")
        assert (len(made.train_tasks), len(made.eval_tasks)) == (8, 2)
        result, model = self.play(made, say("a"))
        assert result.rewards == 1.5 and result.metrics["right"] == 1.0
        assert [message["role"] for message in model.asked[0]] == ["system", "user"]
        assert self.play(made, say("something else"))[0].rewards == 0.0

    def test_turns_with_tools(self) -> None:
        made = make("someone/words-of-a-test", kind="tools")
        assert len(made.eval_tasks) == 1
        result, model = self.play(made, call("double", x=4), say("a"))
        assert result.rewards == 1.5
        assert [message["role"] for message in model.asked[1]] == ["user", "assistant", "tool"]
        assert model.asked[1][2]["content"] == "8" and model.tools[0]["function"]["name"] == "double"

    def test_a_reward_function_that_fails_is_no_reward_of_zero(self) -> None:
        made = make("verifiers", id="words-of-a-test", args={"kind": "careless"})
        assert self.play(made, say("b"))[0].metrics["careless"] == 1.0
        with pytest.raises(KeyError, match="something else") as raised:
            self.play(made, say("something else"))
        assert failure_of(raised.value).where.endswith("in careless")
        assert self.play(made, say(""))[0].rewards == 0.0
        with pytest.raises(TypeError, match="NoneType"):
            self.play(make("verifiers", id="words-of-a-test", args={"kind": "silent"}), say("b"))

    def test_a_reply_without_words_is_worth_nothing_and_no_error(self) -> None:
        assert self.play(make("verifiers", id="words-of-a-test"), say(""))[0].rewards == 0.0

    def test_a_conversation_that_is_full_ends(self) -> None:
        made = make("verifiers", id="words-of-a-test")
        assert self.play(made, ContextFull("600 tokens"))[0].rewards == 0.0

    def test_an_error_of_the_model_is_one_of_the_rollout(self) -> None:
        with pytest.raises(RuntimeError, match="ModelError"):
            self.play(make("verifiers", id="words-of-a-test"), ConnectionError("gone"))

    def test_a_module_of_the_current_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(tmp_path)])
        monkeypatch.chdir(tmp_path)
        assert len(make("verifiers", id="words-of-a-test").train_tasks) == 8

    def test_an_environment_that_is_not_installed(self) -> None:
        with pytest.raises(UserError, match=r"env\.args\.id = 'no-such-words' cannot be loaded: Could not import"):
            make("verifiers", id="no-such-words")

    def test_a_module_that_fails_is_told_with_its_line(self, tmp_path: Path) -> None:
        place = r"ZeroDivisionError: division by zero \(words_of_a_test\.py:\d+ in load_environment\)"
        with pytest.raises(UserError, match=place):
            make("verifiers", id="words-of-a-test", args={"kind": "broken"})
        (tmp_path / "imports_of_a_test.py").write_text("import not_installed_for_a_test\n")
        with pytest.raises(UserError, match=r"No module named 'not_installed_for_a_test' \(imports_of_a_test\.py:1"):
            make("verifiers", id="imports-of-a-test")

    @pytest.mark.parametrize(("version", "source"), OTHER_VERSIONS.items(), ids=OTHER_VERSIONS)
    def test_a_version_with_another_api_is_refused_in_one_line(
        self, version: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "verifiers.py").write_text(source)
        metadata = tmp_path / f"verifiers-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
        monkeypatch.delitem(sys.modules, "verifiers")
        with pytest.raises(UserError, match=rf"^[^\n]* {version} is installed, .* pip install 'verifiers==0\.1\.10'$"):
            make("verifiers", id="words-of-a-test")

    def test_in_a_process_of_its_own(self) -> None:
        """As in a run: requests of OpenAI's client cross to the orchestrator and back."""
        env = EnvConfig(id="verifiers", args={"id": "words-of-a-test", "args": {"num_rows": 4}})

        async def run() -> Result:
            async with open_environment(env) as environment:
                await try_environment(environment, env)
                assert len(environment.train_tasks) == 4
                return await environment.play(environment.train_tasks[0], ScriptedModel("a"))

        assert asyncio.run(run()).rewards == 1.5
