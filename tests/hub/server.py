"""A hub on this machine: the part of the Hugging Face hub's HTTP protocol that real clients use to read repositories.

    /api/models/ID/revision/REV          the commit of a branch or of a commit id
    /api/models/ID/tree/COMMIT           the files of a commit, ten a page, the next page named in a `Link` header
    /ID/resolve/REV/PATH                 a file: HEAD gives ETag and X-Repo-Commit, GET the bytes, also from a `Range`
    /blobs/SHA256                        large files, to which `resolve` redirects; under another host's name, as on the
                                         hub, so that a client must not send its token along

The same with `datasets/` in front of ID. Errors carry the hub's `X-Error-Code`. A test commits files, sets faults, and
afterwards reads the requests in `requests`.
"""

import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".bin")  # what a repository keeps in its large file storage, by hash
PAGE = 10
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/?(revision|tree)?/?([^/]*)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Commits with the bytes of their files, and the head of `main`. If `token` is set, only its holder may read."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    token: str | None = None
    gated: bool = False


@dataclass
class Fault:
    """A fault of the next `times` requests with `part` in their path: a status with headers, or an end after `cut` bytes."""

    part: str
    times: int
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None


@dataclass
class Request:
    method: str
    path: str
    authorization: str | None
    range: str | None


@dataclass
class Hub:
    """The repositories, faults and requests of one server. `endpoint` is the value of HF_ENDPOINT."""

    endpoint: str = ""
    blobs: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    server: "_Server | None" = None

    @contextmanager
    def out_of_reach(self) -> Iterator[None]:
        """Within the block break every connection before an answer, and count none."""
        assert self.server is not None
        self.server.deaf = True
        self.server.disconnect()
        try:
            yield
        finally:
            self.server.deaf = False

    def commit(self, name: str, files: Mapping[str, bytes | str]) -> str:
        """Make `files` the head of `name`, `models/ORG/NAME` or `datasets/ORG/NAME`."""
        content = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}
        repository = self.repositories.setdefault(name, Repository())
        identity = [name, len(repository.commits), sorted((path, _blob(data)) for path, data in content.items())]
        commit = hashlib.sha1(json.dumps(identity).encode()).hexdigest()
        repository.commits[commit] = content
        repository.head = commit
        return commit

    def amend(self, name: str, changes: Mapping[str, bytes | str]) -> str:
        """Commit the head's files with some of them changed or added."""
        repository = self.repositories[name]
        return self.commit(name, {**repository.commits[repository.head], **changes})

    def asked(self, part: str = "") -> list[str]:
        """Return the requests with `part` in their path, in order, as `METHOD path`."""
        return [f"{r.method} {r.path}" for r in self.requests if part in r.path]


@contextmanager
def serving(hub: Hub | None = None) -> Iterator[Hub]:
    """Serve `hub`, by default an empty one, on the loopback interface until the end of the block."""
    hub = hub or Hub()
    with _Server(("127.0.0.1", int(hub.endpoint.rpartition(":")[2] or 0)), partial(_Handler, hub)) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        hub.blobs = f"http://localhost:{server.server_port}/blobs"
        hub.server = server
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield hub
        finally:
            hub.server.stop()
            thread.join()


class _Server(ThreadingHTTPServer):
    """An HTTP server that closes open connections when it stops. If `deaf`, it closes each connection unanswered."""

    daemon_threads = True
    deaf = False

    def __init__(self, *args: Any) -> None:
        self._connected: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.deaf:
            self.shutdown_request(request)
            return
        self._connected.add(request)
        super().process_request(request, client_address)

    def disconnect(self) -> None:
        for connection in self._connected:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connected.clear()

    def stop(self) -> None:
        self.shutdown()
        self.disconnect()


def _blob(data: bytes) -> str:
    """Return Git's name for a file's bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Refused(Exception):
    def __init__(self, status: int, code: str, text: str) -> None:
        self.status, self.code, self.text = status, code, text


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the test reads `hub.requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        headers = (self.headers.get("Authorization"), self.headers.get("Range"))
        self.hub.requests.append(Request(self.command, path, *headers))
        self.fault = self._fault(path)
        try:
            if self.fault is not None and self.fault.status:
                self._send(self.fault.status, b"{}", **self.fault.headers)
            elif path.startswith("/blobs/"):
                self._send_file(self._large(path.rpartition("/")[2]))
            elif match := _API.fullmatch(path):
                self._api(parse_qs(parts.query), *match.groups())
            elif match := _FILE.fullmatch(path):
                self._resolve(*match.groups())
            else:
                self._send(404, b"{}")
        except _Refused as refused:
            body = json.dumps({"error": refused.text}).encode()
            self._send(refused.status, body, **{"X-Error-Code": refused.code, "X-Error-Message": refused.text})

    def _fault(self, path: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times and fault.part in path and (fault.cut is None or self.command == "GET"):
                fault.times -= 1
                return fault
        return None

    def _commit(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Return the commit of a repository. Without permission the hub answers 401, whether the repository exists or not."""
        repository = self.hub.repositories.get(f"{kind}/{name}")
        bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is not None and repository.gated and repository.token != bearer:
            raise _Refused(401, "GatedRepo", f"Access to {name} is restricted. You must have access to it.")
        if repository is None or repository.token not in (None, bearer):
            raise _Refused(401, "RepoNotFound", "Repository not found")
        commit = repository.head if revision == "main" else revision
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def _api(self, query: dict[str, list[str]], kind: str, name: str, what: str | None, revision: str) -> None:
        commit, files = self._commit(kind, name, revision or "main")
        if what != "tree":
            about = {"id": name, "sha": commit, "tags": [], "siblings": [{"rfilename": path} for path in files]}
            self._send(200, json.dumps(about).encode())
            return
        begin = int(query.get("cursor", ["0"])[0])
        listed = [_entry(path, data) for path, data in sorted(files.items())]
        following = f"{self.hub.endpoint}/api/{kind}/{name}/tree/{commit}?recursive=True&cursor={begin + PAGE}"
        more = {"Link": f'<{following}>; rel="next"'} if begin + PAGE < len(listed) else {}
        self._send(200, json.dumps(listed[begin : begin + PAGE]).encode(), **more)

    def _resolve(self, prefix: str | None, name: str, revision: str, path: str) -> None:
        commit, files = self._commit("datasets" if prefix else "models", name, revision)
        if path not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        data, about = files[path], {"X-Repo-Commit": commit}
        if not path.endswith(LARGE):
            self._send_file(data, ETag=f'"{_blob(data)}"', **about)
            return
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{_sha256(data)}"'}
        self._send(302, b"", Location=f"{self.hub.blobs}/{_sha256(data)}", **linked, **about)

    def _large(self, sha256: str) -> bytes:
        commits = (files for repository in self.hub.repositories.values() for files in repository.commits.values())
        return next(data for files in commits for data in files.values() if _sha256(data) == sha256)

    def _send_file(self, data: bytes, **headers: str) -> None:
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begin is None:
            self._send(200, data, **headers)
            return
        at = int(begin[1])
        self._send(206, data[at:], **headers, **{"Content-Range": f"bytes {at}-{len(data) - 1}/{len(data)}"})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.cut is not None:
            self.wfile.write(body[: self.fault.cut])
            self.close_connection = True
            return
        self.wfile.write(body)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
    if path.endswith(LARGE):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
    return entry
