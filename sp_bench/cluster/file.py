"""Files of conf/cluster: how jobs are requested on one cluster.

Its values become directives of a batch script, so each is checked: no text can end its directive and begin another.
"""

import re
from dataclasses import dataclass

from sp_bench.config.parsing import ConfigError, nearest, parse, shown
from sp_bench.planning import overrides

GROUP = "cluster"
PLACE = "{gpus}"  # in `gres`: the number of GPUs of a job
# no blank, no quote, no #, no leading dash
_DIRECTIVE = re.compile(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:;&|*()\[\]{}+=@/-]*")
_OPTION = re.compile(r"--([a-z][a-z-]*)(?:=(.+))?")
# What texts of the file become: field -> option of sbatch
DIRECTIVES = {
    "account": "account",
    "partition": "partition",
    "qos": "qos",
    "constraint": "constraint",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "reservation": "reservation",
    "gres": "gres",
    "memory": "mem",
}
# Options of sbatch that a batch script sets, or that would change where and when its command runs
OWN_OPTIONS = {
    *(*DIRECTIVES.values(), "job-name", "nodes", "ntasks", "cpus-per-task", "time", "signal", "exclusive"),
    *("output", "error", "open-mode", "requeue", "no-requeue"),
    *("array", "wrap", "chdir", "export", "export-file", "uid", "gid"),
}


@dataclass(frozen=True)
class ClusterConfig:
    """One cluster. conf/cluster/slurm.yaml says what each field means."""

    name: str
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    gpus_per_node: int = 8
    gres: str = f"gpu:{PLACE}"
    cpus_per_task: int | None = None
    memory: str | None = None
    exclusive: bool = False
    time_limit_minutes: int = 1440
    sbatch: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    sp_bench: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in DIRECTIVES:
            if (value := getattr(self, field)) is not None and not _DIRECTIVE.fullmatch(value):
                raise ConfigError(
                    f"{field}: {shown(repr(value))} cannot stand in a batch script: use letters, digits and "
                    "_.,:;&|*()[]+=@/-, without blanks and not beginning with a dash"
                )
        if PLACE not in self.gres:
            raise ConfigError(f"gres: {self.gres} does not say how many: write {PLACE} there, as in gpu:{PLACE}")
        for field, least in (("gpus_per_node", 0), ("cpus_per_task", 1), ("time_limit_minutes", 1)):
            if (value := getattr(self, field)) is not None and value < least:
                raise ConfigError(f"{field}: {value} is less than {least}; use more")
        for word in self.sbatch:
            match = _OPTION.fullmatch(word)
            if not match or not _DIRECTIVE.fullmatch(match[2] or "x"):
                raise ConfigError(
                    f"sbatch: {shown(repr(word))} is not --option or --option=value with letters, digits and "
                    "_.,:;&|*()[]+=@/-"
                )
            own = [each for each in OWN_OPTIONS if each.startswith(match[1])]  # sbatch takes short forms too
            if own:
                raise ConfigError(
                    f"sbatch: --{match[1]} would change what sp-bench sets itself (--{min(own, key=len)}); remove it, "
                    "or use the key of this file, if there is one"
                )
        for field in ("setup", "container", "sp_bench"):
            for text in getattr(self, field):
                if not text.strip() or not text.isprintable():
                    raise ConfigError(f"{field}: {shown(repr(text))} must be one line of printable text")
            if (texts := getattr(self, field)) and texts[0].startswith("-"):
                raise ConfigError(f"{field}: {shown(texts[0])} begins with a dash; a command begins with its name")

    @property
    def same_packages(self) -> bool:
        """Whether jobs run with this Python, and so with its packages."""
        return not self.container and not self.sp_bench


def read(name: str) -> ClusterConfig:
    """The cluster that a file of conf/cluster describes, ours or the user's.

    Raises:
        ConfigError: no such file, a file that is not YAML, an unknown key, or a value that no batch script can hold.
    """
    known = overrides.choices(GROUP)
    if name not in known:
        raise ConfigError(
            f"--cluster {shown(name)}: {nearest(name, known)}files of conf/cluster: {', '.join(known)}; yours go into "
            "./conf/cluster"
        )
    content = overrides.conf_file(f"{GROUP}/{name}", for_hydra=False)  # lines of bash may have ${...}
    try:
        if content.get("name") != name:
            raise ConfigError(f"name: {shown(content.get('name'))} is not the file's own: write name: {name}")
        return parse(ClusterConfig, content)
    except ConfigError as error:
        raise ConfigError(f"{overrides.called(f'{GROUP}/{name}')}: {error}") from None
