CREATE SCHEMA commerce;

-- Whoever ends an order or its payment holds the lock of the order's row.
CREATE TABLE commerce.orders (
    id          uuid PRIMARY KEY,
    customer_id text NOT NULL,
    currency    text NOT NULL,
    total       numeric(18, 3) NOT NULL,
    status      text NOT NULL DEFAULT 'AWAITING_PAYMENT',
    created_at  timestamptz NOT NULL,
    updated_at  timestamptz NOT NULL,
    CONSTRAINT orders_customer_is_named CHECK (length(customer_id) BETWEEN 1 AND 255),
    CONSTRAINT orders_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT orders_total_is_positive CHECK (total > 0),
    CONSTRAINT orders_status_is_known CHECK (status IN ('AWAITING_PAYMENT', 'PAID', 'EXPIRED')),
    CONSTRAINT orders_waiting_is_unchanged CHECK (status <> 'AWAITING_PAYMENT' OR updated_at = created_at)
);
CREATE INDEX orders_customer ON commerce.orders (customer_id, id);

CREATE TABLE commerce.order_lines (
    order_id   uuid NOT NULL,
    position   smallint NOT NULL,
    sku        text NOT NULL,
    quantity   integer NOT NULL,
    unit_price numeric(12, 3) NOT NULL,
    PRIMARY KEY (order_id, position),
    CONSTRAINT order_lines_order_exists FOREIGN KEY (order_id) REFERENCES commerce.orders (id),
    CONSTRAINT order_lines_are_few CHECK (position BETWEEN 1 AND 100),
    CONSTRAINT order_lines_sku_is_short CHECK (length(sku) BETWEEN 1 AND 64),
    CONSTRAINT order_lines_quantity_is_sane CHECK (quantity BETWEEN 1 AND 10000),
    CONSTRAINT order_lines_price_is_positive CHECK (unit_price > 0)
);

CREATE TABLE commerce.payments (
    order_id   uuid PRIMARY KEY,
    amount     numeric(18, 3) NOT NULL,
    status     text NOT NULL DEFAULT 'PENDING',
    created_at timestamptz NOT NULL,
    due_at     timestamptz NOT NULL,
    settled_at timestamptz,
    CONSTRAINT payments_order_exists FOREIGN KEY (order_id) REFERENCES commerce.orders (id),
    CONSTRAINT payments_amount_is_positive CHECK (amount > 0),
    CONSTRAINT payments_status_is_known CHECK (status IN ('PENDING', 'PAID', 'EXPIRED')),
    CONSTRAINT payments_window_is_kept CHECK (due_at = created_at + interval '15 minutes'),
    CONSTRAINT payments_settling_is_whole CHECK ((status = 'PENDING') = (settled_at IS NULL)),
    -- Nothing expires before its time; being paid after it is welcome, as long as nothing has expired it.
    CONSTRAINT payments_expire_in_time CHECK (status <> 'EXPIRED' OR settled_at >= due_at)
);
CREATE INDEX payments_due ON commerce.payments (due_at, order_id) WHERE status = 'PENDING';

CREATE TABLE commerce.carts (
    id          uuid PRIMARY KEY,
    customer_id text NOT NULL,
    currency    text NOT NULL,
    status      text NOT NULL DEFAULT 'OPEN',
    order_id    uuid,
    created_at  timestamptz NOT NULL,
    touched_at  timestamptz NOT NULL,
    closed_at   timestamptz,
    CONSTRAINT carts_order_exists FOREIGN KEY (order_id) REFERENCES commerce.orders (id),
    CONSTRAINT carts_customer_is_named CHECK (length(customer_id) BETWEEN 1 AND 255),
    CONSTRAINT carts_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT carts_status_is_known CHECK (status IN ('OPEN', 'CHECKED_OUT', 'ABANDONED')),
    CONSTRAINT carts_closing_is_whole CHECK ((status = 'OPEN') = (closed_at IS NULL)),
    CONSTRAINT carts_order_is_checked_out CHECK ((status = 'CHECKED_OUT') = (order_id IS NOT NULL)),
    CONSTRAINT carts_are_given_a_day CHECK (status <> 'ABANDONED' OR closed_at >= touched_at + interval '24 hours')
);
CREATE INDEX carts_open ON commerce.carts (customer_id) WHERE status = 'OPEN';
CREATE INDEX carts_untouched ON commerce.carts (touched_at, id) WHERE status = 'OPEN';
CREATE INDEX carts_closed ON commerce.carts (closed_at, id) WHERE status <> 'OPEN';

CREATE TABLE commerce.cart_items (
    cart_id    uuid NOT NULL,
    sku        text NOT NULL,
    quantity   integer NOT NULL,
    unit_price numeric(12, 3) NOT NULL,
    PRIMARY KEY (cart_id, sku),
    CONSTRAINT cart_items_cart_exists FOREIGN KEY (cart_id) REFERENCES commerce.carts (id) ON DELETE CASCADE,
    CONSTRAINT cart_items_sku_is_short CHECK (length(sku) BETWEEN 1 AND 64),
    CONSTRAINT cart_items_quantity_is_sane CHECK (quantity BETWEEN 1 AND 10000),
    CONSTRAINT cart_items_price_is_positive CHECK (unit_price > 0)
);

-- Of the secret in a link only the hash is kept: who reads the table cannot read an order with it.
CREATE TABLE commerce.order_links (
    token_sha256 bytea PRIMARY KEY,
    order_id     uuid NOT NULL,
    created_at   timestamptz NOT NULL,
    expires_at   timestamptz NOT NULL,
    CONSTRAINT order_links_order_exists FOREIGN KEY (order_id) REFERENCES commerce.orders (id),
    CONSTRAINT order_links_token_is_hashed CHECK (octet_length(token_sha256) = 32),
    CONSTRAINT order_links_live_a_week CHECK (expires_at = created_at + interval '7 days')
);
CREATE INDEX order_links_order ON commerce.order_links (order_id, expires_at);
CREATE INDEX order_links_expired ON commerce.order_links (expires_at);

-- Each looks at everything that has become due since it last ran: of what was missed, one run is enough.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('PaymentExpiration', '*/5 * * * *', 'run_once'),
    ('CartAbandonment', '17 * * * *', 'run_once'),
    ('TokenCleanup', '23 3 * * *', 'run_once'),
    ('commerce.forget-carts', '37 3 * * *', 'run_once');
