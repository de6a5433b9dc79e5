"""One Keycloak in development mode, with our realm: started, stopped, killed, held; and its admin API."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

from tests.engine.cli.commands import ROOT, free_port, status, wait_until
from tests.keycloak.distribution import HOME

REALM_FILE = ROOT / "deploy" / "keycloak" / "duly-realm.json"
FILE: dict[str, Any] = json.loads(REALM_FILE.read_text())
GIVES = {mapping["clientScope"]: set(mapping["roles"]) for mapping in FILE["scopeMappings"]}
REALM = "duly"
START_SECONDS = 900.0  # the first start of a distribution builds it, and tests may run on a busy machine
STOP_SECONDS = 60.0
PATIENCE_SECONDS = 300.0  # for an answer that nothing is asserted of but what it says
SIGNED_IN_SECONDS = 20.0  # of the minute that an administrator's token lives
KEYS = "org.keycloak.keys.KeyProvider"
# A small heap, and a compiler that is soon done: it lives for a minute.
JAVA_OPTS = (
    "-Xms64m -Xmx384m -XX:MaxMetaspaceSize=320m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dfile.encoding=UTF-8 "
    "-Djava.security.egd=file:/dev/urandom -Djava.net.preferIPv4Stack=true"
)


class Keycloak:
    """A server process on a port that it keeps, with its database in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        if not (HOME / "version.txt").exists():
            raise RuntimeError("there is no Keycloak in this virtual environment: make test-keycloak installs it")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.issuer = f"{self.url}/realms/{REALM}"
        self._home = directory / "keycloak"
        self._log = directory / "keycloak.log"
        self._password = secrets.token_urlsafe(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._signed_in = ("", 0.0)
        self._secrets: dict[tuple[str, str], str] = {}
        self.client = httpx2.Client(timeout=PATIENCE_SECONDS, trust_env=False)
        self._lay_out()

    # -- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        """Run, until the realm answers; what it knew before a stop it knows again."""
        if self._process is not None and self._process.poll() is None:
            return
        options = ["start-dev", "--import-realm", "--http-host=127.0.0.1", f"--http-port={self.port}"]
        given = {"KC_BOOTSTRAP_ADMIN_USERNAME": "admin", "KC_BOOTSTRAP_ADMIN_PASSWORD": self._password}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KC_", "JAVA_OPTS"))}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                ["sh", "bin/kc.sh", *options], cwd=self._home, env={**kept, **given, "JAVA_OPTS": JAVA_OPTS},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._process = process
        try:
            wait_until(
                lambda: process.poll() is not None or status(f"{self.issuer}/.well-known/openid-configuration") == 200,
                seconds=START_SECONDS, what="Keycloak answers",
            )  # fmt: skip
            if process.poll() is not None:
                raise AssertionError("Keycloak ended by itself")
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}:\n{self._log.read_text(errors='replace')[-3000:]}") from None

    def stop(self) -> None:
        """As an operator does; it has a minute."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As a machine does."""
        self._end(signal.SIGKILL)

    @contextlib.contextmanager
    def held(self) -> Any:
        """It is there and says nothing."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        """The shell that starts Java, and Java: a group of their own."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_SECONDS)
        wait_until(lambda: status(self.url) == 0, seconds=STOP_SECONDS, what="Keycloak is gone")

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def _lay_out(self) -> None:
        """A home of its own: the programs are the distribution's, the data and the realm are here."""
        (self._home / "data" / "import").mkdir(parents=True)
        shutil.copytree(HOME / "bin", self._home / "bin")
        for name in ("conf", "lib", "providers", "themes", "version.txt"):
            (self._home / name).symlink_to(HOME / name)
        shutil.copy(REALM_FILE, self._home / "data" / "import")

    # -- its admin API -----------------------------------------------------------------------------

    def admin(self, method: str, path: str, body: object = None, *, realm: str = REALM) -> httpx2.Response:
        """A call to ``/admin/realms/<realm>``, as the administrator of this server; it has to succeed."""
        url = f"{self.url}/admin/realms/{realm}{path}" if realm else f"{self.url}/admin/realms"
        headers = {"Authorization": f"Bearer {self._sign_in(fresh=realm != REALM)}"}
        answer = self.client.request(method, url, json=body, headers=headers)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer

    def _sign_in(self, *, fresh: bool) -> str:
        """A token of the administrator: an old one does not know realms that were made since."""
        token, until = self._signed_in
        if fresh or time.monotonic() > until:
            form = {"grant_type": "password", "client_id": "admin-cli", "username": "admin"}
            answer = self.grant({**form, "password": self._password}, realm="master").raise_for_status()
            token = str(answer.json()["access_token"])
            self._signed_in = (token, time.monotonic() + SIGNED_IN_SECONDS)
        return token

    def find_client(self, client_id: str, *, realm: str = REALM) -> dict[str, Any]:
        """What the server knows of a client."""
        (found,) = self.admin("GET", f"/clients?clientId={client_id}", realm=realm).json()
        return dict(found)

    def change_client(self, client_id: str, **changes: Any) -> None:
        """Write a client anew, with these fields changed."""
        found = self.find_client(client_id)
        self.admin("PUT", f"/clients/{found['id']}", {**found, **changes})
        self._secrets.pop((REALM, client_id), None)

    def secret(self, client_id: str, *, realm: str = REALM) -> str:
        """A client's secret, which the server made."""
        if (realm, client_id) not in self._secrets:
            found = self.find_client(client_id, realm=realm)
            said = self.admin("GET", f"/clients/{found['id']}/client-secret", realm=realm).json()
            self._secrets[realm, client_id] = str(said["value"])
        return self._secrets[realm, client_id]

    def add_person(self, username: str, first: str, last: str, *roles: str, password: str) -> None:
        """Somebody who can sign in, with these roles of the realm."""
        person = {
            "username": username, "firstName": first, "lastName": last, "email": f"{username}@example.com",
            "emailVerified": True, "enabled": True,
            "credentials": [{"type": "password", "value": password, "temporary": False}],
        }  # fmt: skip
        made = self.admin("POST", "/users", person)
        held = [self.admin("GET", f"/roles/{role}").json() for role in roles]
        id = made.headers["location"].rpartition("/")[2]
        self.admin("POST", f"/users/{id}/role-mappings/realm", held)

    def add_key(self, priority: int, *, private_key: str = "", realm: str = REALM) -> str:
        """A new RSA key, which signs from now on if no other has a higher priority; the id to remove it by."""
        config = {"priority": [str(priority)], "enabled": ["true"], "active": ["true"], "algorithm": ["RS256"]}
        config |= {"privateKey": [private_key]} if private_key else {"keySize": ["2048"]}
        component = {
            "name": f"rsa-{priority}-{secrets.token_hex(4)}", "providerType": KEYS, "config": config,
            "providerId": "rsa" if private_key else "rsa-generated",
        }  # fmt: skip
        made = self.admin("POST", "/components", component, realm=realm)
        return made.headers["location"].rpartition("/")[2]

    def remove_key(self, id: str, *, realm: str = REALM) -> None:
        """Withdraw it: the server publishes it no more."""
        self.admin("DELETE", f"/components/{id}", realm=realm)

    # -- its tokens --------------------------------------------------------------------------------

    def grant(self, form: Mapping[str, str], *, realm: str = REALM) -> httpx2.Response:
        """A request to the token endpoint."""
        url = f"{self.url}/realms/{realm}/protocol/openid-connect/token"
        return self.client.post(url, data=dict(form))

    def ask(self, client_id: str, scope: str = "", *, realm: str = REALM) -> httpx2.Response:
        """A grant by client credentials, or a refusal."""
        form = {"grant_type": "client_credentials", "client_id": client_id} | ({"scope": scope} if scope else {})
        return self.grant({**form, "client_secret": self.secret(client_id, realm=realm)}, realm=realm)

    def token(self, client_id: str, scope: str = "", *, realm: str = REALM) -> str:
        """An access token by client credentials."""
        answer = self.ask(client_id, scope, realm=realm)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["access_token"])
