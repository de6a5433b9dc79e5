"""Alert rules: they parse, name metrics that exist, and lead to a page that helps (T8, E5.7)."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import REGISTRY

import duly.operate.metrics
import duly.telemetry  # noqa: F401 - importing both is what registers the metrics
from duly.cli.parts import DUTIES
from tests.deploy.manifests import NAMESPACE, PROMETHEUS, ROOT, SERVERS, WORKLOADS, named, read_all, selects
from tests.deploy.prometheusrule import RESOURCE, RULES, render
from tests.deploy.promql import At, Series, expand, firing, labels_of, minutes

GROUPS: list[dict[str, Any]] = read_all(RULES)[0]["groups"]
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
UNIT_TESTS = PROMETHEUS / "rules.test.yaml"
STORIES: list[dict[str, Any]] = read_all(UNIT_TESTS)[0]["tests"]
KUBE_STATE_METRICS = {  # stable ones, with the labels that the rules use
    "kube_cronjob_status_last_successful_time": {"namespace", "cronjob"},
    "kube_deployment_status_replicas_available": {"namespace", "deployment"},
    "kube_job_owner": {"namespace", "job_name", "owner_kind", "owner_name"},
    "kube_job_status_failed": {"namespace", "job_name", "reason"},
    "kube_job_status_start_time": {"namespace", "job_name"},
}
each_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])


def selectors(expr: str) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of series in an expression."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql_parser.walk(promql_parser.parse(expr), visit)
    return iter(found)


def our_metrics() -> dict[str, set[str]]:
    """The series that a scrape of duly can show, with their labels."""
    found: dict[str, set[str]] = {}
    for family in list(REGISTRY._collector_to_names):  # it has no public list of what has no sample yet
        kind, labels = getattr(family, "_type", ""), set(getattr(family, "_labelnames", ()))
        for name in REGISTRY._collector_to_names[family]:
            more = {"le"} if kind == "histogram" and name.endswith("_bucket") else set()
            found[name] = labels | more
    return found


def kept_labels(expr: str) -> set[str]:
    """The labels that the result of an expression has: those of its first aggregation, else of its series."""
    if grouped := re.search(r"\bby \(([^)]+)\)", expr):
        return set(grouped.group(1).split(", "))
    return KUBE_STATE_METRICS.get(str(next(selectors(expr)).name), set())


def headings(page: str) -> set[str]:
    """The anchors that a page's headings make."""
    lines = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in lines}


@each_alert
def test_an_alert_says_how_bad_it_is_what_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert all(text.strip() for text in rule["annotations"].values())
    assert promql_parser.parse_duration(rule["for"])


@each_alert
def test_a_runbook_is_a_heading_that_exists(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in headings((ROOT / page).read_text())


@each_alert
def test_an_expression_parses_and_names_metrics_and_labels_that_exist(rule: dict[str, Any]) -> None:
    known = {**KUBE_STATE_METRICS, **our_metrics()}
    asked = list(selectors(rule["expr"]))
    assert asked
    for selector in asked:
        assert selector.name in known
        labels = {matcher.name for matcher in selector.matchers.matchers}
        assert labels <= known[selector.name], selector.name


@each_alert
def test_labels_in_a_text_are_labels_of_the_alert(rule: dict[str, Any]) -> None:
    """A label that an aggregation dropped would be shown as nothing."""
    told = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert told <= kept_labels(rule["expr"])


def test_everything_an_operator_must_hear_of_has_an_alert() -> None:
    """T8: failed and missing runs; and what run-in-production says to alert on."""
    asked = {str(selector.name) for rule in ALERTS for selector in selectors(rule["expr"])}
    page = (ROOT / "docs" / "howto" / "run-in-production.md").read_text()
    named_there = set(re.findall(r"`(duly_\w+)`", page))
    assert named_there
    assert named_there <= asked
    assert {"kube_job_status_failed", "kube_cronjob_status_last_successful_time", "duly_duty_up"} <= asked
    assert {"duly_http_requests_total", "duly_http_seconds_bucket"} <= asked
    absent = [rule["expr"] for rule in ALERTS if rule["expr"].startswith("absent(")]
    assert len(absent) == 2


def test_no_two_alerts_have_one_name() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names))


def test_rules_name_objects_that_the_manifests_make() -> None:
    for rule in ALERTS:
        for selector in selectors(rule["expr"]):
            matchers = {matcher.name: matcher.value for matcher in selector.matchers.matchers}
            if str(selector.name).startswith("kube_"):
                assert matchers["namespace"] == NAMESPACE
            for label in ("cronjob", "owner_name"):
                if label in matchers:
                    assert named("CronJob", matchers[label])
            if "deployment" in matchers:
                pattern = re.compile(matchers["deployment"])
                assert [work.name for work in SERVERS if not pattern.fullmatch(work.name)] == []


def test_the_operator_gets_the_same_rules() -> None:
    assert RESOURCE.read_text() == render(RULES.read_text()), "run: python -m tests.deploy.prometheusrule"
    assert yaml.safe_load(RESOURCE.read_text())["spec"]["groups"] == GROUPS


def test_the_monitor_finds_the_pods_that_serve_metrics() -> None:
    """E5.7: all of them, not only the api; that /metrics answers there is shown in test_probes."""
    (monitor,) = read_all(PROMETHEUS / "podmonitor.yaml")
    assert monitor["metadata"]["namespace"] == NAMESPACE
    assert [work for work in WORKLOADS if selects(monitor["spec"]["selector"], work.labels)] == SERVERS
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for work in SERVERS:
        assert endpoint["port"] in [port["name"] for port in work.container["ports"]], work.name
    assert endpoint["path"] == "/metrics"


def test_a_duty_that_is_down_or_not_scraped_raises_an_alert_whichever_it_is() -> None:
    assert {work.component for work in SERVERS} == {"api", *DUTIES}
    for duty in DUTIES:
        up, down = (labels_of(f'duly_duty_up{{duty="{duty}", instance="{name}"}}') for name in "ab")
        series: Series = {up: expand("1x10"), down: expand("0x10")}
        fired = [dict(labels) for labels in firing(ALERTS, series, 10)]
        assert [(each["duty"], each["instance"]) for each in fired if each["alertname"] == "DulyDutyDown"] == [
            (duty, "b")
        ]
        missing = {each.get("duty") for each in fired if each["alertname"] == "DulyMetricsMissing"}
        assert missing == {None, *DUTIES} - {duty}


def test_every_alert_is_made_to_fire_in_the_unit_tests() -> None:
    text = UNIT_TESTS.read_text()
    assert [rule["alert"] for rule in ALERTS if f'alertname="{rule["alert"]}"' not in text] == []


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story["name"])
def test_exactly_the_alerts_of_a_story_fire(story: dict[str, Any]) -> None:
    """T8: a failed run and a missing one do raise an alert, and one that is over does not."""
    assert story.keys() == {"name", "interval", "input_series", "promql_expr_test"}
    assert minutes(story["interval"]) == 1
    series: Series = {labels_of(each["series"]): expand(each["values"]) for each in story["input_series"]}
    for check in story["promql_expr_test"]:
        at = minutes(check["eval_time"])
        alerts: Series = {labels: [None] * at + [1.0] for labels in firing(ALERTS, series, at)}
        found = At(alerts, at).evaluate(promql_parser.parse(check["expr"]))
        assert found == {labels_of(each["labels"]): each["value"] for each in check["exp_samples"]}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool; the test above reads the same file without it")
def test_promtool_says_the_same() -> None:
    done = subprocess.run(["promtool", "test", "rules", UNIT_TESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
