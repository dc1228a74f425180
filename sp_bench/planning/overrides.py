"""Checks the command line: its keys, the files of conf that it chooses, and values in Hydra's grammar.

Every name is checked here, before Hydra composes anything. So a misspelt name gets one line with the nearest valid
name, and no override reads the environment, adds a key or touches Hydra's own settings.
"""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sp_bench import engines, hardware, kernels, methods
from sp_bench.config import outside
from sp_bench.config.conf_files import conf_folder
from sp_bench.config.machine import HardwareConfig
from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.config.yaml_text import read_yaml
from sp_bench.planning.settings import CampaignConfig

# The keys of the command line


def _leaves(schema: type, prefix: str = "") -> list[str]:
    """Dotted names of the fields that an override may set. `name` of a group is missing: `method=ring` chooses it."""
    names = []
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            names += [leaf for leaf in _leaves(kind, f"{prefix}{name}.") if leaf != f"{prefix}{name}.name"]
        else:
            names.append(prefix + name)
    return names


GROUPS = (
    "method",
    "kernel",
    "model",
    "workload",
    "engine",
    "fabric",
    "hardware",
    "link",
)  # of a trial; a folder of conf each
CELL_KEYS = tuple(key for key in (*GROUPS, *_leaves(TrialConfig)) if key != "method.own")  # a trial's; may be swept
CAMPAIGN_KEYS = (*_leaves(CampaignConfig), "sweep")  # how the list of trials is run; one value a run
SWEEP_FILE_KEYS = ("sweep", *(field.name for field in fields(CampaignConfig)))  # top level of conf/sweep/*.yaml


def is_cell_key(key: str) -> bool:
    """Whether a key is a field of a trial. With a method from outside, any `method.NAME` may be one of its own options;
    that is checked once the point is composed."""
    return key in CELL_KEYS or bool(
        re.fullmatch(r"method\.[A-Za-z_]\w*", key)
        and key not in ("method.name", "method.own", METHOD_PATH)
        and len(methods.names()) > len(methods.NAMES)
    )


# Methods, kernels and engines from outside

METHOD_PATH = "method.path"
OF_SUBMIT = ("--cluster", "--dry-run", "--wait")
ONLY = "only."  # only.KEY=VALUE,...: run only the trials that have one of these values


def take_files(arguments: Sequence[str]) -> list[str]:
    """Register the methods of `method.path=FILE,...` and return the other words. Without `method=...` among them, the
    methods of the files are the ones that run.

    Raises:
        ConfigError: no such file, or a name that is taken.
    """
    outside.forget_files()
    lines = [line for line in arguments if line.startswith(f"{METHOD_PATH}=")]
    rest = [line for line in arguments if line not in lines]
    if len(lines) > 1:
        raise ConfigError(f"{shown(' '.join(lines))}: give it once; several files have commas between them")
    names = [methods.add_file(Path(file.strip("'\""))) for line in lines for file in line.partition("=")[2].split(",")]
    if names and not any(line.startswith("method=") for line in rest):
        rest.append(f"method={','.join(dict.fromkeys(names))}")
    return rest


def choice_from_outside(group: str, name: str) -> dict[str, Any] | None:
    """The content that a file of conf would have for a choice from outside: a method, kernel or engine, a user's own
    file, or hardware=device. None: the choice is one of our files."""
    if own_file(f"{group}/{name}"):
        return dict(conf_file(f"{group}/{name}"))
    if group == "hardware" and name == THIS_DEVICE:
        return _this_device()
    if name in choices(group):
        return None
    return methods.outside_choice(name) if group == "method" else {"name": name}


THIS_DEVICE = "device"  # hardware=device: the GPUs of this machine, whatever they are


def _this_device() -> dict[str, Any]:
    """The file of conf/hardware that describes the GPUs of this machine, or a config made from what they report.

    Raises:
        ConfigError: there are none.
    """
    found = hardware.gpus()
    if not found or not found.devices:
        problem = found.problem if found else ""
        raise ConfigError(
            f"hardware={THIS_DEVICE}: {problem or 'no GPU here'}; use hardware=cpu, or name those of the machine that "
            "runs it"
        )
    model = found.devices[0].name
    for name in choices("hardware"):
        if hardware.describes(name, model):
            return dict(conf_file(f"hardware/{name}"))
    return vars(HardwareConfig(hardware.short_name(model), "cuda"))


def names(group: str) -> list[str]:
    """The choices of `group=...`: files of conf, and methods, kernels and engines from outside."""
    if group == "hardware":
        return sorted([*choices(group), THIS_DEVICE])
    every = {"method": methods, "kernel": kernels, "engine": engines}.get(group)
    found = [name for name in every.names() if name not in every.NAMES] if every else []
    return sorted([*choices(group), *found])


# The files of conf

SWEEP_HEADER = "# @package _global_"  # without it, Hydra puts the file's keys below `sweep`, where nothing reads them


OWN_GROUPS = ("sweep", "model", "hardware", "fabric", "link", "cluster")  # of which users may have files beside ours
_own_folders: tuple[Path, ...] = ()


def use_config_dirs(given: Sequence[Path]) -> None:
    """Look for files of OWN_GROUPS in these folders first, then in ./conf, then among ours.

    Raises:
        ConfigError: one of them is no folder.
    """
    global _own_folders
    for folder in given:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {shown(folder)} is no folder; it holds folders such as sweep and model")
    beside = [folder for folder in (Path("conf"),) if folder.is_dir() and not folder.samefile(conf_folder())]
    _own_folders = (*given, *beside)
    choices.cache_clear()
    conf_file.cache_clear()


def own_file(name: str) -> Path | None:
    """The user's own file of that name, such as `sweep/mine`; None: there is none."""
    if name.partition("/")[0] not in OWN_GROUPS:
        return None
    return next((path for folder in _own_folders if (path := folder / f"{name}.yaml").is_file()), None)


def _path(name: str) -> Path:
    return own_file(name) or conf_folder() / f"{name}.yaml"


def called(name: str) -> str:
    """The name of a file in messages: its path; one of ours begins with conf."""
    return shown(own_file(name) or f"conf/{name}.yaml")


@cache
def choices(group: str) -> list[str]:
    """Names of the files in a folder of conf, ours and the user's."""
    folders = (conf_folder(), *(_own_folders if group in OWN_GROUPS else ()))
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


@cache
def conf_file(name: str, *, for_hydra: bool = True) -> Mapping[str, Any]:
    """The keys and values of one file of conf, such as `fabric/gloo`. In a file that is not for Hydra, ${...} is text.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not map keys to values.
    """
    try:
        text = _path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{called(name)} cannot be read: {shown(error)}") from None
    content = read_yaml(text, called(name), _hydras_yaml) if for_hydra else read_yaml(text, called(name))
    if not isinstance(content, Mapping):
        raise ConfigError(f"{called(name)} must map keys to values, such as name: {name.rpartition('/')[2]}")
    return {str(key): value for key, value in content.items()}


def _hydras_yaml(text: str) -> Any:
    """Content as Hydra reads it: no duplicate keys, 1e-3 is a number, and ${...} must be an interpolation."""
    try:
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (OmegaConfBaseException, OSError) as error:  # OSError: a text that is neither a mapping nor a list
        raise ValueError(error) from None


def check_file(group: str, choice: str) -> None:
    """Check that a chosen file can be read, and that a trial's file gives its own name.

    Raises:
        ConfigError: it cannot be read, or gives another name or none.
    """
    if group == "sweep":
        _check_sweep_file(choice)
        return
    name = conf_file(f"{group}/{choice}").get("name")
    if name != choice:
        says = f"says name: {shown(name)}" if name is not None else "gives no name"
        raise ConfigError(f"{called(f'{group}/{choice}')} {says}; rows are labelled by it: write name: {choice}")


def _check_sweep_file(name: str) -> None:
    """Check that a sweep file begins with the header, has a list of blocks, and has no key that nothing reads."""
    file = called(f"sweep/{name}")
    shape = f"begin it with the line '{SWEEP_HEADER}', and list what it sweeps over below 'sweep: blocks:'"
    content = conf_file(f"sweep/{name}")
    lines = _path(f"sweep/{name}").read_text(encoding="utf-8").splitlines()
    if next(filter(None, map(str.split, lines)), None) != SWEEP_HEADER.split():
        raise ConfigError(f"{file} is not a sweep: {shape}")
    for key in content:
        if key in CELL_KEYS:
            raise ConfigError(f"{file}: {key} is a field of a trial; it goes into the blocks below 'sweep: blocks:'")
        if key not in SWEEP_FILE_KEYS:
            hint, known = nearest(key, SWEEP_FILE_KEYS), ", ".join(SWEEP_FILE_KEYS)
            raise ConfigError(f"{file}: {shown(key)} is not a key of a sweep; {hint}keys: {known}")
    sweep = content.get("sweep")
    if not isinstance(sweep, Mapping) or not sweep.get("blocks"):
        raise ConfigError(f"{file} has no blocks: {shape}")
    if not isinstance(sweep["blocks"], list):
        raise ConfigError(f"{file}: blocks must be a list, each block after a dash")
    if others := [str(key) for key in sweep if key != "blocks"]:
        raise ConfigError(f"{file}: sweep.{shown(others[0])} is not a key; sweep has blocks only")


def check_defaults() -> None:
    """Check conf/config.yaml and the files that it chooses: Hydra reads them in every run.

    Raises:
        ConfigError: one of them cannot be read, or gives a name that is not its own.
    """
    for entry in conf_file("config").get("defaults", []):
        for group, choice in entry.items() if isinstance(entry, Mapping) else ():
            if choice is not None:  # sweep: null
                check_file(group, choice)


# The command line


@dataclass(frozen=True)
class Request:
    """A command line whose names have all been checked."""

    campaign: list[str]  # overrides of CAMPAIGN_KEYS
    cells: list[str]  # overrides of CELL_KEYS, sweeps not expanded
    show_config: bool  # --cfg job
    only: tuple[str, ...] = ()  # which of the points run: lines of CELL_KEYS, without the `only.`


def read_arguments(arguments: Sequence[str]) -> Request:
    """Check what follows `sp-bench run`.

    Raises:
        ConfigError: an unknown flag, key, choice of a group, or value.
    """
    overrides, show_config = [], False
    remaining = iter(take_files(arguments))
    for argument in remaining:
        if argument in ("-m", "--multirun"):
            continue  # every run is a sweep, if only of one point
        if argument in ("-c", "--cfg"):
            if next(remaining, None) != "job":
                raise ConfigError(f"{argument} shows the composed config; use {argument} job")
            show_config = True
        elif argument.partition("=")[0] in OF_SUBMIT:
            raise ConfigError(
                f"{shown(argument)} is a flag of submit, which resumes too: its jobs run what has no row, and "
                "retry what `resume` retries. Use sp-bench submit, with the words of the run and --cluster NAME"
            )
        elif argument.startswith("-"):
            raise ConfigError(
                f"{shown(argument)} is not a flag of run and plan; write a field as KEY=VALUE, such as method=ring; "
                "flags: -m, --multirun, --cfg job, --help"
            )
        else:
            overrides.append(_as_typed(argument))
    only = [line.removeprefix(ONLY) for line in overrides if line.startswith(ONLY)]
    _check_only(only, show_config)
    parsed = parse_overrides(line for line in overrides if not line.startswith(ONLY))
    refuse_repeated(parsed)
    for override in parsed:
        key, line = override.key_or_group, shown(override.input_line)
        if key in CAMPAIGN_KEYS and override.is_sweep_override():
            raise ConfigError(f"{line}: a run has one {key}; only fields of a trial can be swept")
        if show_config and (key == "sweep" or override.is_sweep_override()):
            raise ConfigError(f"{line}: --cfg job shows one configuration and takes no sweeps")
    campaign = [str(override.input_line) for override in parsed if override.key_or_group in CAMPAIGN_KEYS]
    cells = [str(override.input_line) for override in parsed if is_cell_key(override.key_or_group)]
    return Request(campaign, cells, show_config, tuple(only))


def _as_typed(argument: str) -> str:
    """The argument with the text of a name or path in quotes: Hydra's grammar would read 2024_11_29 as a number, and
    refuse a folder with an equals sign."""
    key, _, text = argument.partition("=")
    is_word = re.fullmatch(r"[A-Za-z_][\w-]*", text) and text.lower() not in ("null", "true", "false", "nan", "inf")
    is_plain = text and text.isprintable() and text[0] not in "'\"" and "${" not in text
    if is_word or not is_plain or (key, text) == ("results_root", "null"):
        return argument
    if key == "results_root" or (key == "campaign" and not re.search("[,(]", text)):
        return f"{key}={QuotedString(text, Quote.single).with_quotes()}"
    return argument


def _check_only(lines: Sequence[str], show_config: bool) -> None:
    """Refuse `only.` words that name no field of a trial, or one twice, or come with --cfg job. lines: without
    `only.`."""
    parsed = parse_overrides(lines, ONLY)
    refuse_repeated(parsed, ONLY)
    for override in parsed:
        line = shown(f"{ONLY}{override.input_line}")
        if not is_cell_key(override.key_or_group):
            raise ConfigError(f"{line}: {override.key_or_group} holds for the whole run; give a field of a trial")
        if show_config:
            raise ConfigError(f"{line}: --cfg job shows one configuration, of which there is nothing to leave out")


def refuse_repeated(overrides: Sequence[Override], before: str = "") -> None:
    """Refuse a key that is given twice, and say how to sweep its values if that works. before: a prefix of the keys."""
    lines: dict[str, list[str]] = {}
    for override in overrides:
        lines.setdefault(override.key_or_group, []).append(f"{before}{override.input_line}")
    for key, given in lines.items():
        if len(given) == 1:
            continue
        together = ",".join(line.partition("=")[2] for line in given)
        items = dict.fromkeys(together.split(","))
        plain = not set("([{'\"") & set(together)  # range(1,3) cannot stand in a list
        can_sweep = is_cell_key(key) and len(items) > 1 and plain
        use = f"use {before}{key}={','.join(items)}" if can_sweep else "give it once"
        raise ConfigError(f"{shown(' '.join(given))}: {before}{key} is given {len(given)} times; {shown(use)}")


def replaced(lines: Iterable[str], above: Sequence[str]) -> list[str]:
    """`lines` without those whose key `above` sets, then `above`."""
    keys = {line.partition("=")[0] for line in above}
    return [*(line for line in lines if line.partition("=")[0] not in keys), *above]


def parse_overrides(lines: Iterable[str], before: str = "") -> list[Override]:
    """Check the names of `key=value` lines and parse them by Hydra's grammar. before: a prefix that the user's words
    have, for errors.

    Raises:
        ConfigError: not key=value, an unknown key or choice of a group, or a value that Hydra's grammar refuses.
    """
    parser = OverridesParser.create()
    parsed = []
    for line in lines:
        _check_key(line, before)
        text = shown(f"{before}{line}")
        try:
            override = parser.parse_override(line)
        except HydraException as error:
            raise ConfigError(f"{text}: {shown(_why_unreadable(line, error))}") from error
        if isinstance(override.value(), list):
            items = line.partition("=")[2].strip("[] ").replace(" ", "")
            use = f"{before}{override.key_or_group}={items}"
            raise ConfigError(f"{text}: values to sweep over have no brackets here; use {shown(use)}")
        if override.key_or_group in (*GROUPS, "sweep"):
            _check_choice(override)
        parsed.append(override)
    return parsed


def _check_key(line: str, before: str) -> None:
    """Refuse a line that is not `key=value` with a key of ours and a plain value."""
    text = shown(f"{before}{line}")
    if line.startswith(("+", "~")):
        raise ConfigError(f"{text}: keys cannot be added or deleted; set one with key=value")
    if line.startswith("hydra/"):
        raise ConfigError(f"{text}: Hydra's own groups are fixed; trials run on this machine only, one after another")
    if line.startswith("hydra"):
        raise ConfigError(
            f"{text}: Hydra's own settings are fixed; results_root=... and campaign=... say where rows go"
        )
    match = re.fullmatch(r"([A-Za-z_][\w.]*)=(.*)", line, re.DOTALL)
    if not match:
        raise ConfigError(f"{text}: expected key=value without spaces, such as method=ring or seq_len=2048,4096")
    key, value = match.groups()
    if "$" in value or "_target_" in line:
        raise ConfigError(f"{text}: values are plain; no interpolation ($) and no _target_")
    if key.startswith("fabric.env"):
        raise ConfigError(f"{text}: a fabric is known by its name; give these variables a file in conf/fabric")
    if key == METHOD_PATH:
        raise ConfigError(f"{text}: the file of a method is named on the command line only; here choose it by its name")
    known = (*CELL_KEYS, *CAMPAIGN_KEYS)
    if key in known or is_cell_key(key):
        return
    group, _, field = key.rpartition(".")
    if group in GROUPS and field == "name":
        raise ConfigError(f"{text}: choose it with {before}{group}={shown(value)}")
    raise ConfigError(
        f"{shown(key)} is not a field; {nearest(key, known)}"
        "sp-bench run --cfg job shows the fields of a run, and with method=NAME the options of that method"
    )


def _why_unreadable(line: str, error: Exception) -> str:
    """Explain why Hydra's grammar refuses a value; its own messages speak of tokens."""
    value = line.partition("=")[2]
    if re.search(r"^\s*,|,\s*,|,\s*$", value):
        return "a value is missing beside a comma; there are no spaces around commas, as in sp_size=2,4"
    if "=" in value:
        return "a value with = in it needs quotes; is this two words, each key=value?"
    _, of_a_function, reason = str(error).partition(" while evaluating ")
    if of_a_function:
        return reason.splitlines()[0]
    return "no such value; use a number, plain text, text in quotes, a list such as 2,4, or range(start,stop,step)"


def _check_choice(override: Override) -> None:
    """Refuse a choice that has no file in the group's folder, or whose file is wrong."""
    group = override.key_or_group
    if isinstance(override.value(), RangeSweep | IntervalSweep):
        line = shown(override.input_line)
        raise ConfigError(f"{line}: give names; {group} is one of {', '.join(names(group))}")
    for choice in values(override):
        if choice not in names(group):
            hint = nearest(choice, names(group))
            given = "null" if choice is None else shown(choice)
            raise ConfigError(f"{group}={given}: {hint}{group} is one of {', '.join(names(group))}")
        if choice in choices(group):
            check_file(group, choice)


def values(override: Override) -> list[Any]:
    """The values that an override gives to its key, one after another."""
    value: Any = override.value()
    if isinstance(value, Glob):
        return value.filter(names(override.key_or_group))
    if not override.is_sweep_override():
        return [value]
    return [item.text if isinstance(item, QuotedString) else item for item in override.sweep_iterator()]


def count_values(override: Override) -> int:
    """How many values an override sweeps over. A range is counted without being expanded.

    Raises:
        ConfigError: an interval, or a range that does not end.
    """
    value, line = override.value(), shown(override.input_line)
    if isinstance(value, IntervalSweep):
        raise ConfigError(f"{line}: an interval has no points; list values or use range(start,stop)")
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return len(values(override))
    start, stop, step = (Decimal(str(end)) for end in (value.start, value.stop, value.step))
    if not all(end.is_finite() for end in (start, stop, step)) or step == 0:
        raise ConfigError(f"{line}: a range has finite ends and a step other than 0")
    return max(0, math.ceil((stop - start) / step))
