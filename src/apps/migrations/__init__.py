"""The applications' schemas, one a context, step by step."""
