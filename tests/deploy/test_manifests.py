"""Every manifest is one that Kubernetes accepts, and they fit together (T8, E5.7)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate.utils as kubernetes_validate  # type: ignore[import-untyped]  # it ships no types
import pytest
import typer.main
import yaml

from apps.birthdays.gateways import URL_VARIABLE
from duly.cli.main import app as command_line
from duly.cli.parts import DUTIES
from duly.http.health import ANSWER_SECONDS
from duly.runtime.supervisor import LEAVE_SECONDS, RELEASE_SECONDS
from duly.settings import Settings
from tests.deploy.manifests import (
    EXAMPLE,
    K8S,
    KUSTOMIZATION,
    MANIFESTS,
    NAMESPACE,
    ROOT,
    SECRETS,
    SERVERS,
    WORKLOADS,
    Manifest,
    Workload,
    named,
    of_kind,
    project,
    selects,
    setting_names,
    title,
    workload,
)

OLDEST_KUBERNETES = "1.29"  # what the how-to page promises
NEWEST_KUBERNETES = kubernetes_validate.latest_version()
CLUSTER_WIDE = {"Namespace"}
PAGE = (ROOT / "docs" / "howto" / "deploy-on-kubernetes.md").read_text()
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl; the test above needs none")
each_workload = pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
each_server = pytest.mark.parametrize("work", SERVERS, ids=lambda work: work.name)


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("manifest", [*MANIFESTS, *SECRETS], ids=title)
def test_kubernetes_knows_every_field(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_page_names_the_oldest_kubernetes_that_is_checked() -> None:
    assert f"Kubernetes {OLDEST_KUBERNETES} or later" in PAGE


def test_every_file_is_in_the_kustomization_except_the_example_of_secrets() -> None:
    files = {path.name for path in K8S.iterdir()}
    assert files - set(KUSTOMIZATION["resources"]) == {"kustomization.yaml", EXAMPLE.name}
    assert set(KUSTOMIZATION["resources"]) <= files
    assert not of_kind("Secret")


def test_the_kustomization_changes_nothing_by_itself() -> None:
    """It lists files and names the image that they name already, so that one may also read or apply them singly."""
    assert KUSTOMIZATION.keys() == {"apiVersion", "kind", "resources", "images"}
    (image,) = KUSTOMIZATION["images"]
    assert image.keys() == {"name", "newName", "newTag"}
    assert {work.container["image"] for work in WORKLOADS} == {f"{image['newName']}:{image['newTag']}"}
    assert image["name"] == image["newName"]


@needs_kubectl
def test_kustomize_builds_the_same_manifests() -> None:
    assert build(K8S) == {title(each): each for each in MANIFESTS}


def overlay_of_the_page() -> str:
    """The only YAML that the page shows."""
    (found,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_overlay_of_the_page_replaces_values_that_are_there() -> None:
    """A JSON patch that names no manifest is ignored, and one that names no field is refused."""
    overlay = yaml.safe_load(overlay_of_the_page())
    assert overlay.keys() == {"apiVersion", "kind", "resources", "images", "patches"}
    assert overlay["resources"] == ["../duly/deploy/k8s"]
    assert [image["name"] for image in overlay["images"]] == [image["name"] for image in KUSTOMIZATION["images"]]
    changed = set()
    for patch in overlay["patches"]:
        target = named(**patch["target"])
        for change in yaml.safe_load(patch["patch"]):
            assert change.keys() == {"op", "path", "value"}
            assert change["op"] == "replace"
            place: Any = target
            for step in change["path"].strip("/").split("/"):
                place = place[int(step)] if isinstance(place, list) else place[step]
            assert isinstance(place, str)
            assert place != change["value"]
            changed.add(title(target))
    policies = {"NetworkPolicy/postgres", "NetworkPolicy/identity-provider"}
    assert changed == policies | {"ConfigMap/duly-settings", "Ingress/duly"}


@needs_kubectl
def test_kustomize_makes_of_the_overlay_what_the_page_says(tmp_path: Path) -> None:
    overlay = overlay_of_the_page()
    shutil.copytree(K8S, tmp_path / "duly" / "deploy" / "k8s")
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay" / "kustomization.yaml").write_text(overlay)
    built = build(tmp_path / "overlay")
    changed = {title(each) for each in MANIFESTS if built[title(each)] != each}
    pods = {f"{work.kind}/{work.name}" for work in WORKLOADS}
    policies = {"NetworkPolicy/postgres", "NetworkPolicy/identity-provider"}
    assert changed == pods | policies | {"ConfigMap/duly-settings", "Ingress/duly"}


def build(directory: Path) -> dict[str, Manifest]:
    """What ``kubectl kustomize`` makes of a directory; it asks no cluster."""
    done = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {title(each): each for each in yaml.safe_load_all(done.stdout)}


def test_no_two_manifests_have_one_name_and_all_live_in_one_namespace() -> None:
    titles = [title(each) for each in MANIFESTS]
    assert len(titles) == len(set(titles))
    assert named("Namespace", NAMESPACE)
    for each in [*MANIFESTS, *SECRETS]:
        assert each["metadata"].get("namespace") == (None if each["kind"] in CLUSTER_WIDE else NAMESPACE), title(each)


# ---------------------------------------------------------------------------------------------------------- pods


@each_workload
def test_a_pod_has_no_rights(work: Workload) -> None:
    """What the Pod Security Standard "restricted" asks for, and a file system that cannot be written to."""
    pod, container = work.spec, work.container
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys()
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert [volume["name"] for volume in pod["volumes"] if "sizeLimit" in volume["emptyDir"]] == ["tmp"]


@each_workload
def test_a_pod_is_bounded(work: Workload) -> None:
    resources = work.container["resources"]
    assert resources["requests"].keys() == resources["limits"].keys() == {"cpu", "memory"}


@each_workload
def test_a_pod_has_a_service_account_of_its_own_and_no_token(work: Workload) -> None:
    account = named("ServiceAccount", work.spec["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    assert work.spec["automountServiceAccountToken"] is False
    assert account["metadata"]["labels"]["app.kubernetes.io/component"] == work.component


def test_no_service_account_is_shared_or_unused() -> None:
    accounts = [work.spec["serviceAccountName"] for work in WORKLOADS]
    assert sorted(accounts) == sorted(each["metadata"]["name"] for each in of_kind("ServiceAccount"))


@each_workload
def test_a_pod_gets_no_variables_that_look_like_settings(work: Workload) -> None:
    """A Service named duly-api would otherwise put DULY_API_PORT and its like into every pod."""
    assert work.spec["enableServiceLinks"] is False


@each_workload
def test_a_command_exists(work: Workload) -> None:
    program, *arguments = work.container["command"]
    assert program in project()["scripts"], f"[project.scripts] has no {program}"
    if program == "duly":
        group = typer.main.get_group(command_line)
        assert arguments[0] in group.commands
        assert len(arguments) == 1


def test_one_release_is_named_everywhere() -> None:
    version = project()["version"]
    assert [(image["name"], image["newTag"]) for image in KUSTOMIZATION["images"]] == [("duly", version)]
    assert {work.container["image"] for work in WORKLOADS} == {f"duly:{version}"}
    assert [each["metadata"]["name"] for each in of_kind("Job")] == [f"duly-migrate-{version.replace('.', '-')}"]


# -------------------------------------------------------------------------------------------------------- servers


@each_server
def test_a_server_has_all_three_probes(work: Workload) -> None:
    """E5.7. That they tell the truth is shown in test_probes."""
    for name in PROBES:
        probe = work.container[name]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 10, "one hiccup is no verdict"


@each_server
def test_a_probe_asks_the_port_that_the_process_serves(work: Workload) -> None:
    asked = [work.container[name]["httpGet"] for name in PROBES]
    (port,) = work.container["ports"]
    assert {get["port"] for get in asked} == {port["name"]}
    assert [get["path"] for get in asked] == ["/healthz", "/healthz", "/readyz"]
    variable = "PORT" if work.component == "api" else "DULY_HEALTH_PORT"
    assert int(work.environment[variable]) == port["containerPort"]


@each_server
def test_the_process_gives_up_before_the_kubelet_does(work: Workload) -> None:
    """So that a pod which is not ready says why."""
    assert work.container["readinessProbe"]["timeoutSeconds"] > 2 * ANSWER_SECONDS


@pytest.mark.parametrize("part", DUTIES)
def test_silence_is_given_longer_than_a_lease_before_a_restart(part: str) -> None:
    """A handler that holds up the event loop loses its own lease first, not the whole process."""
    found = workload(part).container["livenessProbe"]
    assert found["periodSeconds"] * found["failureThreshold"] >= 2 * Settings().lease_seconds >= 600


@each_server
def test_a_server_gets_the_time_that_it_takes_to_stop(work: Workload) -> None:
    settings = named("ConfigMap", "duly-settings")["data"]
    pause = work.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    longest = float(settings["DULY_SHUTDOWN_GRACE_SECONDS"]) + RELEASE_SECONDS + 3 * LEAVE_SECONDS + float(pause[1])
    assert work.spec["terminationGracePeriodSeconds"] > longest


@each_server
def test_a_server_survives_a_release_and_a_drained_node(work: Workload) -> None:
    deployment = named("Deployment", work.name)["spec"]
    assert deployment["replicas"] >= 2
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert named("PodDisruptionBudget", work.name)


def test_every_selector_finds_exactly_its_own_pods() -> None:
    for kind in ("Deployment", "PodDisruptionBudget", "Service"):
        for each in of_kind(kind):
            selector = each["spec"]["selector"]
            selector = {"matchLabels": selector} if kind == "Service" else selector
            found = [work.name for work in WORKLOADS if selects(selector, work.labels)]
            assert found == [each["metadata"]["name"]], title(each)
    for work in SERVERS:
        for constraint in work.spec["topologySpreadConstraints"]:
            assert constraint["labelSelector"]["matchLabels"] == work.labels


def test_every_service_leads_to_a_port_that_is_served() -> None:
    listening = int(named("ConfigMap", "duly-settings")["data"]["PORT"])
    for service in of_kind("Service"):
        (work,) = [each for each in SERVERS if selects({"matchLabels": service["spec"]["selector"]}, each.labels)]
        served = {port["name"]: port["containerPort"] for port in work.container["ports"]}
        for port in service["spec"]["ports"]:
            assert served[port["targetPort"]] == listening


# ------------------------------------------------------------------------------------------------------- settings


def test_every_variable_is_a_setting_of_duly() -> None:
    given = {name for each in of_kind("ConfigMap") for name in each["data"]}
    given |= {name for each in SECRETS for name in each["stringData"]}
    given |= {name for work in WORKLOADS for name in work.environment}
    of_applications = [
        URL_VARIABLE, "DOSSIER_SIGNING_KEYS", "KYC_CALLBACK_URL", "KYC_HOSTED_URL", "KYC_PROVIDER_URL",
        "PAYMENTS_BANK_URL", "PAYMENTS_CALLBACK_URL",
    ]  # fmt: skip
    assert sorted(given - setting_names()) == of_applications


@each_workload
def test_every_value_is_one_that_duly_accepts(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in work.environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.env, settings.log_format, settings.host) == ("production", "json", "0.0.0.0")


def test_every_source_of_an_environment_exists() -> None:
    there = {each["metadata"]["name"] for each in [*of_kind("ConfigMap"), *SECRETS]}
    assert {name for work in WORKLOADS for name in work.sources} == there


def test_a_pod_has_no_setting_of_its_own_but_the_port_of_its_health() -> None:
    own = {work.component: [each["name"] for each in work.container.get("env", [])] for work in WORKLOADS}
    assert own == {work.component: ["DULY_HEALTH_PORT"] if work.component in DUTIES else [] for work in WORKLOADS}


def test_a_pod_gets_only_the_secret_that_it_needs() -> None:
    for work in WORKLOADS:
        secrets = ["duly-client"] if work.component == "transfers-expire" else ["duly-database"]
        if work.component in ("api", "worker"):  # who checks webhooks, and who signs them
            secrets.append("duly-encryption")
        if work.component == "api":  # who makes dossiers
            secrets.append("duly-dossier")
        assert work.sources == ["duly-settings", *secrets], work.name


def test_the_example_of_secrets_holds_placeholders_only() -> None:
    values = [value for each in SECRETS for value in each["stringData"].values()]
    assert values
    assert all("CHANGE-ME" in value for value in values)
    assert {name for each in SECRETS for name in each["stringData"]} == {
        "DATABASE_URL",
        "DULY_CLIENT_ID",
        "DULY_CLIENT_SECRET",
        "DULY_ENCRYPTION_KEYS",
        "DOSSIER_SIGNING_KEYS",
    }
    settings = named("ConfigMap", "duly-settings")["data"]
    assert not [name for name in settings if any(word in name for word in ("SECRET", "PASSWORD", "DATABASE_URL"))]


def test_the_api_is_where_the_settings_say() -> None:
    address = urlsplit(named("ConfigMap", "duly-settings")["data"]["DULY_API_URL"])
    assert address.port in [port["port"] for port in named("Service", str(address.hostname))["spec"]["ports"]]


# -------------------------------------------------------------------------------------------------------- cronjob


def test_transfers_are_expired_every_hour_by_one_run_at_a_time() -> None:
    """T6, T8."""
    spec: dict[str, Any] = named("CronJob", "transfers-expire")["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("0 * * * *", "Etc/UTC")
    assert spec["concurrencyPolicy"] == "Forbid"
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (3, 5)
    assert 10 < spec["startingDeadlineSeconds"] < 3600
    job = spec["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] < 3600, "a run that hangs must not take the place of the next"
    assert job["backoffLimit"] <= 2, "the command retries by itself"
    pod = job["template"]["spec"]
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "transfers-expire")
    assert pod["containers"][0]["command"] == ["transfers-expire"]
    assert not spec.get("suspend")
