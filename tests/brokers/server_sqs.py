"""SQS for tests: moto's server behind a front that can be stopped, killed and paused (see moto_sqs)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

PROGRAM = Path(__file__).with_name("moto_sqs.py")
REGION = "eu-central-1"
SECRET = "nobody-may-read-this"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "AKIATESTINGTESTING",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


class SqsServer:
    """One SQS on a port that is kept; what was acknowledged survives everything but the end of the test run."""

    def __init__(self) -> None:
        self.port = _free_port()
        self._back: subprocess.Popen[str] | None = None
        self._back_port = 0
        self._front: subprocess.Popen[str] | None = None

    def url(self, *, prefix: str = "duly-", visibility: int = 5) -> str:
        """The broker's URL; credentials are in the environment, as for any AWS client (see ENVIRONMENT)."""
        options = {"endpoint": f"http://127.0.0.1:{self.port}", "prefix": prefix, "visibility": visibility}
        return f"sqs://{REGION}?{urlencode(options)}"

    # -- the way to it --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the way to SQS; the first time, SQS itself begins."""
        if self._back is None:
            self._back, self._back_port = _run("back")
        assert self._front is None, "it is running already"
        self._front, _ = _run("front", str(self.port), str(self._back_port))

    def stop(self) -> None:
        """An orderly end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """An end in the middle of whatever it did."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Nothing is answered, and no connection is closed."""
        assert self._front is not None
        self._front.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on where it was paused."""
        assert self._front is not None
        self._front.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """The end of it, and of every message."""
        if self._front is not None:
            self.kill()
        if self._back is not None:
            self._back.kill()
            self._back.communicate(timeout=10)
            self._back = None

    def _end(self, how: signal.Signals) -> None:
        assert self._front is not None, "it is not running"
        self._front.send_signal(how)
        self._front.communicate(timeout=10)
        self._front = None

    # -- orders of tests, which need no front ---------------------------------------------------------------------

    def order(self, what: str, order: Any = None) -> Any:
        """Ask the stand-in itself for something; see ``Orders``."""
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self._back_port}/stand-in/{what}", data=json.dumps(order).encode(), method="POST"
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def answer(self, operation: str, status: int, code: str, *, times: int = 1, **rest: Any) -> None:
        """Let the next requests of this operation (``*``: of any) be answered so; ``done=True``: after doing it."""
        self.order("answers", [{"operation": operation, "status": status, "code": code, "times": times, **rest}])

    def recover(self) -> None:
        """As it was: running, and with no orders."""
        if self._front is None:
            self.start()
        self.resume()
        self.order("answers", [])
        self.order("entries", {})
        self.order("calls")


def _free_port() -> int:
    """One that the system gives to no outgoing connection while we are down."""
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise RuntimeError("of a hundred ports none is free")


def _run(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.readline()
    if not said.strip().isdigit():
        process.kill()
        raise RuntimeError("moto's server does not start; `make test-brokers` installs it")
    return process, int(said)
