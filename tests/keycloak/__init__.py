"""A real Keycloak: its tokens, its sign-in page, its keys, and what happens when it is away (``make test-keycloak``)."""
