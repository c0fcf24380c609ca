"""`evaluate`: an environment's tasks against a model, a run or an endpoint. Also installed as `eval`."""

import asyncio

from tandem.commands.evaluate import EvaluateConfig
from tandem.config.base import parse
from tandem.config.short_names import EVALUATE
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
    from tandem.launch.local.server import serving
    from tandem.launch.slurm.submission import is_to_be_submitted, submit_evaluation
    from tandem.orchestrator.evaluation.command import evaluate_all, refuse_missing_model
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
        results = asyncio.run(evaluate_all(config, serving, earlier))
    show_results(results)
    if earlier is not None:
        samples_now = read_samples(config.output_dir / RESULTS, results[-1]["target"])
        show_comparison(earlier, results[-1], samples_before, samples_now)
    say(f"results and samples are in {config.output_dir}")


if __name__ == "__main__":
    run_process(main)
