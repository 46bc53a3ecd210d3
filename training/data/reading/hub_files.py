"""The files of a data set of the hub: those of one config and one split of one commit, downloaded into the hub's cache.

Which files belong to a config and a split is a convention of the library `datasets`: the `configs` of the repository's card
decide, else the names of folders and files. So that library is asked, about a folder of empty files with the names of all
files: this costs no download, no request, and no copy of the data in another format. The files themselves are read like
local ones, which keeps the line of each row, and does not turn `null` or `NA` in a CSV file into a missing value.
"""

import glob
from collections.abc import Sequence
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

import datasets

from training.contract.config.data_source import DataSource
from training.contract.errors import DataError
from training.contract.files.hub import CARD, CARD_FILES, Repository, check_files
from training.contract.files.local_files import SUFFIXES, DataFile, is_readable
from training.contract.protocol.events import EventWriter

# What `datasets` reads to find configs and splits; the last is a format of old versions.
_READ_TO_DIVIDE = (*CARD_FILES, "dataset_infos.json")
_LONGEST_LIST = 20


def hub_files(source: DataSource, events: EventWriter) -> list[DataFile]:
    """The files of `source`, whose revision is a commit, in order. Raises DataError, and HubError where they cannot be had."""
    assert source.hub is not None and source.revision is not None
    repository = Repository(source.hub, "dataset", source.revision)
    names = _names(source, repository)
    for name in names:
        if not is_readable(PurePath(name)):
            raise DataError(
                f"{name} of the data set {source.hub} is none of {', '.join(SUFFIXES)}, plain or with .gz; download it, write "
                f"it as one of these, and use `path`"
            )
    folder = repository.fetch(source.revision, [glob.escape(name) for name in names], emit=events.emit)
    check_files([folder / name for name in names])
    return [DataFile(name=f"{source.hub}/{name}", path=folder / name) for name in names]


def _names(source: DataSource, repository: Repository) -> list[str]:
    assert source.hub is not None and source.revision is not None
    listed = [name for name in repository.files(source.revision) if not {"/", ".."} & {*PurePath(name).parts}]
    script = f"{source.hub.rpartition('/')[2]}.py"
    if script in listed:
        raise DataError(
            f"the data set {source.hub} is made by a script, {script}, and code of a repository is never run; use one that "
            "holds its data as files, or download it and use `path`"
        )
    dividing = [name for name in _READ_TO_DIVIDE if name in listed]
    downloaded = repository.fetch(source.revision, dividing) if dividing else Path()
    with TemporaryDirectory() as place:
        folder = Path(place).resolve() / "data"
        for name in listed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((downloaded / name).read_bytes() if name in dividing else b"")
        found = _split(source, folder)
    names = {str(folder / name): name for name in listed}
    if other := [file for file in found if file not in names]:
        raise DataError(
            f"{CARD} of the data set {source.hub} names {other[0].removeprefix(f'{folder}/')}, which is not in it; "
            "download what you need and use `path`"
        )
    return [names[file] for file in found]


def _split(source: DataSource, folder: Path) -> list[str]:
    """The files of the split, as `datasets` finds them in `folder`."""
    try:
        configs = datasets.get_dataset_config_names(str(folder))
        config = source.config or datasets.get_dataset_default_config_name(str(folder))
    except Exception as error:  # the library raises many kinds of errors: no file it knows, a broken card
        raise DataError(
            f"the data set {source.hub} cannot be understood: {str(error).replace(str(folder), source.hub or '')}; look at its "
            f"{CARD}, or download it and use `path`"
        ) from error
    if config is None or config not in configs:
        wanted = f"has no config {source.config!r}" if source.config else "has several configs and no default"
        raise DataError(f"the data set {source.hub} {wanted}; set `config` of the data source to {_one_of(configs)}")
    files = datasets.load_dataset_builder(str(folder), config, cache_dir=str(folder.parent / "cache")).config.data_files
    if source.split not in files:
        raise DataError(
            f"the data set {source.hub} has no split {source.split!r} in its config {config!r}; set `split` of the data source "
            f"to {_one_of(list(files))}"
        )
    return [str(file) for file in files[source.split]]


def _one_of(names: Sequence[str]) -> str:
    more = ["..."] if len(names) > _LONGEST_LIST else []
    return f"one of {', '.join([*map(str, names[:_LONGEST_LIST]), *more])}" if len(names) > 1 else f"`{names[0]}`"
