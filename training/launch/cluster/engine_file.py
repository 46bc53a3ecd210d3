"""The engine that runs training: `engine.yaml` in PEDIGREE_HOME. The platform writes it, and a recipe names a profile.

    engine: slurm
    profiles:
      default:
        sbatch: {partition: gpu, account: nlp, time: 4:00:00, gpus-per-node: 8}
        srun: {container-image: /images/pedigree.sqsh}
        setup: module load cuda
      big: {sbatch: {partition: gpu-big, time: 24:00:00}}

`sbatch` and `srun` take any long option; `true` makes it a switch. A profile adds to `default`.

    engine: ray
    address: http://head:8265
    profiles: {default: {resources: {GPU: 8}}}

`concurrent: 4` lets four jobs of this home wait or run at once. Without the file, jobs run on this machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from training.contract.config.fields import Count, StrictModel
from training.contract.errors import EngineError
from training.contract.protocol.job import Job

ENGINE_FILE = "engine.yaml"
DEFAULT = "default"
_CONCURRENT = "How many jobs of this home may wait or run at once."
_PROFILES = "Profiles by name. `compute.queue` of a recipe selects one; it adds to `default`."
_PYTHON = "The interpreter on the nodes, if it is elsewhere there."
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
    """A profile of Slurm."""

    sbatch: Options = Field(default_factory=dict, description="Long options of sbatch; `true` makes one a switch.")
    srun: Options = Field(default_factory=dict, description="Long options of srun, such as `container-image` of pyxis.")
    setup: str = Field("", description="Lines of the shell before srun, such as `module load cuda`.")


class RayProfile(StrictModel):
    """A profile of Ray, with resources by Ray's names, such as GPU."""

    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="What a job reserves on each node; by default a core a process, and a GPU for `device: cuda`.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Variables of the job's processes. They get no others of the run."
    )

    def resources_for(self, job: Job) -> dict[str, float]:
        if self.resources:
            return self.resources
        names = ("CPU", "GPU") if job.compute.device == "cuda" else ("CPU",)
        return dict.fromkeys(names, float(job.processes))

    def threads_of(self, job: Job) -> int | None:
        """Return the threads of a process: those of `env`, or a share of the reserved cores; None for a share of all cores."""
        if (wanted := self.env.get("OMP_NUM_THREADS")) is not None:
            return int(wanted)
        return max(1, int(self.resources["CPU"]) // job.processes) if "CPU" in self.resources else None


class LocalSettings(StrictModel):
    """The engine `local`."""

    engine: Literal["local"] = Field(description="Jobs on this machine.")
    concurrent: Count = Field(1, description="How many jobs of this home may use GPUs at once.")


class SlurmSettings(StrictModel):
    """The engine `slurm`."""

    engine: Literal["slurm"] = Field(description="Jobs in the queue of Slurm.")
    concurrent: Count = Field(1, description=_CONCURRENT)
    profiles: dict[str, SlurmProfile] = Field(default_factory=dict, description=_PROFILES)
    python: str | None = Field(None, description=_PYTHON)
    before_time_limit: Count = Field(
        120, description="Seconds before the limit in which a job saves a checkpoint and queues itself again."
    )

    def profile(self, name: str | None, path: Path) -> SlurmProfile:
        """Return a profile over `default`. Raises EngineError for an unknown name."""
        default, own = _find(self.profiles, SlurmProfile(), name, path)
        return SlurmProfile(
            sbatch={**default.sbatch, **own.sbatch}, srun={**default.srun, **own.srun}, setup=own.setup or default.setup
        )


class RaySettings(StrictModel):
    """The engine `ray`."""

    engine: Literal["ray"] = Field(description="Jobs in a cluster of Ray.")
    address: str = Field(description="Ray's dashboard, which has the Jobs API, such as `http://head:8265`.")
    concurrent: Count = Field(1, description=_CONCURRENT)
    profiles: dict[str, RayProfile] = Field(default_factory=dict, description=_PROFILES)
    python: str | None = Field(None, description=_PYTHON)

    def profile(self, name: str | None, path: Path) -> RayProfile:
        """Return a profile over `default`. Raises EngineError for an unknown name."""
        default, own = _find(self.profiles, RayProfile(), name, path)
        return RayProfile(resources={**default.resources, **own.resources}, env={**default.env, **own.env})


Profile = TypeVar("Profile")


def _find(profiles: Mapping[str, Profile], empty: Profile, name: str | None, path: Path) -> tuple[Profile, Profile]:
    """Return the profile `default` and the one with this name. Raises EngineError for an unknown name."""
    default = profiles.get(DEFAULT, empty)
    if name is None or name == DEFAULT:
        return default, default
    if name not in profiles:
        known = ", ".join(sorted({DEFAULT, *profiles}))
        raise EngineError(
            f"`compute.queue: {name}`, but {path} has the profiles {known}; add it there, or name one of these",
            "unknown-profile",
        )
    return default, profiles[name]


Settings = LocalSettings | SlurmSettings | RaySettings
_FILE: TypeAdapter[Settings] = TypeAdapter(Annotated[Settings, Field(discriminator="engine")])


def read_engine(path: Path) -> Settings:
    """Return the content of the file; the local engine without a file. Raises EngineError with each wrong field.

    All values are read as text: YAML would read the time 4:00:00 as the number 14,400.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content, root = yaml.load(text, Loader=yaml.BaseLoader), yaml.compose(text, Loader=yaml.BaseLoader)
    except FileNotFoundError:
        return LocalSettings(engine="local")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(f"{path} cannot be read: {error}; correct it", "engine-file") from error
    try:
        return _FILE.validate_python(content)
    except ValidationError as error:
        faults = "; ".join(_fault(path, root, fault["loc"], fault["input"], fault["msg"]) for fault in error.errors())
        raise EngineError(f"{faults}. Expected for example\n{_EXAMPLE}", "engine-file") from None


def _fault(path: Path, root: yaml.Node | None, place: tuple[int | str, ...], value: Any, message: str) -> str:
    """Return the fault with file, line and field. pydantic puts the kind of the engine, and `[key]`, into the place."""
    parts = [str(part) for part in place if part not in ("slurm", "ray", "local", "[key]")]
    field = f" `{'.'.join(parts)}`:" if parts else ""
    return f"{path}:{_line_of(root, parts)}:{field} {value!r}: {message}"


def _line_of(node: yaml.Node | None, parts: Sequence[str]) -> int:
    """Return the line of a field; of the section that lacks it, if it is missing."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in parts:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = next(((key, inner) for key, inner in pairs if key.value == part), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
