"""A local Hub that answers the requests of huggingface_hub to find and download a model."""

import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FakeHub:
    """The models of the server, and the requests that it got.

    Attributes:
      models: The files of each revision of each model, by name.
      refused: The status and the code of an error, by model, by model and file, or by model and
        "files" for all of its files.
      held: A file of which only half is sent; then the server waits.
      asked: The method and the path of each request, in order.
    """

    def __init__(self):
        self.models, self.refused, self.asked = {}, {}, []
        self.url, self.held, self.closing = "", None, threading.Event()

    def commit(self, name, revision="main"):
        return hashlib.sha1(repr(sorted(self.models[name][revision].items())).encode()).hexdigest()

    def got(self):
        """Returns the names of the sent files."""
        sent = (path for method, path in self.asked if method == "GET" and "/resolve/" in path)
        return {path.rpartition("/")[2] for path in sent}

    def answer(self, path):
        """Returns the status, headers and content for a path."""
        of_model = path.removeprefix("/api/models")
        parts = [unquote(part) for part in of_model.strip("/").split("/")]
        name, (what, *rest) = "/".join(parts[:2]), parts[2:] or ("",)
        asked = (name,) if path != of_model else (name, f"{name} files", f"{name} {parts[-1]}")
        for key in asked:
            if key in self.refused:
                status, code = self.refused[key]
                return status, {"X-Error-Code": code}, b"{}"
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        revisions = {self.commit(name, known): known for known in self.models[name]}
        revision = revisions.get(rest[0], rest[0]) if rest else "main"
        if revision not in self.models[name]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        commit, files = self.commit(name, revision), self.models[name][revision]
        mark = {file: hashlib.sha1(data).hexdigest() for file, data in files.items()}
        if what == "resolve" and rest[1] not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        if what == "resolve":
            headers = {"X-Repo-Commit": commit, "ETag": f'"{mark[rest[1]]}"'}
            return 200, headers, files[rest[1]]
        if what == "tree":
            listed = [
                {"type": "file", "path": file, "size": len(data), "oid": mark[file]}
                for file, data in files.items()
            ]
        else:
            siblings = [
                {"rfilename": file, "size": len(data), "blobId": mark[file]}
                for file, data in files.items()
            ]
            listed = {"id": name, "sha": commit, "siblings": siblings}
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET(body=False)

        def do_GET(self, body=True):
            path = urlsplit(self.path).path
            hub.asked.append((self.command, path))
            status, headers, data = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body and hub.held is not None and path.endswith(f"/{hub.held}"):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                hub.closing.wait()
            elif body:
                self.wfile.write(data)

    return Handler


@contextlib.contextmanager
def serving():
    """Yields a `FakeHub` that listens on a port of this machine."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
