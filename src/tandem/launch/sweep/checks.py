"""Whether the model and the data that a run names are there and fit, before anything is written."""

from typing import Any

from tandem.commands.offline import OfflineConfig
from tandem.commands.rl import RLConfig
from tandem.config.base import Config
from tandem.config.shared import ModelConfig
from tandem.config.sources import Tree
from tandem.data.dataset import check_sources
from tandem.data.rows import refuse_missing
from tandem.envs.registry import check_names
from tandem.launch.sweep.document import Document
from tandem.models.files import check_model, check_positions
from tandem.utils.errors import UserError
from tandem.utils.hub import fetch_model, find_model, is_hub_name, is_offline

KEYS = {"data.path": "dataset_name", "env.id": "env", "env.reward": "reward_funcs"}  # that give these options


class FileChecks:
    """Of all runs of a document; the same model is looked at once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._checked_models: set[tuple[Any, ...]] = set()

    def check(self, config: Config, tree: Tree) -> None:
        model: ModelConfig = getattr(config, "model")  # noqa: B009  # all three commands have it
        try:
            self._check_model(model, tree.get("seq_len"))
        except UserError as error:
            key = "model_name_or_path" if "model.name" in str(error) else "max_length"
            raise self.document.refuse_key(key, str(error)) from error
        try:
            if isinstance(config, OfflineConfig):
                check_sources(config.data)
            if isinstance(config, RLConfig):
                for plan in config.orchestrator.plans.values():
                    check_names(plan.env)
                    if plan.env.id == "dataset" and isinstance(path := plan.env.args.get("path"), str):
                        refuse_missing(path, "data.path")
        except UserError as error:
            option, _, rest = str(error).partition(" = ")
            key = KEYS.get(option, option)
            raise self.document.refuse_key(key, f"{key} = {rest}") from error

    def _check_model(self, model: ModelConfig, seq_len: int | None) -> None:
        """Once, whatever else varies."""
        if (asked := (model.name, model.impl, model.trust_remote_code, seq_len)) in self._checked_models:
            return
        self._checked_models.add(asked)
        if is_hub_name(model.name) and not is_offline():
            fetch_model(model.name)
            model = model.model_copy(update={"name": find_model(model.name)})
        check_model(model)
        if seq_len is not None:
            check_positions(model.name, seq_len)
