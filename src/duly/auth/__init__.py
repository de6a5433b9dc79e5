"""Who is calling: tokens of an OpenID provider, and an issuer of them for development."""
