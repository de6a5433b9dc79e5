CREATE INDEX cases_by_kind_and_status ON compliance.cases (kind, status, id);
CREATE INDEX cases_by_severity_and_status ON compliance.cases (severity, status, id);
CREATE INDEX cases_by_assignee_and_status ON compliance.cases (assignee, status, id) WHERE assignee IS NOT NULL;
DROP INDEX compliance.cases_by_label;
DROP INDEX compliance.cases_by_assignee_and_label;
