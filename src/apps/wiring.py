"""The one file that names every context: what ``duly up`` runs."""

from __future__ import annotations

from apps.demo import workers as demo
from duly import Duly

app = Duly()
demo.register(app)
