"""What `evaluate` does once its options are known: every model's results, written as they come."""

from pathlib import Path
from typing import Any

from tandem.commands.evaluate import EvaluateConfig
from tandem.envs.process import open_environment
from tandem.envs.trial import try_environment
from tandem.models.files import check_model_dir
from tandem.orchestrator.evaluation.compare import refuse_other_tasks
from tandem.orchestrator.evaluation.evaluate import (
    RESULTS,
    SAMPLES,
    append_samples,
    choose_tasks,
    evaluate,
    fingerprint,
    keep_earlier,
    results_of,
)
from tandem.orchestrator.evaluation.models import Serve, targets
from tandem.utils.errors import UserError
from tandem.utils.files import write_json
from tandem.utils.hub import is_hub_name
from tandem.utils.log import say
from tandem.utils.run_lock import refuse_unwritable
from tandem.utils.secrets import hidden


def refuse_missing_model(path: Path) -> None:
    """UserError before a server is started for it; a name on the hub is for the server to fetch."""
    if is_hub_name(path) and not path.parent.exists():
        return
    if not path.is_dir():
        raise UserError(f"model = '{path}' is not a directory; give a model directory in Hugging Face format")
    try:
        check_model_dir(path)
    except UserError as error:
        raise UserError(str(error).replace("model.name =", "model =", 1)) from error


async def evaluate_all(
    config: EvaluateConfig, serve: Serve, earlier: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The results of every model that there is to evaluate, written as they come. Tasks that are not those of the
    `earlier` results are refused."""
    results: list[dict[str, Any]] = []
    options = hidden(config.model_dump(mode="json"))
    async with open_environment(config.env) as environment:
        await try_environment(environment, config.env)
        tasks = choose_tasks(config, environment)
        if earlier is not None:
            assert config.compare is not None
            refuse_other_tasks(config.compare, earlier, {str(task.index): fingerprint(task) for task in tasks})
        with refuse_unwritable(config.output_dir):
            config.output_dir.mkdir(parents=True, exist_ok=True)
        async for target, endpoint in targets(config, serve):
            outcomes = await evaluate(config, environment, endpoint, tasks, target)
            result = results_of(target, outcomes, config.solved_reward)
            if not results and (kept := keep_earlier(config.output_dir)):
                say(f"the results of an earlier evaluation are kept: {kept}")
            results.append(result)
            append_samples(config.output_dir / SAMPLES, target, outcomes)
            write_json(config.output_dir / RESULTS, {"config": options, "results": results})
    return results
