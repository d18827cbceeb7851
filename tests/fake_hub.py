"""A fake Hugging Face Hub: a local HTTP server with the part of the protocol that tapfm uses."""

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
ACCESSIBLE = "MahmoodLab/UNI2-h"  # gated, but accessible with TOKEN
FAILING = "paige-ai/Virchow2"  # responds with a server error
GATED = ("lab/gated", "MahmoodLab/UNI", "bioptimus/H-optimus-1")
OWNER = "lab"  # TOKEN has write access to its repositories

Response = tuple[int, dict[str, str], bytes]


class FakeHub:
    """A Hub with the repository lab/open, which contains `weights`, and gated repositories.

    Other repositories are reported as missing until they are created. `private` has the visibility of created
    repositories, `pushed` their files, and `requests` the method and path of every request.
    """

    def __init__(self, weights: bytes = b"") -> None:
        self.weights = weights
        self.requests: list[tuple[str, str]] = []
        self.endpoint = ""
        self.private: dict[str, bool] = {}
        self.pushed: dict[str, dict[str, bytes]] = {}
        self._large_files: dict[str, bytes] = {}

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment of a separate process; the client of the Hub reads its settings at import."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home / "hf"), "TAPFM_CACHE": str(home / "cache")}
        return plain | ours | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"} | more

    def respond(self, method: str, path: str, token: str, body: bytes) -> Response:
        self.requests.append((method, path))
        if method in ("GET", "HEAD"):
            return self._respond_to_get(path, token)
        return (
            self._respond_to_post(path, body) if token == TOKEN or path.startswith("/large-files/") else (401, {}, b"")
        )

    def _respond_to_get(self, path: str, token: str) -> Response:
        if path == "/api/whoami-v2":
            return (200, {}, json.dumps({"name": "lab"}).encode()) if token == TOKEN else (401, {}, b"")
        repository = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if path in (f"/lab/open/resolve/{each}/model.safetensors" for each in (COMMIT, "main")):
            return file_response(self.weights)
        if repository in self.private and token == TOKEN:
            files, name = self.pushed[repository], path.rpartition("/")[2]
            if "/resolve/" not in path:
                return json_response({"id": repository, "private": self.private[repository]})
            return file_response(files[name]) if name in files else (404, {"X-Error-Code": "EntryNotFound"}, b"")
        if repository == ACCESSIBLE and token == TOKEN:
            return 200, {}, b"{}"
        if repository == FAILING:
            return 500, {}, b""
        if repository in GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        return 401, {"X-Error-Code": "RepoNotFound"}, b""

    def _respond_to_post(self, path: str, body: bytes) -> Response:
        """Respond to the requests of a push, in the order in which the client sends them."""
        if path == "/api/repos/create":
            request = json.loads(body)
            repository = f"{request['organization']}/{request['name']}"
            if request["organization"] != OWNER:
                return 403, {}, b""
            status = 409 if repository in self.private else 200
            # older clients send "private": true
            private = request.get("visibility") == "private" or bool(request.get("private"))
            self.private.setdefault(repository, private)
            self.pushed.setdefault(repository, {})
            return json_response({"url": f"{self.endpoint}/{repository}"}, status)
        if path == "/api/validate-yaml":
            return json_response({"errors": [], "warnings": []})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [("lfs" if name.endswith(".safetensors") else "regular") for name in names]
            files = [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes, strict=True)]
            return json_response({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.endpoint}/large-files/{each['oid']}"}}
            return json_response({"transfer": "basic", "objects": objects})
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
        return json_response({"commitUrl": f"{self.endpoint}/{repository}/commit/{COMMIT}", "commitOid": COMMIT})

    @contextmanager
    def serve(self) -> Iterator[FakeHub]:
        """Run the server."""
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0]
                status, headers, body = hub.respond(self.command, path, token, sent)
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


def json_response(content: object, status: int = 200) -> Response:
    return status, {"Content-Type": "application/json"}, json.dumps(content).encode()


def file_response(content: bytes) -> Response:
    return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content
