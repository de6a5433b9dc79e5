-- An event that an operator gave up is in the audit and nowhere else: whoever tells the story of an aggregate must find
-- it there, to say that it is missing. Few rows are in this index, and no other row pays for it.
CREATE INDEX audit_discarded ON duly.audit ((before ->> 'aggregate_id'), id) WHERE action = 'event.discarded';
