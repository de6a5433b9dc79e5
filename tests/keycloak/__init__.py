"""A real Keycloak: its tokens, sign-in page and keys, and what happens when it is away (``make test-keycloak``)."""
