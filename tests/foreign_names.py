"""Prints which arguments of the installed transformers and TRL `sweep` does not know: `python -m tests.foreign_names`.

A report, for whoever raises their versions: a name that is not known is refused like any other, with the nearest one.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

from tandem.config.full_names import find_option
from tandem.launch.sweep.algorithms import CONFIGS
from tandem.launch.sweep.arguments import ELSEWHERE, IMMATERIAL, ONLY
from tandem.launch.sweep.rules import BY_RULE_ONLINE

CLASSES = (
    ("transformers", "training_args.py", "TrainingArguments"),
    *(("trl", f"trainer/{name.lower()}_config.py", f"{name}Config") for name in ("SFT", "DPO", "KTO", "GRPO", "RLOO")),
    ("trl", "trainer/reward_config.py", "RewardConfig"),
    ("trl", "trainer/model_config.py", "ModelConfig"),
    ("trl", "scripts/utils.py", "ScriptArguments"),
    ("trl", "experimental/cpo/cpo_config.py", "CPOConfig"),
    ("trl", "experimental/orpo/orpo_config.py", "ORPOConfig"),
)


def fields_of(package: str, file: str, name: str) -> set[str]:
    """The fields of a dataclass, read from its source: importing it takes long."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    body = ast.parse((Path(spec.origin).parent / file).read_text()).body
    (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    lines = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in lines if isinstance(target, ast.Name) and not target.id.startswith("_")}


def is_known(name: str) -> bool:
    tables = (BY_RULE_ONLINE, IMMATERIAL, ONLY, ELSEWHERE)
    return any(name in table for table in tables) or any(find_option(cls, name) for cls in CONFIGS.values())


def main() -> None:
    for package, file, name in CLASSES:
        fields = fields_of(package, file, name)
        unknown = sorted(field for field in fields if not is_known(field))
        print(f"{name}: {len(fields) - len(unknown)} of {len(fields)} known")
        print("".join(f"  {field}\n" for field in unknown), end="")


if __name__ == "__main__":
    main()
