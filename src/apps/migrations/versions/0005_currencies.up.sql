CREATE SCHEMA currencies;

-- What the bank published stays as it was: a correction is another table of the same day, and one of them is valid.
CREATE TABLE currencies.rate_tables (
    number        text PRIMARY KEY,
    day           date NOT NULL,
    fetched_at    timestamptz NOT NULL,
    superseded_at timestamptz,
    CONSTRAINT rate_tables_are_numbered CHECK (number ~ '^[0-9]{1,3}/A/NBP/[0-9]{4}$'),
    CONSTRAINT rate_tables_number_is_of_the_year
        CHECK (right(number, 4) = lpad(CAST(extract(year FROM day) AS text), 4, '0')),
    CONSTRAINT rate_tables_are_superseded_later CHECK (superseded_at >= fetched_at)
);
CREATE UNIQUE INDEX rate_tables_day ON currencies.rate_tables (day) WHERE superseded_at IS NULL;

-- Zlotys for one unit; the digits are the bank's.
CREATE TABLE currencies.rates (
    number   text NOT NULL,
    code     text NOT NULL,
    currency text NOT NULL,
    mid      numeric NOT NULL,
    PRIMARY KEY (number, code),
    CONSTRAINT rates_table_exists
        FOREIGN KEY (number) REFERENCES currencies.rate_tables (number) ON DELETE CASCADE,
    CONSTRAINT rates_code_is_a_currency CHECK (code ~ '^[A-Z]{3}$'),
    CONSTRAINT rates_currency_is_named CHECK (length(currency) BETWEEN 1 AND 100),
    CONSTRAINT rates_mid_is_sane CHECK (mid BETWEEN 0.000001 AND 1000 AND scale(mid) <= 8)
);

-- Each day has a table of its own: of what was missed, each day is fetched.
INSERT INTO duly.schedules (name, cron, timezone, max_retries, misfire) VALUES
    ('CurrencyRateSync', '15 12 * * *', 'Europe/Warsaw', 3, 'run_all');
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('currencies.forget-tables', '53 3 1 * *', 'run_once');
