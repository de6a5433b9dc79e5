"""Commerce: carts become orders, which are paid within a quarter of an hour or expire (C2, C3)."""
