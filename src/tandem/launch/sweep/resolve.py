"""One variant of an experiment, as a command of ours with its configuration, checked before anything is written."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.config.base import Config
from tandem.config.explain import explain_validation_error, option_paths
from tandem.config.full_names import find_option
from tandem.config.hints import TAKEN, algorithm_hint, algorithm_name, explanation, options_named
from tandem.config.slurm import SlurmConfig
from tandem.config.sources import Tree, merge, nest, read_config_file
from tandem.launch.plan import hide_keys
from tandem.launch.sweep.algorithms import ALGORITHMS, CONFIGS, DISTRIBUTED, Algorithm, is_loss_of
from tandem.launch.sweep.arguments import ELSEWHERE, IMMATERIAL, ONLY
from tandem.launch.sweep.checks import FileChecks
from tandem.launch.sweep.document import Document
from tandem.launch.sweep.expand import Variant
from tandem.launch.sweep.layout import ARGUMENTS, check_layout, nearest_of
from tandem.launch.sweep.rules import (
    BY_RULE,
    BY_RULE_ONLINE,
    DEFAULT_COMPLETION,
    NO_LIMIT,
    Options,
    Refused,
    apply_rules,
    value_at,
)
from tandem.launch.sweep.same_runs import idle_keys, refuse_same_runs
from tandem.launch.sweep.sections import environment_of, evaluation_of, slurm_of
from tandem.utils.errors import UserError
from tandem.utils.progress import reported
from tandem.utils.secrets import holds_secret, names_secret


@dataclass(frozen=True)
class SubExperiment:
    """Everything that its job script and its configuration file say."""

    variant: Variant
    algorithm: str
    command: str
    folder: Path
    tree: Tree  # for the command, without the keys of our own servers
    config: Config  # the same, checked
    slurm: SlurmConfig
    environment: Mapping[str, str]
    secrets: Mapping[str, str]  # more of the environment, which only the user may read
    notes: list[str]
    evaluation: Tree | None
    content: str  # equal for runs that are the same but for their names

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def evaluation_folder(self) -> Path:
        return self.folder / "evaluation"


class Resolver:
    """Turns the variants of one document into sub-experiments."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.output_dir = check_layout(document)
        self.several = any(len(entry.alternatives) > 1 for entry in document.entries.values())
        self._files = FileChecks(document)

    def resolve_all(self, variants: list[Variant]) -> list[SubExperiment]:
        runs = [self.resolve(variant) for variant in reported(variants, "sweep", "runs checked")]
        refuse_same_runs(self.document, variants, self._meaning)
        return self._once(runs)

    def _once(self, runs: Sequence[SubExperiment]) -> list[SubExperiment]:
        """One of those that are the same. Its name leaves out what makes no difference, so that it stays when another
        such value is added."""
        same: dict[str, list[SubExperiment]] = {}
        for run in runs:
            same.setdefault(run.content, []).append(run)
        once: dict[str, SubExperiment] = {}
        for first, *others in same.values():
            run = self._without_idle(first, others) if others else first
            run = first if run.name in once else run
            once[run.name] = run
        return list(once.values())

    def _without_idle(self, run: SubExperiment, others: Sequence[SubExperiment]) -> SubExperiment:
        keys = idle_keys([run.variant, *(other.variant for other in others)])
        kept = self.resolve(run.variant.without(keys))
        told = ", ".join(name for _, name in keys)
        kept.notes.append(f"{kept.name}: makes no use of {told}, so it is one run for all values of it")
        return kept

    def _meaning(self, variant: Variant) -> str:
        """Equal where runs are the same but for their names. 1 and 1.0 stay apart where an option takes both."""
        run = self.resolve(replace(variant, name="any"))
        return repr((run.command, run.config, run.slurm, run.environment, run.secrets, run.evaluation))

    def resolve(self, variant: Variant) -> SubExperiment:
        name, algorithm = self._algorithm(variant)
        folder = self.output_dir / variant.name
        slurm = slurm_of(self.document, variant)
        environment = environment_of(self.document, variant)
        secrets = {name: value for name, value in environment.items() if names_secret(name) or holds_secret(value)}
        options = Options(algorithm.command)
        if slurm.inference_nodes is not None and not algorithm.is_online:
            options.notes.append(f"inference_nodes: {name} has no inference servers; all nodes train")
        tree: Tree = {}
        try:
            tree = self._tree(variant, name, algorithm, options, slurm)
        except Refused as error:
            raise self.document.refuse_key(error.key, str(error)) from error
        given = repr((algorithm.command, tree, slurm, environment))
        self._name_run(tree, variant.name, environment, online=algorithm.is_online)
        tree["output_dir"] = str(folder / "run")
        if algorithm.is_online and slurm.nodes > 1:  # `rl` lays itself over the nodes of its job
            tree["slurm"] = {"nodes": slurm.nodes, "inference_nodes": slurm.serving_nodes}
        config = self._check(CONFIGS[algorithm.command], tree, options)
        self._files.check(config, tree)
        evaluation = evaluation_of(self.document, folder, tree, online=algorithm.is_online)
        secrets |= hide_keys(tree)
        environment = {name: value for name, value in environment.items() if name not in secrets}
        return SubExperiment(
            *(variant, name, algorithm.command, folder, tree, config, slurm, environment, secrets, options.notes),
            evaluation=evaluation,
            content=hashlib.sha256(given.encode()).hexdigest(),
        )

    def _algorithm(self, variant: Variant) -> tuple[str, Algorithm]:
        given = variant.values["execution", "algorithm"]
        name = algorithm_name(given)
        if name not in ALGORITHMS:
            raise self.document.refuse_key(
                "algorithm", f"algorithm = {given!r} is not known; {nearest_of(name, ALGORITHMS)}"
            )
        return name, ALGORITHMS[name]

    def _tree(self, variant: Variant, name: str, algorithm: Algorithm, options: Options, slurm: SlurmConfig) -> Tree:
        online = algorithm.is_online
        by_rule: dict[str, Any] = {}
        base: Tree = {}
        for section in ARGUMENTS:
            for key, value in variant.section(section).items():
                self._refuse_again(section, key)
                if key == "config":
                    base = self._base(value, base)
                else:
                    self._take(key, value, algorithm, options, by_rule)
        if "loss_type" in by_rule:
            self._check_loss_type(by_rule["loss_type"], name)
        options.base = merge(base, algorithm.options)
        self._shard(variant, options)
        ranks = options.get("parallel.ranks") or slurm.gpus_per_node or 1
        trainers = slurm.nodes - slurm.serving_nodes if online else slurm.nodes
        if not online:
            options.compute("parallel.ranks", ranks, "one rank per GPU of a node")
            if not {"epochs", "num_train_epochs", "max_steps"} & {*options.values, *by_rule, *base}:
                options.compute("epochs", 3.0, "the default of transformers")
        if name == "dr_grpo":
            longest = options.get("sampling.max_tokens") or DEFAULT_COMPLETION
            options.compute("loss.constant_length", longest, "the longest completion")
        paired = algorithm.command == "align" and name not in ("kto", "bco")
        apply_rules(by_rule, options, ranks * trainers, paired=paired)
        return self._assemble(name, algorithm, options)

    def _check_loss_type(self, loss_type: object, name: str) -> None:
        """The algorithm says it; so may TRL's name for the same."""
        if is_loss_of(loss_type, name):
            return
        other = algorithm_name(loss_type)
        known = f"use execution.algorithm: {other}" if other in ALGORITHMS else algorithm_hint("loss.type", loss_type)
        told = known or f"leave it out; execution.algorithm takes {', '.join(ALGORITHMS)}"
        raise Refused("loss_type", f"loss_type = {loss_type!r} is not what algorithm = {name!r} does: {told}")

    def _refuse_again(self, section: str, key: str) -> None:
        """A key of a section that one before it has as well."""
        for other in ARGUMENTS[: ARGUMENTS.index(section)]:
            if key in self.document.sections.get(other, {}):
                first = f"first in line {self.document.sections[other][key].line}"
                raise self.document.refuse(section, key, f"{key!r} is given twice ({first}); give it once")

    def _assemble(self, name: str, algorithm: Algorithm, options: Options) -> Tree:
        """Everything in one tree, and what the algorithm needs besides."""
        tree = options.base
        for path, value in options.values.items():
            tree = merge(tree, nest(path.split("."), value))
        for path, what in algorithm.needs.items():
            if value_at(tree, path) is None:
                raise Refused("algorithm", f"algorithm = {name!r} needs {path}, {what}; give it in rl_config_args")
        if algorithm.is_online and "inference" not in tree:
            tree["inference"] = {}  # a server of the run's own
        if value_at(tree, "model.name") is None:
            raise self.document.refuse("model_config_args", None, "model_name_or_path is required and was not given")
        if not algorithm.is_online and not {"path", "sources"} & tree.get("data", {}).keys():
            raise self.document.refuse("rl_script_args", None, "dataset_name is required and was not given")
        return tree

    def _take(self, key: str, value: Any, algorithm: Algorithm, options: Options, by_rule: dict[str, Any]) -> None:
        """One argument: for the rules, an option by our name or another's, one that changes nothing, or refused."""
        if key == "max_steps" and value == NO_LIMIT:
            return
        if key in ELSEWHERE:
            raise Refused(key, f"{key} is not supported: {ELSEWHERE[key]}")
        if key in (BY_RULE_ONLINE if algorithm.is_online else BY_RULE):
            by_rule[key] = value
        elif find_option(CONFIGS[algorithm.command], key) is not None:
            options.set(key, value, key)
        elif key in IMMATERIAL:
            options.notes.append(f"{key}: {IMMATERIAL[key]}")
        elif key in ONLY:
            accepted, why = ONLY[key]
            if value not in accepted:
                raise Refused(key, f"{key} = {value!r} is not supported: {why}")
        elif key in BY_RULE_ONLINE or any(find_option(cls, key) is not None for cls in CONFIGS.values()):
            raise Refused(key, f"{key} has no meaning for `{algorithm.command}`; leave it out")
        else:
            raise Refused(key, f"unknown argument {key!r}; {_hint(key, algorithm)}")

    def _base(self, value: Any, base: Tree) -> Tree:
        for path in value if isinstance(value, list) else [value]:
            try:
                base = merge(base, read_config_file(Path(str(path))))
            except UserError as error:
                raise Refused("config", str(error)) from error
        return base

    def _shard(self, variant: Variant, options: Options) -> None:
        given = variant.section("execution").get("distributed_config")
        if given is None:
            return
        wanted = str(given)
        sharding = {name.lower(): sharding for name, sharding in DISTRIBUTED.items()}.get(wanted.lower())
        if sharding is None:
            told = f"distributed_config = {given!r} is not known; {nearest_of(wanted, DISTRIBUTED)}"
            raise Refused("distributed_config", told)
        for name, value in sharding.options.items():
            options.set(f"parallel.{name}", value, "distributed_config")
        options.notes.append(f"distributed_config = {given}: {sharding.meaning}")

    def _name_run(self, tree: Tree, name: str, environment: Mapping[str, str], *, online: bool) -> None:
        """Trackers show project and run as W&B's own variables say; a run of several has its name behind."""
        computed: Tree = {"run_name": name}
        if "WANDB_PROJECT" in environment:
            computed["project"] = environment["WANDB_PROJECT"]
        if "WANDB_NAME" in environment:
            computed["run_name"] = f"{environment['WANDB_NAME']}-{name}" if self.several else environment["WANDB_NAME"]
        section = tree.setdefault("orchestrator", {}) if online else tree
        section["metrics"] = computed | section.get("metrics", {})

    def _check(self, cls: type[Config], tree: Tree, options: Options) -> Config:
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            keys = [key for details in error.errors() for key in _keys_of(details, options)]
            raise self.document.refuse_key((keys or [""])[0], explain_validation_error(cls, error)) from error


def _hint(key: str, algorithm: Algorithm) -> str:
    """What an unknown argument is for the command, or what is written nearly as it is."""
    paths = list(option_paths(CONFIGS[algorithm.command]))
    if told := explanation(key, paths):
        return told
    if meant := options_named(key, paths):
        return f"did you mean {' or '.join(map(repr, meant))}?"
    return nearest_of(key, [*TAKEN, *BY_RULE_ONLINE, *IMMATERIAL, *ONLY, *paths])


def _keys_of(details: Mapping[str, Any], options: Options) -> list[str]:
    """The keys of the experiment file that an error of our own options is about."""
    path = ".".join(str(part) for part in details["loc"])
    named = [key for ours, key in options.sources.items() if ours == path or path.startswith(f"{ours}.")]
    about = [key for ours, key in options.sources.items() if f"{ours.rpartition('.')[2]} = " in details["msg"]]
    return named or about
