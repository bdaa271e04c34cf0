"""A router that serves HTTPS and wants a key, asked as a user would."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import httpx
import pytest

from deploy.router import listen
from settings.config import HttpConfig
from settings.errors import ConfigError
from tests.deploy.conftest import Launch
from tests.deploy.launch import HEXSERVE, expected_tokens

TLS = Path(__file__).parent / "tls"
CERTIFICATE, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")


def test_https_and_a_key(launch: Launch) -> None:
    launcher = launch(
        *HEXSERVE,
        "serve",
        "--model=fake",
        "--port=0",
        f"--ssl_certfile={CERTIFICATE}",
        f"--ssl_keyfile={KEY}",
        HEXSERVE_API_KEY="the-key",
    )
    url = launcher.ready_url()
    assert url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=CERTIFICATE)
    body = {"prompt": [1, 2], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    with httpx.Client(base_url=url, verify=trusted, trust_env=False, timeout=30) as client:
        assert client.post("/v1/completions", json=body).status_code == 401
        answer = client.post(
            "/v1/completions",
            json=body,
            headers={"Authorization": "Bearer the-key", "X-Request-Id": "asked"},
        )
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens([1, 2], 3)
        assert client.get("/ping").status_code == 200
    line = launcher.wait_for(r"hexserve\.request: asked: .*")[0]
    assert "POST /v1/completions 200, 2 prompt and 3 output tokens" in line
    assert launcher.stop() < 5
    assert "the-key" not in launcher.output


def test_the_demo_asks_itself_by_https_and_key(launch: Launch) -> None:
    demo = launch(
        *HEXSERVE,
        "demo",
        "--model=fake",
        "--once",
        f"--ssl_certfile={CERTIFICATE}",
        f"--ssl_keyfile={KEY}",
        "--api_key=one,two",
    )
    assert demo.exit_code() == 0, demo.output
    demo.wait_for(r"first text after \d+ ms")


@pytest.mark.parametrize(
    ("certificate", "key", "message"),
    [
        ("/no/such.pem", None, "No such file"),
        (CERTIFICATE, "/no/such.pem", "No such file"),
        (CERTIFICATE, None, ""),
        (KEY, KEY, ""),
        (CERTIFICATE, CERTIFICATE, ""),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused(
    certificate: str, key: str | None, message: str
) -> None:
    http = HttpConfig("127.0.0.1", 0, ssl_certfile=certificate, ssl_keyfile=key)
    with pytest.raises(ConfigError, match=f"--ssl_certfile={certificate}") as caught:
        listen(http)
    assert message in str(caught.value)


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    with both.open("wb") as file:
        for path in (CERTIFICATE, KEY):
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)
    with listen(HttpConfig("127.0.0.1", 0, ssl_certfile=str(both))) as listener:
        assert listener.getsockname()[1] > 0
