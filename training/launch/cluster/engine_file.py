"""The engine that runs training: `engine.yaml` in PEDIGREE_HOME. The platform writes it, and a recipe names a profile.

    engine: slurm
    profiles:
      default:
        sbatch: {partition: gpu, account: nlp, time: 4:00:00, gpus-per-node: 8}
        srun: {container-image: /images/pedigree.sqsh}
        setup: module load cuda
      big: {sbatch: {partition: gpu-big, time: 24:00:00}}

`sbatch` and `srun` take any long option; `true` makes it a switch. A profile adds to `default`. Without the file, jobs run on
this machine.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from training.contract.config.fields import Count, StrictModel
from training.contract.errors import EngineError

ENGINE_FILE = "engine.yaml"
DEFAULT = "default"
# Options that the launcher sets itself.
_OURS = {
    *("job-name", "dependency", "output", "error", "open-mode", "requeue", "no-requeue", "signal", "parsable", "wrap"),
    *("nodes", "ntasks", "ntasks-per-node", "array", "chdir", "comment"),
}
_EXAMPLE = """\
    engine: slurm
    profiles:
      default: {sbatch: {partition: gpu, time: 4:00:00, gpus-per-node: 8}}"""


def _not_ours(name: str) -> str:
    if name in _OURS:
        raise ValueError(f"the option --{name} is set by Pedigree: remove it")
    return name


OptionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]+$"), AfterValidator(_not_ours)]
Options = dict[OptionName, str]


class SlurmProfile(StrictModel):
    """Options of sbatch and of srun, and lines of the shell before srun, such as `module load cuda`."""

    sbatch: Options = Field(default_factory=dict)
    srun: Options = Field(default_factory=dict)
    setup: str = ""


class SlurmEngine(StrictModel):
    """Jobs in the queue of Slurm. `python`: the interpreter on the nodes, if it is elsewhere there.

    `before_time_limit`: seconds before the limit in which a job saves a checkpoint and queues itself again.
    """

    engine: Literal["slurm"]
    profiles: dict[str, SlurmProfile] = Field(default_factory=dict)
    python: str | None = None
    before_time_limit: Count = 120

    def profile(self, name: str | None, path: Path) -> SlurmProfile:
        """Return a profile over `default`. Raises EngineError for an unknown name."""
        default = self.profiles.get(DEFAULT, SlurmProfile())
        if name is None or name == DEFAULT:
            return default
        if name not in self.profiles:
            known = ", ".join(sorted({DEFAULT, *self.profiles}))
            raise EngineError(
                f"`compute.queue: {name}`, but {path} has the profiles {known}; add it there, or name one of these",
                "unknown-profile",
            )
        own = self.profiles[name]
        return SlurmProfile(
            sbatch={**default.sbatch, **own.sbatch}, srun={**default.srun, **own.srun}, setup=own.setup or default.setup
        )


class LocalEngine(StrictModel):
    """Jobs on this machine."""

    engine: Literal["local"]


Engine = SlurmEngine | LocalEngine
_FILE: TypeAdapter[Engine] = TypeAdapter(Annotated[Engine, Field(discriminator="engine")])


def read_engine(path: Path) -> Engine:
    """Return the content of the file; the local engine without a file. Raises EngineError with each wrong field.

    All values are read as text: YAML would read the time 4:00:00 as the number 14,400.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except FileNotFoundError:
        return LocalEngine(engine="local")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(f"{path} cannot be read: {error}; correct it", "engine-file") from error
    try:
        return _FILE.validate_python(content)
    except ValidationError as error:
        faults = "; ".join(_fault(fault["loc"], fault["input"], fault["msg"]) for fault in error.errors())
        raise EngineError(f"{path}: {faults}. Expected for example\n{_EXAMPLE}", "engine-file") from None


def _fault(place: tuple[int | str, ...], value: Any, message: str) -> str:
    parts = [str(part) for part in place if part not in ("slurm", "local", "[key]")]
    return f"`{'.'.join(parts)}`: {value!r}: {message}" if parts else f"{value!r}: {message}"
