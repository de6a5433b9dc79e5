CREATE SCHEMA transfers;

CREATE TABLE transfers.products (
    id         uuid PRIMARY KEY,
    name       text NOT NULL,
    owner_id   text NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT products_name_is_short CHECK (length(name) BETWEEN 1 AND 200),
    CONSTRAINT products_owner_is_named CHECK (length(owner_id) BETWEEN 1 AND 255)
);

-- Whoever changes a transfer or a service request holds the lock of the product's row.
CREATE TABLE transfers.transfers (
    id           uuid PRIMARY KEY,
    product_id   uuid NOT NULL,
    from_user_id text NOT NULL,
    to_user_id   text NOT NULL,
    status       text NOT NULL DEFAULT 'Pending',
    created_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL,
    CONSTRAINT transfers_product_exists FOREIGN KEY (product_id) REFERENCES transfers.products (id),
    CONSTRAINT transfers_status_is_known
        CHECK (status IN ('Pending', 'Accepted', 'Rejected', 'Cancelled', 'Expired')),
    CONSTRAINT transfers_users_are_two CHECK (from_user_id <> to_user_id),
    CONSTRAINT transfers_users_are_named
        CHECK (length(from_user_id) BETWEEN 1 AND 255 AND length(to_user_id) BETWEEN 1 AND 255),
    CONSTRAINT transfers_pending_is_unchanged CHECK (status <> 'Pending' OR updated_at = created_at),
    -- Nothing expires before the 72 hours are over, and nothing else happens after them.
    CONSTRAINT transfers_window_is_kept
        CHECK (status = 'Pending' OR (status = 'Expired') = (updated_at > created_at + interval '72 hours'))
);
CREATE UNIQUE INDEX transfers_one_pending ON transfers.transfers (product_id) WHERE status = 'Pending';
CREATE INDEX transfers_due ON transfers.transfers (status, created_at, id);
CREATE INDEX transfers_product ON transfers.transfers (product_id, created_at, id);

CREATE TABLE transfers.service_requests (
    id           uuid PRIMARY KEY,
    product_id   uuid NOT NULL,
    requested_by text NOT NULL,
    description  text NOT NULL,
    status       text NOT NULL,
    created_at   timestamptz NOT NULL,
    updated_at   timestamptz NOT NULL,
    CONSTRAINT service_requests_product_exists FOREIGN KEY (product_id) REFERENCES transfers.products (id),
    CONSTRAINT service_requests_status_is_known CHECK (status IN ('InProgress', 'Paused', 'Cancelled')),
    CONSTRAINT service_requests_asker_is_named CHECK (length(requested_by) BETWEEN 1 AND 255),
    CONSTRAINT service_requests_description_is_short CHECK (length(description) BETWEEN 1 AND 4000)
);
CREATE INDEX service_requests_status ON transfers.service_requests (product_id, status);
CREATE INDEX service_requests_newest ON transfers.service_requests (product_id, created_at, id);

-- What users are told: one row for each event.
CREATE TABLE transfers.notices (
    id          uuid PRIMARY KEY,
    event_id    uuid NOT NULL,
    user_id     text NOT NULL,
    kind        text NOT NULL,
    transfer_id uuid NOT NULL,
    product_id  uuid NOT NULL,
    created_at  timestamptz NOT NULL,
    CONSTRAINT notices_kind_is_known CHECK (kind IN ('TransferExpired')),
    CONSTRAINT notices_user_is_named CHECK (length(user_id) BETWEEN 1 AND 255)
);
CREATE UNIQUE INDEX notices_event ON transfers.notices (event_id);
CREATE INDEX notices_user ON transfers.notices (user_id, id);

INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('transfers.expire-pending', '0 * * * *', 'run_once'),
    ('transfers.forget-notices', '13 4 * * *', 'run_once');
