"""Who may talk to whom: nobody, except as written here; and what the Ingress shows."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from fastapi.routing import APIRoute

from apps.wiring import app
from duly.cli.parts import DUTIES
from tests.deploy.manifests import COMPONENT, WORKLOADS, named, of_kind, selects, title, workload

POLICIES = [each["spec"] for each in of_kind("NetworkPolicy")]
POSTGRES, IDENTITY, ANYONE = "192.0.2.10", "198.51.100.10", "203.0.113.7"
PRIVATE = ["10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "127.0.0.1", "fd00::1", "::1"]
DNS = {"namespace": "kube-system", "k8s-app": "kube-dns"}


def _peer_is(peer: dict[str, Any], other: dict[str, str] | str) -> bool:
    """Whether a peer of a policy is that address, or the pod with those labels (and ``namespace``, if another)."""
    if "ipBlock" in peer:
        if not isinstance(other, str) or ip_address(other).version != ip_network(peer["ipBlock"]["cidr"]).version:
            return False
        inside = ip_address(other) in ip_network(peer["ipBlock"]["cidr"])
        return inside and not any(ip_address(other) in ip_network(each) for each in peer["ipBlock"].get("except", []))
    if isinstance(other, str):
        return False
    namespace = {"kubernetes.io/metadata.name": other.get("namespace", "duly")}
    elsewhere = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "duly"}})
    return selects(elsewhere, namespace) and selects(peer.get("podSelector", {}), other)


def _allowed(labels: dict[str, str], way: str, other: dict[str, str] | str, port: int) -> bool:
    """Whether some policy lets the pod with those labels talk that way."""
    side, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
    return any(
        port in [each["port"] for each in rule["ports"]] and any(_peer_is(peer, other) for peer in rule[peers])
        for policy in POLICIES
        if way in policy["policyTypes"] and selects(policy["podSelector"], labels)
        for rule in policy.get(side, [])
    )


def may_call(component: str, other: dict[str, str] | str, port: int) -> bool:
    """Whether pods of a part may open a connection."""
    return _allowed(workload(component).labels, "Egress", other, port)


def may_be_called(component: str, other: dict[str, str], port: int) -> bool:
    """Whether pods of a part may be connected to."""
    return _allowed(workload(component).labels, "Ingress", other, port)


COMPONENTS = [work.component for work in WORKLOADS]
API = workload("api").labels


def test_everything_is_denied_by_default() -> None:
    assert named("NetworkPolicy", "deny-by-default")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_every_rule_names_its_ports_and_its_peers() -> None:
    """A rule without them means everybody, or everything."""
    for policy in of_kind("NetworkPolicy"):
        spec = policy["spec"]
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            assert rule["ports"], title(policy)
            assert all(each["port"] for each in rule["ports"]), title(policy)
            assert all(peer and all(peer.values()) for peer in rule.get("from") or rule["to"]), title(policy)


def test_every_policy_is_about_a_pod_that_exists() -> None:
    for policy in of_kind("NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        assert any(selects(selector, work.labels) for work in WORKLOADS), title(policy)
        for rule in selector.get("matchExpressions", []):
            assert rule["key"] == COMPONENT
            assert set(rule["values"]) <= set(COMPONENTS), title(policy)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_pod_finds_names(component: str) -> None:
    assert may_call(component, DNS, 53)


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.component)
def test_postgres_is_reached_by_those_who_have_its_password(work: Any) -> None:
    assert may_call(work.component, POSTGRES, 5432) == ("duly-database" in work.sources)


def test_the_api_is_called_by_the_ingress_controller_prometheus_and_the_hourly_task_only() -> None:
    assert may_be_called("api", {"namespace": "ingress-nginx"}, 8000)
    assert may_be_called("api", {"namespace": "monitoring"}, 8000)
    assert not may_be_called("api", {"namespace": "default"}, 8000)
    for work in WORKLOADS:
        expected = work.component == "transfers-expire"
        assert may_be_called("api", work.labels, 8000) == expected, work.name
        assert may_call(work.component, API, 8000) == expected, work.name


@pytest.mark.parametrize("component", [name for name in COMPONENTS if name != "api"])
def test_the_other_parts_are_called_by_prometheus_only_and_only_where_they_serve_metrics(component: str) -> None:
    ports = [port["containerPort"] for port in workload(component).container.get("ports", [])]
    assert bool(ports) == (component in DUTIES)
    for port in {8000, 5432, 443, *ports}:
        assert may_be_called(component, {"namespace": "monitoring"}, port) == (port in ports)
        for other in ({"namespace": "ingress-nginx"}, {"namespace": "default"}, *(work.labels for work in WORKLOADS)):
            assert not may_be_called(component, other, port)


def test_the_identity_provider_is_reached_by_the_api_and_the_hourly_task() -> None:
    reach = {name for name in COMPONENTS if may_call(name, IDENTITY, 443)}
    assert reach - {"worker"} == {"api", "transfers-expire"}  # workers reach the whole internet


def test_the_provider_of_identity_checks_is_reached_by_the_api() -> None:
    """F8: the others have nothing to ask it; workers reach the whole internet."""
    assert {name for name in COMPONENTS if may_call(name, "198.51.100.20", 443)} - {"worker"} == {"api"}


def test_only_workers_reach_the_internet_and_never_a_private_address() -> None:
    """E6.4, once more."""
    assert {name for name in COMPONENTS if may_call(name, ANYONE, 443)} == {"worker"}
    for address in PRIVATE:
        assert not may_call("worker", address, 443), address


# -------------------------------------------------------------------------------------------------------- ingress


def exposed(path: str) -> bool:
    """Whether the Ingress leads a path to us, by Kubernetes' rule for ``Prefix``."""
    (ingress,) = of_kind("Ingress")
    assert "defaultBackend" not in ingress["spec"]
    listed = [each for rule in ingress["spec"]["rules"] for each in rule["http"]["paths"]]
    assert {each["pathType"] for each in listed} == {"Prefix"}
    parts = path.strip("/").split("/")
    prefixes = [[part for part in each["path"].split("/") if part] for each in listed]
    return any(parts[: len(prefix)] == prefix for prefix in prefixes)


@pytest.mark.parametrize(
    "path",
    ["/internal/v1/transfers/expire-pending", "/internal", "/metrics", "/healthz", "/readyz", "/", "/dev-issuer"],
)
def test_what_is_internal_is_not_shown(path: str) -> None:
    assert not exposed(path)


@pytest.mark.parametrize(
    "path", ["/v1/products", "/ncs", "/ncs/7/close", "/user/7", "/console", "/console/static/a.css"]
)
def test_what_is_public_is_shown(path: str) -> None:
    assert exposed(path)


def test_every_route_of_the_applications_is_either_public_or_internal() -> None:
    paths = [route.path for router in app.routers for route in router.routes if isinstance(route, APIRoute)]
    assert paths
    assert [path for path in paths if exposed(path) == path.startswith("/internal/")] == []


def test_the_ingress_leads_to_a_service_over_tls() -> None:
    (ingress,) = of_kind("Ingress")
    hosts = {rule["host"] for rule in ingress["spec"]["rules"]}
    assert hosts == {host for each in ingress["spec"]["tls"] for host in each["hosts"]}
    for rule in ingress["spec"]["rules"]:
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            ports = {port["name"] for port in named("Service", backend["name"])["spec"]["ports"]}
            assert backend["port"]["name"] in ports
