CREATE SCHEMA users;

CREATE TABLE users.users (
    id            uuid PRIMARY KEY,
    first_name    text NOT NULL,
    last_name     text NOT NULL,
    date_of_birth date NOT NULL,
    timezone      text NOT NULL,
    version       integer NOT NULL DEFAULT 1,
    created_at    timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL,
    CONSTRAINT users_are_named
        CHECK (length(first_name) BETWEEN 1 AND 200 AND length(last_name) BETWEEN 1 AND 200),
    CONSTRAINT users_birth_is_plausible CHECK (date_of_birth >= '1900-01-01'),
    CONSTRAINT users_zone_is_named CHECK (length(timezone) BETWEEN 1 AND 50),
    CONSTRAINT users_version_counts_up CHECK (version >= 1)
);

CREATE SCHEMA birthdays;

-- What this context knows of users: its own copy, kept by the events of the other.
CREATE TABLE birthdays.people (
    user_id       uuid PRIMARY KEY,
    first_name    text NOT NULL,
    last_name     text NOT NULL,
    date_of_birth date NOT NULL,
    timezone      text NOT NULL
);

-- One message for each user and calendar year. The local time is what was promised; the instant follows from it.
CREATE TABLE birthdays.events (
    id             uuid PRIMARY KEY,
    user_id        uuid NOT NULL,
    year           integer NOT NULL,
    target_local   timestamp NOT NULL,
    timezone       text NOT NULL,
    target_utc     timestamptz NOT NULL,
    status         text NOT NULL DEFAULT 'PENDING',
    version        integer NOT NULL DEFAULT 1,
    processing_at  timestamptz,
    executed_at    timestamptz,
    failure_reason text,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    CONSTRAINT events_one_a_year UNIQUE (user_id, year),
    CONSTRAINT events_status_is_known CHECK (status IN ('PENDING', 'PROCESSING', 'COMPLETED', 'FAILED')),
    CONSTRAINT events_version_counts_up CHECK (version >= 1),
    CONSTRAINT events_year_is_the_birthdays CHECK (year = date_part('year', target_local)),
    CONSTRAINT events_are_at_nine CHECK (CAST(target_local AS time) = '09:00'),
    -- No zone is further from UTC than 15 hours, and no gap longer than a day.
    CONSTRAINT events_target_is_one_moment
        CHECK (abs(date_part('epoch', target_utc - (target_local AT TIME ZONE 'UTC'))) <= 129600),
    CONSTRAINT events_status_is_explained
        CHECK ((status = 'PENDING') = (processing_at IS NULL) AND (status = 'COMPLETED') = (executed_at IS NOT NULL)
               AND (status = 'FAILED') = (failure_reason IS NOT NULL)),
    CONSTRAINT events_are_never_early CHECK (processing_at >= target_utc AND executed_at >= processing_at),
    CONSTRAINT events_reason_is_short CHECK (length(failure_reason) BETWEEN 1 AND 500)
);
CREATE UNIQUE INDEX events_one_pending ON birthdays.events (user_id) WHERE status = 'PENDING';
CREATE INDEX events_due ON birthdays.events (target_utc, id) WHERE status = 'PENDING';
CREATE INDEX events_processing ON birthdays.events (processing_at, id) WHERE status = 'PROCESSING';
CREATE INDEX events_over ON birthdays.events (target_utc, id) WHERE status IN ('COMPLETED', 'FAILED');

INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('birthdays.claim', '* * * * *', 'run_once'),
    ('birthdays.recover', '*/10 * * * *', 'run_once'),
    ('birthdays.recheck-zones', '33 2 * * *', 'run_once'),
    ('birthdays.forget-events', '23 4 * * *', 'run_once');
