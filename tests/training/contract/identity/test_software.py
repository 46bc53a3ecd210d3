"""The digest of a package's source."""

import hashlib
import shutil
from pathlib import Path

import training
from training.contract.identity.software import source_digest


def test_source_digest_depends_on_bytes_and_names_of_sources_only(tmp_path: Path):
    """Compiled files do not count."""
    package = Path(training.__file__).parent
    copies = [
        shutil.copytree(package, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")) for name in "abcd"
    ]
    (copies[0] / "__pycache__").mkdir()
    (copies[0] / "__pycache__" / "losses.pyc").write_bytes(b"bytecode")
    (copies[1] / "main.py").write_bytes((package / "main.py").read_bytes() + b"\n")
    (copies[2] / "main.py").rename(copies[2] / "circle.py")
    with open(copies[3] / "evaluation" / "templates" / "report.html.j2", "a") as template:
        template.write("\n")
    digests = [source_digest(copy) for copy in copies]
    assert digests[0] == source_digest()
    assert len(set(digests)) == 4


def test_source_digest_is_sha256_of_names_and_bytes_with_lengths(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.py").write_bytes(b"two")
    (tmp_path / "a.py").write_bytes(b"one")
    expected = hashlib.sha256(b'[1,"source"]')
    for part in (b"a.py", b"one", b"b/x.py", b"two"):
        expected.update(len(part).to_bytes(8, "big") + part)
    assert source_digest(tmp_path) == expected.hexdigest()
