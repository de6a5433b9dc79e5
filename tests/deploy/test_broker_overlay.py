"""The overlay with a broker, read: a receiver is a relay with another command, and may do no more."""

from __future__ import annotations

import json

import yaml

from tests.deploy.manifests import K8S, ROOT, Manifest, read_all

OVERLAY = ROOT / "deploy" / "k8s-broker"
(KUSTOMIZATION,) = read_all(OVERLAY / "kustomization.yaml")
SECRET = {"secretRef": {"name": "duly-broker"}}


def kind_of(documents: list[Manifest], kind: str) -> Manifest:
    """The one of a kind."""
    (found,) = [each for each in documents if each["kind"] == kind]
    return found


def test_every_file_of_it_is_there_and_it_has_the_image_of_the_base() -> None:
    assert [name for name in KUSTOMIZATION["resources"] if not (OVERLAY / name).exists()] == []
    assert KUSTOMIZATION["images"] == read_all(K8S / "kustomization.yaml")[0]["images"]


def test_a_receiver_is_a_relay_with_another_command() -> None:
    """So what the tests say of a relay's pods, probes, rights and limits holds for it, too."""
    relay, receiver = read_all(K8S / "relay.yaml"), read_all(OVERLAY / "receiver.yaml")
    for kind in ("Deployment", "PodDisruptionBudget"):
        expected = json.loads(json.dumps(kind_of(relay, kind)).replace("relay", "receiver"))
        if kind == "Deployment":
            container = expected["spec"]["template"]["spec"]["containers"][0]
            container["command"] = ["duly", "receive"]
            container["envFrom"].append(SECRET)
        assert kind_of(receiver, kind) == expected
    assert kind_of(receiver, "ServiceAccount")["automountServiceAccountToken"] is False


def test_the_relay_gets_the_brokers_address() -> None:
    (patch,) = KUSTOMIZATION["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": "duly-relay"}
    (step,) = yaml.safe_load(patch["patch"])
    assert step == {"op": "add", "path": "/spec/template/spec/containers/0/envFrom/-", "value": SECRET}


def test_the_policies_open_what_relay_and_receiver_need_and_no_more() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in read_all(OVERLAY / "network-policies.yaml")}
    assert policies.keys() == {"broker", "receiver-reads-postgres", "receiver-is-scraped"}
    base = {each["metadata"]["name"]: each["spec"] for each in read_all(K8S / "network-policies.yaml")}
    assert policies["receiver-reads-postgres"]["egress"] == base["postgres"]["egress"]
    assert policies["receiver-is-scraped"]["ingress"] == base["parts-are-scraped"]["ingress"]
    (rule,) = policies["broker"]["egress"]
    assert (len(rule["to"]), len(rule["ports"])) == (1, 1)
