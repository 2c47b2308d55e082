"""A stand-in for the Hugging Face Hub on this machine: accounts, model repositories, and uploads in its two ways."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from huggingface_hub import constants

WEIGHTS = (".safetensors", ".bin")
KEY, READ_ONLY = "hf_keyThatMayWrite", "hf_keyThatMayRead"
USER, TEAM = "jane-on-the-hub", "her-team"


class Hub(ThreadingHTTPServer):
    """Holds `repositories`: whether each is private, and its files' contents by name.

    Args:
        is_full: whether it refuses every commit.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.is_private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.is_full = False

    def make(self, name: str, *, private: bool) -> None:
        self.is_private[name], self.files[name] = private, {}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def handle_one(self) -> None:
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, path))
        self.server.bodies.append(body)
        key = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if path.startswith("/lfs/"):
            self.server.objects[path.removeprefix("/lfs/")] = body
            self.answer(200, {})
        elif key not in (KEY, READ_ONLY):
            self.answer(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/whoami-v2":
            role = "write" if key == KEY else "read"
            known = {"name": USER, "orgs": [{"name": TEAM}], "auth": {"accessToken": {"role": role}}}
            self.answer(200, known)
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            head = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            self.answer(200 if head["library_name"] else 400, {"warnings": [], "errors": []})
        else:
            self.in_repository(path, body)

    do_GET = do_POST = do_PUT = handle_one

    def create(self, wanted: dict) -> None:
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if name in self.server.files:
            self.answer(409, {"error": "You already created this model repo", "url": f"{self.server.address}/{name}"})
            return
        self.server.make(name, private=wanted["visibility"] == "private")
        self.answer(200, {"url": f"{self.server.address}/{name}", "name": name})

    def in_repository(self, path: str, body: bytes) -> None:
        name = next((name for name in self.server.files if f"/{name}" in path), None)
        if name is None:
            self.answer(404, {"error": "Repository not found"}, code="RepoNotFound")
            return
        files, rest = self.server.files[name], path.partition(name)[2]
        if rest in ("", "/revision/main"):
            self.answer(200, {"id": name, "private": self.server.is_private[name], "sha": "0" * 40})
        elif rest.startswith("/tree/"):
            self.answer(200, [{"type": "file", "path": file, "oid": "0", "size": len(files[file])} for file in files])
        elif rest.startswith("/preupload/"):
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = {file: "lfs" if file.endswith(WEIGHTS) else "regular" for file in asked}
            self.answer(
                200, {"files": [{"path": file, "uploadMode": modes[file], "shouldIgnore": False} for file in asked]}
            )
        elif rest == ".git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            for one in wanted:
                one["actions"] = {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}}
            self.answer(200, {"objects": wanted, "transfer": "basic"})
        elif rest.startswith("/commit/") and self.server.is_full:
            self.answer(403, {"error": "Private repository storage limit reached"})
        elif rest.startswith("/commit/"):
            for line in map(json.loads, body.splitlines()):
                self.take(files, line["key"], line["value"])
            self.answer(200, {"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40})
        else:
            self.answer(404, {"error": f"the stand-in knows no {path}"})

    def take(self, files: dict[str, bytes], key: str, value: dict) -> None:
        if key == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            content = self.server.objects[value["oid"]]
            assert hashlib.sha256(content).hexdigest() == value["oid"]
            files[value["path"]] = content
        elif key == "deletedFile":
            del files[value["path"]]

    def answer(self, status: int, value: object, code: str = "") -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run the stand-in while the block runs."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


def use_hub(address: str) -> None:
    """Let this process take the stand-in for the Hub, as HF_ENDPOINT does for one that starts."""
    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
