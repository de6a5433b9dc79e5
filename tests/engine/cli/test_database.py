"""E7.2: the commands about the database itself."""

from __future__ import annotations

from importlib.metadata import version

from tests.engine.cli.commands import duly
from tests.support import rows, value


def test_the_version_is_the_packages(env: dict[str, str]) -> None:
    done = duly("--version", env=env)
    assert (done.returncode, done.stdout) == (0, f"duly {version('duly')}\n")


def test_migrate_goes_up_and_down_and_up_again(server_env: dict[str, str], dsn: str) -> None:
    rows(dsn, "DROP SCHEMA duly CASCADE")
    assert duly("migrate", env=server_env).returncode == 0
    newest = value(dsn, "SELECT version_num FROM duly.schema_version")
    assert duly("migrate", "--down", "--to", "base", env=server_env).returncode == 0
    assert value(dsn, "SELECT to_regclass('duly.jobs')") is None
    assert duly("migrate", "--to", newest, env=server_env).returncode == 0
    assert value(dsn, "SELECT version_num FROM duly.schema_version") == newest


def test_an_unknown_revision_is_a_sentence(server_env: dict[str, str]) -> None:
    done = duly("migrate", "--to", "no-such-revision", env=server_env)
    assert done.returncode == 1
    assert done.stderr.startswith("duly: the migration cannot be done: ")
    assert "Traceback" not in done.stderr


def test_the_doctor_says_that_all_is_well(env: dict[str, str]) -> None:
    assert duly("migrate", env=env).returncode == 0
    done = duly("doctor", env=env)
    assert done.returncode == 0, done.stderr
    assert "server: PostgreSQL" in done.stdout
    assert done.stdout.endswith("all is well\n")


def test_the_doctor_hides_the_password(server_env: dict[str, str], dsn: str) -> None:
    secret = dsn.replace("postgres@", "postgres:secret-word@")
    done = duly("doctor", env={**server_env, "DATABASE_URL": secret})
    assert done.returncode == 0, done.stderr
    assert "secret-word" not in done.stdout + done.stderr


def test_the_doctor_names_what_is_wrong_and_exits_1(server_env: dict[str, str], dsn: str) -> None:
    rows(dsn, "UPDATE duly.schema_version SET version_num = '9999'")
    done = duly("doctor", env=server_env)
    assert done.returncode == 1
    assert "refused: the database's schema (9999) is newer than this code" in done.stderr


def test_the_doctor_warns_of_a_moved_clock(server_env: dict[str, str], dsn: str) -> None:
    rows(dsn, "UPDATE duly.business_clock SET shift = '3 days'")
    done = duly("doctor", env=server_env)
    assert done.returncode == 0
    assert "warning: the business clock was moved" in done.stdout


def test_a_setting_that_cannot_be_used_is_named(server_env: dict[str, str]) -> None:
    for name, wrong in (("PORT", "eighty"), ("DULY_CONCURRENCY", "0"), ("DULY_ENV", "staging")):
        done = duly("doctor", env={**server_env, name: wrong})
        assert done.returncode == 1
        assert done.stderr.startswith(f"duly: the setting {name} cannot be used: ")
        assert done.stderr.count("\n") == 1


def test_an_application_that_is_not_there_is_a_kind_sentence(server_env: dict[str, str]) -> None:
    done = duly("doctor", "--app", "no_such_module:app", env=server_env)
    assert done.returncode == 1
    assert done.stderr == "duly: DULY_APP names the module no_such_module, but there is no no_such_module\n"
