"""A small Cloud Storage on loopback: lists buckets and serves ranges of objects."""

from __future__ import annotations

import base64
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import google_crc32c


class FakeGcs:
    """Objects and faults, to be changed between requests.

    Attributes:
        objects: (bucket, name) → (generation, bytes).
        fetched: (name, first byte) of each range that was served whole.
        denied_buckets: those that may not be listed.
        broken_from: no byte from this one on is served; None serves all.
        lie: names whose bytes are served with one of them wrong.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.fetched: list[tuple[str, int]] = []
        self.denied_buckets: set[str] = set()
        self.broken_from: int | None = None
        self.lie: set[str] = set()
        self.lock = threading.Lock()

    def put(self, bucket: str, name: str, data: bytes) -> None:
        generation = self.objects.get((bucket, name), (0, b""))[0] + 1
        self.objects[bucket, name] = generation, data

    def listing(self, bucket: str, prefix: str) -> dict[str, object] | None:
        if all(there != bucket for there, _ in self.objects):
            return None
        items = [
            {
                "kind": "storage#object",
                "name": name,
                "bucket": bucket,
                "generation": str(generation),
                "size": str(len(data)),
                "crc32c": base64.b64encode(google_crc32c.Checksum(data).digest()).decode(),
            }
            for (there, name), (generation, data) in sorted(self.objects.items())
            if there == bucket and name.startswith(prefix) and "/" not in name[len(prefix) :]
        ]
        return {"kind": "storage#objects", "items": items}


@contextmanager
def serving(fake: FakeGcs) -> Iterator[str]:
    """Serve `fake` on a free port; yields the URL for STORAGE_EMULATOR_HOST."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            parts = [urllib.parse.unquote(part) for part in url.path.split("/")]
            bucket = parts[parts.index("b") + 1]
            if bucket in fake.denied_buckets:
                self.answer(403, self.error(403, "does not have storage.objects.list access"))
            elif parts[-2] == "b":  # the library asks where the bucket is
                self.answer(200, json.dumps({"kind": "storage#bucket", "name": bucket}).encode())
            elif parts[-1] == "o":
                listing = fake.listing(bucket, query.get("prefix", ""))
                if listing is None:
                    self.answer(404, self.error(404, "The specified bucket does not exist."))
                else:
                    self.answer(200, json.dumps(listing).encode())
            else:
                self.media(bucket, parts[-1])

        def media(self, bucket: str, name: str) -> None:
            _, data = fake.objects[bucket, name]
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last) + 1, len(data))
            if fake.broken_from is not None and begin >= fake.broken_from:
                self.answer(400, self.error(400, "the line is cut"))  # 400 is not tried again
                return
            body = bytearray(data[begin:end])
            if name in fake.lie:
                body[0] ^= 1
            with fake.lock:
                fake.fetched.append((name, begin))
            self.answer(206, bytes(body), f"bytes {begin}-{end - 1}/{len(data)}")

        def error(self, code: int, message: str) -> bytes:
            return json.dumps({"error": {"code": code, "message": message}}).encode()

        def answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if content_range is not None:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
