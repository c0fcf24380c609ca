"""Python as a tool: the code that a model writes runs in the sandbox. And word problems to use it on."""

from pydantic import Field

from tandem.envs.conversing import use_tools
from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.envs.small_tasks import TaskArgs, WordProblems, final_number
from tandem.envs.tools import ToolUnavailable
from tandem.isolation.sandbox import SandboxUnavailable, run_python, why_unprotected
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shorten

TIMEOUT_S = 10.0
MAX_OUTPUT = 2000  # characters that the model gets to read


async def python(code: str) -> str:
    """Run a Python script and read what it prints.

    Args:
        code: the whole script; print what you want to know
    """
    try:
        result = await run_python(code, timeout_s=TIMEOUT_S)
    except SandboxUnavailable as error:
        raise ToolUnavailable(str(error)) from error
    if result.stopped is not None:
        return f"Error: the script was stopped, it used too much {result.stopped}"
    if result.exit_code != 0:
        last_line = (result.stderr.strip().splitlines() or [f"exit code {result.exit_code}"])[-1]
        return shorten(f"Error: {last_line}", MAX_OUTPUT)
    return shorten(result.stdout, MAX_OUTPUT) or "(nothing was printed)"


class PythonUseArgs(TaskArgs):
    max_turns: int = Field(default=4, ge=1)


class PythonUse(WordProblems):
    """Word problems, with Python to work them out. The reward is that of word problems, for the last turn."""

    Args = PythonUseArgs
    tools = (python,)

    def __init__(self, **args: object) -> None:
        super().__init__(**args)
        self.args: PythonUseArgs
        if (reason := why_unprotected()) is not None:
            raise UserError(f"env.id = 'python': the model's code cannot be run safely here: {reason}")

    async def rollout(self, task: Task, model: Model) -> Result:
        played = await use_tools(model, task.messages, self.tools, max_turns=self.args.max_turns)
        return played.result(float(played.ended == "answer" and final_number(played.text) == float(task.answer)))
