"""`evaluate`: an environment's tasks against a model, a run or an endpoint. Also installed as `eval`."""

import asyncio
from pathlib import Path
from typing import Any

from tandem.config.base import parse
from tandem.config.evaluate import EvaluateConfig
from tandem.config.short_names import EVALUATE
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.processes import run_entrypoint, run_process

DESCRIPTION = """\
Asks a model the tasks of an environment, and tells how well it did.

  evaluate --model models/my_model --env arithmetic     a model directory
  evaluate --run outputs/rl --env arithmetic            every version of a run
  evaluate --endpoint.base-url http://host:8000 --env ./my_env.py:Mine
  evaluate --model models/other --env arithmetic --output-dir outputs/other \\
           --compare outputs/evaluate/results.json      which tasks changed
Writes results.json and samples.jsonl to output_dir. Those of an earlier
evaluation are kept: results.1.json, …"""


def main() -> None:
    config = parse(EvaluateConfig, "evaluate", DESCRIPTION, short_names=EVALUATE)
    run_entrypoint("evaluate", lambda: launch(config))


def launch(config: EvaluateConfig) -> None:
    from tandem.launch.guard import guarded
    from tandem.launch.slurm.submission import is_to_be_submitted, submit_evaluation
    from tandem.orchestrator.evaluation.compare import read_results, read_samples, show_comparison, show_results
    from tandem.orchestrator.evaluation.evaluate import RESULTS
    from tandem.utils.log import setup_logging

    setup_logging(config.log_level)
    if is_to_be_submitted(config.slurm):
        submit_evaluation(config)
        return
    if config.dry_run:
        say("dry run: the options are valid")
        return
    earlier, samples_before = None, {}
    if config.compare is not None:  # read now: this evaluation may write to the same folder
        earlier = read_results(config.compare, config)[-1]
        samples_before = read_samples(config.compare, earlier["target"])
    if config.model is not None:
        refuse_missing_model(config.model)
    with guarded():
        results = asyncio.run(evaluate_all(config, earlier))
    show_results(results)
    if earlier is not None:
        samples_now = read_samples(config.output_dir / RESULTS, results[-1]["target"])
        show_comparison(earlier, results[-1], samples_before, samples_now)
    say(f"results and samples are in {config.output_dir}")


def refuse_missing_model(path: Path) -> None:
    """UserError before a server is started for it; a name on the hub is for the server to fetch."""
    from tandem.models.files import check_model_dir
    from tandem.utils.hub import is_hub_name

    if is_hub_name(path) and not path.parent.exists():
        return
    if not path.is_dir():
        raise UserError(f"model = '{path}' is not a directory; give a model directory in Hugging Face format")
    try:
        check_model_dir(path)
    except UserError as error:
        raise UserError(str(error).replace("model.name =", "model =", 1)) from error


async def evaluate_all(config: EvaluateConfig, earlier: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The results of every model that there is to evaluate, written as they come. Tasks that are not those of the
    `earlier` results are refused."""
    from tandem.envs.process import open_environment
    from tandem.envs.trial import try_environment
    from tandem.launch.local.server import serving
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
    from tandem.orchestrator.evaluation.models import targets
    from tandem.utils.files import write_json
    from tandem.utils.run_lock import refuse_unwritable
    from tandem.utils.secrets import hidden

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
        async for target, endpoint in targets(config, serving):
            outcomes = await evaluate(config, environment, endpoint, tasks, target)
            result = results_of(target, outcomes, config.solved_reward)
            if not results and (kept := keep_earlier(config.output_dir)):
                say(f"the results of an earlier evaluation are kept: {kept}")
            results.append(result)
            append_samples(config.output_dir / SAMPLES, target, outcomes)
            write_json(config.output_dir / RESULTS, {"config": options, "results": results})
    return results


if __name__ == "__main__":
    run_process(main)
