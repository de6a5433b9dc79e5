"""Writes the alert rules once more, as the custom resource of the Prometheus operator."""

from __future__ import annotations

import textwrap

from tests.deploy.manifests import NAMESPACE, PROMETHEUS

RULES = PROMETHEUS / "rules.yaml"
RESOURCE = PROMETHEUS / "prometheusrule.yaml"
HEAD = f"""\
# Made from rules.yaml: python -m tests.deploy.prometheusrule
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: duly
  namespace: {NAMESPACE}
  labels:
    app.kubernetes.io/name: duly
spec:
"""


def render(rules: str) -> str:
    """The resource that holds these groups."""
    return HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")


if __name__ == "__main__":
    RESOURCE.write_text(render(RULES.read_text()))
