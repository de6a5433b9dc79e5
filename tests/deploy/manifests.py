"""Reads what is under ``deploy/``: manifests, and the pods that they make."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from duly.settings import Settings

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
PROMETHEUS = ROOT / "deploy" / "prometheus"
NAMESPACE = "duly"
EXAMPLE = K8S / "secret.example.yaml"
COMPONENT = "app.kubernetes.io/component"

Manifest = dict[str, Any]


def read_all(path: Path) -> list[Manifest]:
    """Every document of a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


KUSTOMIZATION: Manifest = read_all(K8S / "kustomization.yaml")[0]
MANIFESTS: list[Manifest] = [each for name in KUSTOMIZATION["resources"] for each in read_all(K8S / name)]
SECRETS: list[Manifest] = read_all(EXAMPLE)


def of_kind(*kinds: str) -> list[Manifest]:
    """The manifests of these kinds."""
    return [each for each in MANIFESTS if each["kind"] in kinds]


def named(kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name."""
    (found,) = [each for each in of_kind(kind) if each["metadata"]["name"] == name]
    return found


def title(manifest: Manifest) -> str:
    """What a test's id calls it."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


@dataclass(frozen=True)
class Workload:
    """Something that makes pods, and their template."""

    kind: str
    name: str
    template: Manifest

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        found: dict[str, str] = self.template["metadata"]["labels"]
        return found

    @property
    def component(self) -> str:
        """Which part of duly it is."""
        return self.labels[COMPONENT]

    @property
    def spec(self) -> Manifest:
        """Of its pods."""
        found: Manifest = self.template["spec"]
        return found

    @property
    def container(self) -> Manifest:
        """Its only one."""
        (found,) = self.spec["containers"]
        return dict(found)

    @property
    def sources(self) -> list[str]:
        """Names of the ConfigMaps and Secrets that its environment comes from."""
        return [(each.get("configMapRef") or each["secretRef"])["name"] for each in self.container["envFrom"]]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that are not secret: those of its ConfigMaps, then its own."""
        shared = [each["data"] for each in of_kind("ConfigMap") if each["metadata"]["name"] in self.sources]
        own = {each["name"]: each["value"] for each in self.container.get("env", [])}
        return {name: value for given in [*shared, own] for name, value in given.items()}


def _workload(manifest: Manifest) -> Workload:
    spec = manifest["spec"]
    template = spec["jobTemplate"]["spec"]["template"] if manifest["kind"] == "CronJob" else spec["template"]
    return Workload(manifest["kind"], manifest["metadata"]["name"], template)


WORKLOADS = [_workload(each) for each in of_kind("Deployment", "Job", "CronJob")]
SERVERS = [each for each in WORKLOADS if each.kind == "Deployment"]


def workload(component: str) -> Workload:
    """The one of that part."""
    (found,) = [each for each in WORKLOADS if each.component == component]
    return found


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector of Kubernetes picks these labels; an empty one picks everything."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In", "teach this reader the operator first"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def setting_names() -> set[str]:
    """The environment variables that duly reads."""
    return {str(field.validation_alias or f"DULY_{name.upper()}") for name, field in Settings.model_fields.items()}


def project() -> Manifest:
    """``[project]`` of pyproject.toml."""
    found: Manifest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found
