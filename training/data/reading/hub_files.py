"""Download the files of one config and one split of a data set of the Hub, at one commit, into the Hub's cache.

The library `datasets` decides which files belong to a config and a split, by the `configs` of the repository's card or by the
names of folders and files. We call it on a folder of empty files with the same names. This needs no download, request or
converted copy of the data. Then we read the files like local files: rows keep their line numbers, and `null` or `NA` in CSV
stays text.
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

# The files that `datasets` reads to find configs and splits. The last is from old versions.
_CONFIG_FILES = (*CARD_FILES, "dataset_infos.json")
_LONGEST_LIST = 20


def hub_files(source: DataSource, events: EventWriter) -> list[DataFile]:
    """Return the files of `source` in order. Its revision is a commit. Raises DataError; HubError if a download fails."""
    assert source.hub is not None and source.revision is not None
    repository = Repository(source.hub, "dataset", source.revision)
    names = _names(source, repository)
    for name in names:
        if not is_readable(PurePath(name)):
            raise DataError(
                f"{name} of the data set {source.hub} cannot be read; expected {', '.join(SUFFIXES)}, plain or with .gz; "
                "download it, write it as one of these, and use `path`",
                "data-suffix",
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
            f"the data set {source.hub} is made by a script, {script}; Pedigree never runs code of a repository: use a data "
            "set of files, or download the rows and use `path`",
            "data-set-script",
        )
    config_files = [name for name in _CONFIG_FILES if name in listed]
    downloaded = repository.fetch(source.revision, config_files) if config_files else Path()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "data"
        for name in listed:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((downloaded / name).read_bytes() if name in config_files else b"")
        files = _files_of_split(source, folder)
    names = {str(folder / name): name for name in listed}
    if missing := [file for file in files if file not in names]:
        raise DataError(
            f"{CARD} of the data set {source.hub} names {missing[0].removeprefix(f'{folder}/')}, but the data set lacks it; "
            "download the files you need and use `path`",
            "data-set-file-missing",
        )
    return [names[file] for file in files]


def _files_of_split(source: DataSource, folder: Path) -> list[str]:
    """Return the files of the split, as `datasets` finds them in `folder`."""
    try:
        configs = datasets.get_dataset_config_names(str(folder))
        config = source.config or datasets.get_dataset_default_config_name(str(folder))
    except Exception as error:  # the library raises many kinds: unknown files, a broken card
        raise DataError(
            f"`datasets` finds no config in the data set {source.hub}: {str(error).replace(str(folder), source.hub or '')}; "
            f"look at its {CARD}, or download it and use `path`",
            "data-set-layout",
        ) from error
    if config is None or config not in configs:
        problem = f"lacks the config {source.config!r}" if source.config else "has several configs without a default"
        raise DataError(
            f"the data set {source.hub} {problem}; set `config` of the data source to {_one_of(configs)}",
            "data-set-config",
        )
    files = datasets.load_dataset_builder(str(folder), config, cache_dir=str(folder.parent / "cache")).config.data_files
    if source.split not in files:
        raise DataError(
            f"the data set {source.hub} lacks the split {source.split!r} in its config {config!r}; set `split` of the source "
            f"to {_one_of(list(files))}",
            "data-set-split",
        )
    return [str(file) for file in files[source.split]]


def _one_of(names: Sequence[str]) -> str:
    more = ["..."] if len(names) > _LONGEST_LIST else []
    return f"one of {', '.join([*map(str, names[:_LONGEST_LIST]), *more])}" if len(names) > 1 else f"`{names[0]}`"
