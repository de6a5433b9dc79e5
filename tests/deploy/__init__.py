"""Manifests, alert rules and the image, checked without a cluster."""
