"""The public face is small, and a change to it is deliberate."""

from __future__ import annotations

import duly
import duly.sync


def test_the_exported_names_are_these() -> None:
    assert duly.__all__ == [
        "Cancel", "Database", "Done", "Duly", "DulyError", "Event", "EventBody", "Fail", "JobContext", "NewEvent",
        "NewJob", "Outcome", "Relay", "Scheduler", "Snooze", "Then", "ThenTogether", "Tx", "Worker", "cancel", "emit",
        "find_queued", "schedule", "schedule_many",
    ]  # fmt: skip
    assert duly.sync.__all__ == ["cancel", "emit", "schedule"]
    assert all(hasattr(duly, name) for name in duly.__all__)
