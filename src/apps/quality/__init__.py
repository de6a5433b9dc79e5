"""Quality: non-conformities of suppliers, opened, closed, and audited (Q1 to Q4)."""
