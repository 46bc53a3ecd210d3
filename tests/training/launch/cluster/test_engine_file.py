"""engine.yaml: what each profile gives, and errors with the file, the field and the value."""

from pathlib import Path

import pytest

from training.contract.errors import EngineError
from training.launch.cluster.engine_file import LocalSettings, SlurmSettings, read_engine

TWO = """
engine: slurm
profiles:
  default:
    sbatch: {partition: gpu, time: 4:00:00, exclusive: true, nice: 010}
    setup: |
      module load cuda
      module load nccl
  big: {sbatch: {partition: gpu-big, qos: high}, srun: {container-image: /images/a.sqsh}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def slurm(file: Path, content: str) -> SlurmSettings:
    file.write_text(content)
    engine = read_engine(file)
    assert isinstance(engine, SlurmSettings)
    return engine


def test_read_engine_without_a_file_is_local(file: Path) -> None:
    assert read_engine(file) == LocalSettings(engine="local")


def test_profile_keeps_values_as_they_are_written(file: Path) -> None:
    """YAML 1.1 reads 4:00:00 as 14400, which Slurm would take for minutes, and 010 as 8."""
    default = slurm(file, TWO).profile(None, file)
    assert default.sbatch == {"partition": "gpu", "time": "4:00:00", "exclusive": "true", "nice": "010"}
    assert default.setup == "module load cuda\nmodule load nccl\n"


def test_profile_adds_to_the_default(file: Path) -> None:
    big = slurm(file, TWO).profile("big", file)
    expected = {"partition": "gpu-big", "time": "4:00:00", "exclusive": "true", "nice": "010", "qos": "high"}
    assert big.sbatch == expected and big.srun == {"container-image": "/images/a.sqsh"}
    assert big.setup.startswith("module load cuda")


def test_unknown_profile_names_the_known_ones(file: Path) -> None:
    with pytest.raises(EngineError, match=r"`compute.queue: huge`.* big, default;.*\[unknown-profile\]") as caught:
        slurm(file, TWO).profile("huge", file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ("engine: pbs\n", ["pbs", "slurm"]),
        ("profiles: {}\n", ["engine"]),
        ("[1, 2]\n", []),
        ("engine: slurm\nprofile: {}\n", [".yaml:2: `profile`"]),
        ("engine: slurm\n\nbefore_time_limit: soon\n", [".yaml:3: `before_time_limit`", "'soon'"]),
        ("engine: slurm\nprofiles:\n  a:\n    sbatch:\n      gres: [gpu]\n", [".yaml:5: `profiles.a.sbatch.gres`"]),
        ("engine: ray\nprofiles: {}\n", [".yaml:1: `address`"]),
        ("engine: slurm\nprofiles: {a: {sbatch: {-p: gpu}}}\n", ["`profiles.a.sbatch.-p`"]),
        ("engine: slurm\nprofiles: {a: {sbatch: {nodes: 3}}}\n", ["`profiles.a.sbatch.nodes`", "--nodes", "remove it"]),
        ("engine: slurm\nprofiles: {a: {sbatch: {gres: [gpu]}}}\n", ["`profiles.a.sbatch.gres`"]),
        ("engine: [slurm\n", ["line 2"]),
    ],
)
def test_wrong_file_is_refused_with_its_field(file: Path, content: str, values: list[str]) -> None:
    file.write_text(content)
    with pytest.raises(EngineError) as caught:
        read_engine(file)
    message = str(caught.value)
    assert str(file) in message and "[engine-file]" in message
    assert [value for value in values if value not in message] == []
