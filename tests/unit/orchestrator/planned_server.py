"""A server on loopback that answers as planned."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DROP = 0  # instead of a status: close the connection without an answer
Plan = list[tuple[int, Any]]
"""(status, body) one after the other, the last one again and again."""


class PlannedServer:
    """What it is asked, a subclass of `Handler` decides."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        fake: Any  # the server it is of

        def body(self) -> Any:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")

        def answer(self, plan: Plan, headers: Mapping[str, str] | None = None) -> None:
            status, answer = plan.pop(0) if len(plan) > 1 else plan[0]
            if status == DROP:
                self.close_connection = True
                return
            text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def finish(self) -> None:
            super().finish()
            self.fake.was_left.set()

        def log_message(self, format: str, *args: Any) -> None:
            """Not on standard error."""

    def __init__(self) -> None:
        self.was_left = threading.Event()  # a connection was closed
        handler = type("Handler", (self.Handler,), {"fake": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
