"""One collection of every table that the engine declares; the migrations are what makes them."""

from __future__ import annotations

from sqlalchemy import MetaData

metadata = MetaData(schema="duly")
