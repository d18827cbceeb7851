"""A Hugging Face hub on this machine: the part of its protocol that tapfm uses, spoken over real HTTP."""

from __future__ import annotations

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


class Hub:
    """lab/open gives `weights`; some repositories are gated; all others are said not to exist."""

    def __init__(self, weights: bytes = b"") -> None:
        self.weights = weights
        self.asked: list[tuple[str, str]] = []
        self.endpoint = ""

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """For a process of its own: the hub's client reads its settings once, at import."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home / "hf"), "TAPFM_CACHE": str(home / "cache")}
        return plain | ours | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"} | more

    def answer(self, method: str, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append((method, path))
        if path == "/api/whoami-v2":
            return (200, {}, json.dumps({"name": "lab"}).encode()) if token == TOKEN else (401, {}, b"")
        repository = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        if path == f"/lab/open/resolve/{COMMIT}/model.safetensors":
            digest = hashlib.sha256(self.weights).hexdigest()
            return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, self.weights
        if repository == OPENED and token == TOKEN:
            return 200, {}, b"{}"
        if repository == SILENT:
            return 500, {}, b""
        if repository in GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        return 401, {"X-Error-Code": "RepoNotFound"}, b""

    @contextmanager
    def served(self) -> Iterator[Hub]:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, headers, body = hub.answer(self.command, self.path, token)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

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
