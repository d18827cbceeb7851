"""A Hugging Face hub on this machine: the part of its protocol that tapfm uses, spoken over real HTTP."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_good"
OPENED = "MahmoodLab/UNI2-h"  # by TOKEN
SILENT = "paige-ai/Virchow2"  # answers with a fault of its own
GATED = ("lab/gated", "MahmoodLab/UNI", "bioptimus/H-optimus-1")
OWNER = "lab"  # whose repositories TOKEN may write

Answer = tuple[int, dict[str, str], bytes]


class Hub:
    """lab/open gives `weights`; some repositories are gated; all others are said not to exist, until they are made.

    `private` says of the repositories that were made whether they are private, `pushed` which files they hold.
    """

    def __init__(self, weights: bytes = b"") -> None:
        self.weights = weights
        self.asked: list[tuple[str, str]] = []
        self.endpoint = ""
        self.private: dict[str, bool] = {}
        self.pushed: dict[str, dict[str, bytes]] = {}
        self._large_files: dict[str, bytes] = {}

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a process of its own: the hub's client reads its settings once, at import."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home / "hf"), "TAPFM_CACHE": str(home / "cache")}
        return plain | ours | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"} | more

    def answer(self, method: str, path: str, token: str, body: bytes) -> Answer:
        self.asked.append((method, path))
        if method in ("GET", "HEAD"):
            return self._give(path, token)
        return self._take(path, body) if token == TOKEN or path.startswith("/large-files/") else (401, {}, b"")

    def _give(self, path: str, token: str) -> Answer:
        if path == "/api/whoami-v2":
            return (200, {}, json.dumps({"name": "lab"}).encode()) if token == TOKEN else (401, {}, b"")
        repository = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if path == f"/lab/open/resolve/{COMMIT}/model.safetensors":
            return file_answer(self.weights)
        if repository in self.private and token == TOKEN:
            files, name = self.pushed[repository], path.rpartition("/")[2]
            if "/resolve/" not in path:
                return json_answer({"id": repository, "private": self.private[repository]})
            return file_answer(files[name]) if name in files else (404, {"X-Error-Code": "EntryNotFound"}, b"")
        if repository == OPENED and token == TOKEN:
            return 200, {}, b"{}"
        if repository == SILENT:
            return 500, {}, b""
        if repository in GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        return 401, {"X-Error-Code": "RepoNotFound"}, b""

    def _take(self, path: str, body: bytes) -> Answer:
        """Make a repository and push to it: what is asked in the order of the branches."""
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted['organization']}/{wanted['name']}"
            if wanted["organization"] != OWNER:
                return 403, {}, b""
            status = 409 if repository in self.private else 200
            # older clients say "private": true
            private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
            self.private.setdefault(repository, private)
            self.pushed.setdefault(repository, {})
            return json_answer({"url": f"{self.endpoint}/{repository}"}, status)
        if path == "/api/validate-yaml":
            return json_answer({"errors": [], "warnings": []})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [("lfs" if name.endswith(".safetensors") else "regular") for name in names]
            files = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]
            return json_answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.endpoint}/large-files/{each['oid']}"}}
            return json_answer({"transfer": "basic", "objects": objects})
        if path.startswith("/large-files/"):
            self._large_files[path.rpartition("/")[2]] = body
            return 200, {}, b""
        repository = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        for line in map(json.loads, body.decode().splitlines()):
            file = line["value"]
            if line["key"] == "file":
                self.pushed[repository][file["path"]] = base64.b64decode(file["content"])
            elif line["key"] == "lfsFile":
                self.pushed[repository][file["path"]] = self._large_files[file["oid"]]
        return json_answer({"commitUrl": f"{self.endpoint}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    @contextmanager
    def served(self) -> Iterator[Hub]:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                status, headers, body = hub.answer(self.command, path, token, sent)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def json_answer(content: object, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def file_answer(content: bytes) -> Answer:
    return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content
