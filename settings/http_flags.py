"""The flags of HTTP: where the router listens and whom it lets in; and those of `hexserve chat`."""

from __future__ import annotations

from settings.config import MAX_BODY_BYTES, MAX_CONCURRENT_REQUESTS
from settings.flag_values import to_keys, to_names, to_port, to_positive, to_temperature
from settings.flags import Flag, Group, switch

API_KEY = Flag(
    "api_key",
    "keys, separated by commas, one of which each request must bring; visible to other users of "
    "the machine: better a file, or HEXSERVE_API_KEY",
    to_keys,
)

HTTP = Group(
    "HTTP",
    (
        Flag("host", "address to listen on (127.0.0.1; 0.0.0.0 on Vertex AI or as hex_llm)"),
        Flag(
            "port",
            "port to listen on (7080; AIP_HTTP_PORT on Vertex AI); 0 takes a free one",
            to_port,
        ),
        API_KEY,
        Flag("api_key_file", "file with further keys, one a line"),
        Flag(
            "allowed_origins",
            "web sites whose scripts may ask, such as https://a.example,https://b.example; * is "
            "all, and none are when unset",
            to_names,
        ),
        Flag("ssl_certfile", "certificate chain (PEM) to serve HTTPS by"),
        Flag("ssl_keyfile", "its private key (PEM), where the certificate's file does not have it"),
        Flag(
            "max_concurrent_requests", "requests served at once; more are answered by 429",
            to_positive, MAX_CONCURRENT_REQUESTS,
        ),
        switch(
            "admin",
            "serve POST /admin/drain, by which a worker is told to end; beyond this machine, or "
            "where there are API keys, only with --admin_key",
            False,
        ),
        Flag(
            "admin_key",
            "keys, separated by commas, one of which a request to /admin must bring; better in a "
            "file, or HEXSERVE_ADMIN_KEY",
            to_keys,
        ),
        Flag("admin_key_file", "file with further keys for /admin, one a line"),
        Flag("max_body_bytes", "largest body of a request", to_positive, MAX_BODY_BYTES),
    ),
)  # fmt: skip

CHAT = Group(
    "chat",
    (
        Flag("url", "of the server", default="http://127.0.0.1:7080"),
        Flag("model", "name of the model, where the server has several"),
        Flag("system", "text of a system message to begin with"),
        Flag("max_tokens", "most tokens of an answer (default: what the model can)", to_positive),
        Flag("temperature", "0 is greedy (default: the model's)", to_temperature),
        API_KEY,
    ),
)
