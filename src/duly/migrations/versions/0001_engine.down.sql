-- Everything the engine made, and nothing else; alembic's own table lives in the schema too and stays until the end.
DROP VIEW duly.queue, duly.event_log;
DROP TABLE duly.outbox, duly.lanes, duly.events, duly.consumers, duly.processed_events, duly.jobs, duly.dead_letters,
    duly.executions, duly.schedules, duly.alerts, duly.audit, duly.processes;
DROP SEQUENCE duly.lease_tokens;
DROP FUNCTION duly.emit, duly.emit_many, duly.schedule, duly.schedule_many, duly.cancel, duly.alert, duly.release_next,
    duly.lock_order, duly.plan_again, duly.keep_history,
    duly.create_partitions, duly.drop_partitions, duly.wants_notify, duly.uuid7, duly.uuid7_floor, duly.now;
