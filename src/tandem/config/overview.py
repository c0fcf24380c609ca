"""`--help`: the options of a command that people change, on one page; and `--help TOPIC`: a section, or an option."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.explain import models_in, option_paths
from tandem.config.full_names import PROCESSES, place_flags
from tandem.config.help import Table, docstrings, kind_of, render_boxes, render_help, tables_of, usage
from tandem.config.short_names import spell_out
from tandem.config.sources import SUFFIXES
from tandem.utils.errors import UserError
from tandem.utils.spelling import nearest

ALL = "all"
MAX_COLUMNS = 120  # longer lines are no easier to read

_MODEL = "model model.dtype seq-len"
_RUN = "output-dir max-steps seed deterministic checkpoint.every resume"
_START = "clean dry-run"
_BATCH = "env env.args reward prompts-per-step group-size max-staleness sampling.max-tokens sampling.temperature"
_BATCH += " advantage eval.every"
_TRAINING = "optimizer.lr scheduler.type tokens-per-microbatch lora.rank"
_RANKS = "device parallel.ranks parallel.strategy parallel.gradient-checkpointing"
_ROWS = "data.path data.split data.eval-size data.on-bad-row epochs batch-size eval.every"
_JOB = "slurm.nodes metrics.report-to"
_SERVER = "host port api-key-var"
# The options of each command that people change, by their shortest names. Commands that are not here have few, and show
# all of them.
COMMON = {
    "rl": f"{_MODEL} {_BATCH} loss loss.kl.coef {_TRAINING} inference.engine deployment gpus.trainer {_JOB} {_RUN} "
    f"{_START}",
    "orchestrator": f"{_MODEL} client.base-url {_BATCH} filters.equal-rewards metrics.report-to {_RUN}",
    "trainer": f"{_MODEL} loss loss.kl.coef loss.normalize updates-per-batch {_TRAINING} {_RANKS} {_RUN}",
    "sft": f"{_MODEL} {_ROWS} data.learn-roles {_TRAINING} {_RANKS} {_JOB} {_RUN} {_START}",
    "align": f"{_MODEL} {_ROWS} loss beta loss.reference {_TRAINING} {_RANKS} {_JOB} {_RUN} {_START}",
    "inference": f"{_MODEL} engine {_SERVER} weight-roots vllm.flags max-sequences tokens-per-step kv-cache-tokens "
    "gpu-memory-utilization prefix-caching cuda-graphs generation-config device threads seed deterministic",
    "evaluate": "model run endpoint.base-url endpoint.model env env.args reward env.system-prompt split num-prompts "
    "samples temperature max-tokens seq-len dtype device concurrency slurm.nodes output-dir compare dry-run",
    "reward-server": f"{_MODEL} goals {_SERVER} tokens-per-batch device threads",
}


@dataclass(frozen=True)
class Option:
    flag: str  # as it is typed, without its dashes
    path: str  # the full name
    default: str  # as it would be typed; the kind of value where there is none
    meaning: str


def asked_topic(arguments: Sequence[str]) -> str | None:
    """What `--help` is asked about: empty where that is the command as a whole, None where nobody asks."""
    for place, argument in enumerate(arguments):
        flag, _, topic = argument.partition("=")
        if flag in ("-h", "--help"):
            following = "".join(arguments[place + 1 : place + 2])
            is_topic = not following.startswith(("-", "@")) and not following.endswith(SUFFIXES)
            return topic or (following if is_topic else "")
    return None


def tell(cls: type[BaseModel], prog: str, description: str, topic: str, short_names: Mapping[str, str]) -> str:
    """Raises UserError where there is no such topic."""
    if topic == ALL:
        return render_help(cls, prog, description)
    if topic:
        return render_topic(cls, prog, topic.removeprefix("--").replace("_", "-"))
    return render_overview(cls, prog, description, short_names)


def render_topic(cls: type[BaseModel], prog: str, topic: str) -> str:
    """The sections and the options of this name, of which the beginning may be left out."""
    tables = tables_of(cls)
    names = [path.replace("_", "-") for path in option_paths(cls)]
    found = [name for name in names if name == topic] or [name for name in names if name.endswith(f".{topic}")]
    found = [name for name in found if not any(name.endswith(f".{other}") for other in found)]
    if not found:
        raise UserError(f"--help {topic}: there is no such section or option; {_nearest(topic, names)}")
    boxes: list[Table] = []
    for name in dict.fromkeys(found):
        boxes += [table for table in tables if table.path in (name, f"{name}[*]")]
        boxes += [
            replace(table, rows=[(flag, meaning)])
            for table in tables
            for flag, meaning in table.rows
            if flag.partition(" ")[0] == f"--{name}"
        ]
    inner = [path for path in _section_names(tables) if any(path.startswith(f"{name}.") for name in found)]
    within = _listed(f"Sections within, for `{prog} --help SECTION`:", [" ".join(inner)])
    return "\n\n".join([render_boxes(boxes), *within]) + "\n"


def _nearest(topic: str, names: list[str]) -> str:
    last = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = nearest(topic, [*names, *last])
    return f"did you mean {last.get(near, near)!r}?" if near else f"`--help {ALL}` has all of them"


def render_overview(cls: type[BaseModel], prog: str, description: str, short_names: Mapping[str, str]) -> str:
    columns = min(max(80, shutil.get_terminal_size().columns), MAX_COLUMNS)
    options = common_options(cls, prog, short_names)
    flags = [f"  --{option.flag} {option.default}".rstrip() for option in options]
    width = max(map(len, flags)) + 2
    lines = [
        f"{flag:<{width}}{textwrap.shorten(option.meaning, columns - width, placeholder=' …')}"
        for flag, option in zip(flags, options, strict=True)
    ]
    title = "Options that people change, with their defaults:" if prog in COMMON else "Options, with their defaults:"
    sections = _listed(f"Sections, for `{prog} --help SECTION`:", _sections(cls))
    end = f"`{prog} --help OPTION` tells more of one, `{prog} --help {ALL}` everything."
    cut = [option for option in options if option.path.endswith(f".{option.flag.replace('-', '_')}")]
    for option in cut[-1:]:
        full = option.path.replace("_", "-")
        end += f" A name may lack its beginning: --{option.flag} is --{full}."
    end = textwrap.fill(end, 80, break_on_hyphens=False)
    return "\n\n".join([usage(prog), description, "\n".join([title, *lines]), *sections, end]) + "\n"


def common_options(cls: type[BaseModel], prog: str, short_names: Mapping[str, str]) -> list[Option]:
    """Those of the overview, as the configuration has them."""
    flags = COMMON[prog].split() if prog in COMMON else [path.replace("_", "-") for path in option_paths(cls)]
    return [_describe(cls, flag, place_flags(cls, spell_out([f"--{flag}"], short_names))[0]) for flag in flags]


def _describe(cls: type[BaseModel], flag: str, full: str) -> Option:
    *sections, name = full.removeprefix("--").replace("-", "_").split(".")
    sentences: list[str] = []  # of a section that is off unless something of it is given, and of the option
    for section in sections:
        field = cls.model_fields[section]
        if field.default is None and section not in PROCESSES:
            sentences.append(_sentence(cls, section))
        (cls,) = models_in(field.annotation)
    default = _kind(cls.model_fields[name]) if sentences else _default(cls.model_fields[name])
    return Option(flag, ".".join([*sections, name]), default, " ".join([*sentences, _sentence(cls, name)]))


def _sentence(cls: type[BaseModel], name: str) -> str:
    """What an option is, without what its values mean."""
    return docstrings(cls)[name].partition(". ")[0].removesuffix(".") + "."


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if field.annotation is bool:
        return "(on)" if default else ""
    return _kind(field) if field.is_required() or default in (None, [], {}) else str(default)


def _kind(field: FieldInfo) -> str:
    kind = kind_of(field.annotation).removesuffix("|None")
    return kind if kind.isalpha() else "VALUE"


def _sections(cls: type[BaseModel]) -> list[str]:
    """A line for each section that has others, with their names in it, and one for the rest. What processes share is
    told once."""
    paths = _section_names(tables_of(cls))
    inner = {top: [p for p in paths if p.startswith(f"{top}.") and p.partition(".")[2] not in paths] for top in paths}
    tops = [path for path in paths if "." not in path]
    lines = [" ".join([top, *(path.removeprefix(top) for path in inner[top])]) for top in tops if inner[top]]
    return [*lines, " ".join(top for top in tops if not inner[top])]


def _section_names(tables: list[Table]) -> list[str]:
    """Entries of lists have no name of their own."""
    return [table.path for table in tables if table.path and "[*]" not in table.path]


def _listed(title: str, lines: list[str]) -> list[str]:
    """A paragraph, or none where there is nothing to list."""
    wrapped = [textwrap.wrap(line, 78, initial_indent="  ", subsequent_indent="    ") for line in lines]
    parts = [part for parts in wrapped for part in parts]
    return ["\n".join([title, *parts])] if parts else []
