"""Every number quoted in the docs comes from here. ``python -m benchmarks --help`` says what can be measured."""
