"""The dossier of a payment: everything that is known of it in one signed file that can be checked without us."""
