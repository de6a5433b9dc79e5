CREATE SCHEMA ledger;

-- Amounts are whole minor units (cents), signed: debits are positive, credits negative. An account's balance is the sum
-- of its entries; what people see is side * balance.

-- What an account is. It never changes, but for its name.
CREATE TABLE ledger.accounts (
    id              uuid PRIMARY KEY,
    name            text NOT NULL,
    type            text NOT NULL,
    currency        text NOT NULL,
    digits          smallint NOT NULL,
    side            smallint NOT NULL,
    may_go_negative boolean NOT NULL,
    created_at      timestamptz NOT NULL,
    CONSTRAINT accounts_name_is_short CHECK (length(name) BETWEEN 1 AND 200),
    CONSTRAINT accounts_type_is_known CHECK (type IN ('ASSET', 'LIABILITY', 'EQUITY', 'INCOME', 'EXPENSE')),
    CONSTRAINT accounts_currency_is_a_code CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT accounts_digits_are_few CHECK (digits BETWEEN 0 AND 4),
    CONSTRAINT accounts_side_is_the_types CHECK (side = CASE WHEN type IN ('ASSET', 'EXPENSE') THEN 1 ELSE -1 END),
    CONSTRAINT accounts_terms_are_kept UNIQUE (id, currency, digits, side, may_go_negative)
);

-- How an account stands: one narrow row, updated in place (HOT: no index has what changes, and pages are half empty).
-- Its lock is the account's lock. The terms are repeated, so that a posting reads and locks one row an account.
CREATE TABLE ledger.balances (
    account_id      uuid PRIMARY KEY,
    currency        text NOT NULL,
    digits          smallint NOT NULL,
    side            smallint NOT NULL,
    may_go_negative boolean NOT NULL,
    status          text NOT NULL DEFAULT 'ACTIVE',
    balance         bigint NOT NULL DEFAULT 0,
    held            bigint NOT NULL DEFAULT 0,
    version         bigint NOT NULL DEFAULT 0,
    posted_at       timestamptz,
    closed_at       timestamptz,
    CONSTRAINT balances_terms_are_the_accounts FOREIGN KEY (account_id, currency, digits, side, may_go_negative)
        REFERENCES ledger.accounts (id, currency, digits, side, may_go_negative),
    CONSTRAINT balances_status_is_known CHECK (status IN ('ACTIVE', 'CLOSED')),
    CONSTRAINT balances_closing_is_whole CHECK ((status = 'CLOSED') = (closed_at IS NOT NULL)),
    CONSTRAINT balances_closed_is_empty CHECK (status = 'ACTIVE' OR (balance = 0 AND held = 0)),
    CONSTRAINT balances_begin_empty CHECK (version > 0 OR (version = 0 AND balance = 0)),
    CONSTRAINT balances_version_has_its_time CHECK ((version = 0) = (posted_at IS NULL)),
    CONSTRAINT balances_held_is_not_negative CHECK (held >= 0),
    CONSTRAINT balances_are_storable CHECK (abs(balance) <= 1000000000000000000),
    CONSTRAINT balances_are_covered CHECK (may_go_negative OR side * balance - held >= 0)
) WITH (fillfactor = 50);

-- The journal's headings. xid is the database transaction that wrote it: nothing can be added to it later, and the seals
-- know by it what can no longer appear.
CREATE TABLE ledger.transactions (
    id          uuid PRIMARY KEY,
    reference   text NOT NULL,
    currency    text NOT NULL,
    amount      bigint NOT NULL,
    status      text NOT NULL DEFAULT 'POSTED',
    reverses_id uuid,
    hold_id     uuid,
    reason      text,
    posted_at   timestamptz NOT NULL,
    xid         xid8 NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT transactions_reference_is_unique UNIQUE (reference),
    CONSTRAINT transactions_reversed_exists FOREIGN KEY (reverses_id) REFERENCES ledger.transactions (id),
    CONSTRAINT transactions_reference_is_short CHECK (length(reference) BETWEEN 1 AND 204),
    CONSTRAINT transactions_amount_is_positive CHECK (amount > 0),
    CONSTRAINT transactions_status_is_known CHECK (status IN ('POSTED', 'REVERSED')),
    CONSTRAINT transactions_reversal_stays CHECK (reverses_id IS NULL OR (status = 'POSTED' AND reason IS NOT NULL)),
    CONSTRAINT transactions_reason_is_short CHECK (length(reason) BETWEEN 1 AND 4000)
);
CREATE UNIQUE INDEX transactions_reversed_once ON ledger.transactions (reverses_id) WHERE reverses_id IS NOT NULL;
CREATE INDEX transactions_written ON ledger.transactions (xid, id);

-- The journal's lines. There are no foreign keys: the guard below proves more than they could, once a statement, and
-- takes no locks on rows that every posting to a busy account shares.
CREATE TABLE ledger.entries (
    account_id     uuid NOT NULL,
    version        bigint NOT NULL,
    transaction_id uuid NOT NULL,
    line           smallint NOT NULL,
    amount         bigint NOT NULL,
    balance_after  bigint NOT NULL,
    posted_at      timestamptz NOT NULL,
    PRIMARY KEY (account_id, version),
    CONSTRAINT entries_line_is_one UNIQUE (transaction_id, line),
    CONSTRAINT entries_amount_is_not_zero CHECK (amount <> 0),
    CONSTRAINT entries_lines_are_few CHECK (line BETWEEN 1 AND 500)
);

-- Money set aside: still in the balance, no longer available.
CREATE TABLE ledger.holds (
    id         uuid PRIMARY KEY,
    account_id uuid NOT NULL,
    reference  text NOT NULL,
    amount     bigint NOT NULL,
    captured   bigint NOT NULL DEFAULT 0,
    status     text NOT NULL DEFAULT 'ACTIVE',
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    ended_at   timestamptz,
    CONSTRAINT holds_reference_is_unique UNIQUE (reference),
    CONSTRAINT holds_account_exists FOREIGN KEY (account_id) REFERENCES ledger.accounts (id),
    CONSTRAINT holds_reference_is_short CHECK (length(reference) BETWEEN 1 AND 200),
    CONSTRAINT holds_amount_is_positive CHECK (amount > 0),
    CONSTRAINT holds_captured_fits CHECK (captured BETWEEN 0 AND amount),
    CONSTRAINT holds_status_is_known CHECK (status IN ('ACTIVE', 'CAPTURED', 'VOIDED', 'EXPIRED')),
    CONSTRAINT holds_ending_is_whole CHECK ((status = 'ACTIVE') = (ended_at IS NULL)),
    CONSTRAINT holds_captured_has_some CHECK (status <> 'CAPTURED' OR captured > 0),
    CONSTRAINT holds_used_up_is_captured CHECK (captured < amount OR status = 'CAPTURED'),
    CONSTRAINT holds_expire_in_time CHECK (status <> 'EXPIRED' OR ended_at >= expires_at)
);
CREATE INDEX holds_active ON ledger.holds (account_id) INCLUDE (amount, captured) WHERE status = 'ACTIVE';
CREATE INDEX holds_ended ON ledger.holds (ended_at, id) WHERE status <> 'ACTIVE';

-- A chain of hashes over the journal: each seal covers what the database transactions from first_xid up to, and without,
-- next_xid wrote, and the seal before it.
CREATE TABLE ledger.seals (
    number        bigint PRIMARY KEY,
    first_xid     xid8 NOT NULL,
    next_xid      xid8 NOT NULL,
    transactions  bigint NOT NULL,
    entries       bigint NOT NULL,
    previous_hash bytea NOT NULL,
    hash          bytea NOT NULL,
    sealed_at     timestamptz NOT NULL,
    CONSTRAINT seals_chain_is_a_line UNIQUE (previous_hash),
    CONSTRAINT seals_hash_is_unique UNIQUE (hash),
    CONSTRAINT seals_are_counted CHECK (number > 0),
    CONSTRAINT seals_go_forward CHECK (next_xid > first_xid),
    CONSTRAINT seals_hashes_are_sha256 CHECK (octet_length(previous_hash) = 32 AND octet_length(hash) = 32),
    CONSTRAINT seals_cover_something CHECK (transactions > 0 AND entries >= 2 * transactions)
);

-- ------------------------------------------------------------------------------------------- what nobody may do, ever

-- Who owns the tables can drop these triggers: that is a matter of roles (deploy/sql/roles.sql); the seals show it.
CREATE FUNCTION ledger.keep() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'ledger.% is never changed: % is refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'restrict_violation', HINT = 'Post a transaction that corrects it, or reverse it.';
END
$$;

-- The one change a heading knows: it was reversed, by a reversal that is there.
CREATE FUNCTION ledger.keep_transaction() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF OLD.status = 'POSTED' AND NEW.status = 'REVERSED'
       AND EXISTS (SELECT 1 FROM ledger.transactions t WHERE t.reverses_id = OLD.id) THEN
        OLD.status := 'REVERSED';
        IF OLD IS NOT DISTINCT FROM NEW THEN
            RETURN NEW;
        END IF;
    END IF;
    RAISE EXCEPTION 'ledger.transactions is never changed, but for the mark of a reversal: UPDATE is refused'
        USING ERRCODE = 'restrict_violation', HINT = 'Post a transaction that corrects it, or reverse it.';
END
$$;

CREATE FUNCTION ledger.keep_account() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF (OLD.id, OLD.type, OLD.currency, OLD.digits, OLD.side, OLD.may_go_negative, OLD.created_at)
       IS DISTINCT FROM
       (NEW.id, NEW.type, NEW.currency, NEW.digits, NEW.side, NEW.may_go_negative, NEW.created_at) THEN
        RAISE EXCEPTION 'the terms of an account are never changed: UPDATE is refused'
            USING ERRCODE = 'restrict_violation', HINT = 'Open another account.';
    END IF;
    RETURN NEW;
END
$$;

-- Each new line belongs to a heading of this very database transaction, in the heading's currency and at its time, and
-- follows the account's last line without a gap. Plans are nested loops over indexes, whatever the statistics say.
CREATE FUNCTION ledger.guard_entries() RETURNS trigger
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    stray record;
BEGIN
    SELECT n.account_id, n.version INTO stray
    FROM fresh n
    LEFT JOIN ledger.transactions t ON t.id = n.transaction_id AND t.xid = pg_current_xact_id()
    LEFT JOIN ledger.accounts a ON a.id = n.account_id AND a.currency = t.currency
    LEFT JOIN ledger.entries p ON p.account_id = n.account_id AND p.version = n.version - 1
    WHERE t.id IS NULL OR a.id IS NULL OR n.posted_at <> t.posted_at OR n.version < 1
       OR (n.version > 1) <> (p.version IS NOT NULL)
       OR n.balance_after <> coalesce(p.balance_after, 0) + n.amount
       OR p.posted_at > n.posted_at
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the entry % of account % follows nothing, or is no part of a transaction that is being posted',
            stray.version, stray.account_id
            USING ERRCODE = 'check_violation', TABLE = 'entries', SCHEMA = 'ledger', CONSTRAINT = 'entries_are_guarded';
    END IF;
    RETURN NULL;
END
$$;

-- Once a transaction, at COMMIT: two lines or more, debits equal credits, and the heading says how much. All lines are
-- in the heading's currency, as the guard has seen to.
CREATE FUNCTION ledger.prove_transaction() RETURNS trigger
LANGUAGE plpgsql
SET enable_seqscan = off
AS $$
DECLARE
    lines bigint;
    total numeric;
    debits numeric;
BEGIN
    SELECT count(*), sum(e.amount), sum(e.amount) FILTER (WHERE e.amount > 0) INTO lines, total, debits
    FROM ledger.entries e WHERE e.transaction_id = NEW.id;
    IF lines < 2 OR total <> 0 OR debits <> NEW.amount THEN
        RAISE EXCEPTION 'the transaction % does not balance: % entries, sum %', NEW.id, lines, coalesce(total, 0)
            USING ERRCODE = 'check_violation', TABLE = 'transactions', SCHEMA = 'ledger',
                  CONSTRAINT = 'transactions_balance';
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER entries_guard AFTER INSERT ON ledger.entries REFERENCING NEW TABLE AS fresh
    FOR EACH STATEMENT EXECUTE FUNCTION ledger.guard_entries();
CREATE CONSTRAINT TRIGGER transactions_balance AFTER INSERT ON ledger.transactions
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION ledger.prove_transaction();

CREATE TRIGGER entries_keep BEFORE UPDATE OR DELETE ON ledger.entries FOR EACH ROW EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER entries_keep_all BEFORE TRUNCATE ON ledger.entries EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER transactions_mark BEFORE UPDATE ON ledger.transactions
    FOR EACH ROW EXECUTE FUNCTION ledger.keep_transaction();
CREATE TRIGGER transactions_keep BEFORE DELETE ON ledger.transactions FOR EACH ROW EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER transactions_keep_all BEFORE TRUNCATE ON ledger.transactions EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER accounts_terms BEFORE UPDATE ON ledger.accounts
    FOR EACH ROW EXECUTE FUNCTION ledger.keep_account();
CREATE TRIGGER accounts_keep BEFORE DELETE ON ledger.accounts FOR EACH ROW EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER accounts_keep_all BEFORE TRUNCATE ON ledger.accounts EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER balances_keep BEFORE DELETE ON ledger.balances FOR EACH ROW EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER balances_keep_all BEFORE TRUNCATE ON ledger.balances EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER seals_keep BEFORE UPDATE OR DELETE ON ledger.seals FOR EACH ROW EXECUTE FUNCTION ledger.keep();
CREATE TRIGGER seals_keep_all BEFORE TRUNCATE ON ledger.seals EXECUTE FUNCTION ledger.keep();

-- ----------------------------------------------------------------------------------------- what alone writes the ledger

-- These run with the rights of the owner: the application's role needs no right to write the tables. What is refused is
-- an answer, not an error: the caller's transaction goes on.

CREATE FUNCTION ledger.open_account(
    new_id uuid, new_name text, new_type text, new_currency text, new_digits integer, new_may_go_negative boolean
) RETURNS timestamptz
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
WITH described AS (
    INSERT INTO ledger.accounts (id, name, type, currency, digits, side, may_go_negative, created_at)
    VALUES (new_id, new_name, new_type, new_currency, new_digits,
            CASE WHEN new_type IN ('ASSET', 'EXPENSE') THEN 1 ELSE -1 END, new_may_go_negative, duly.now())
    RETURNING *
), opened AS (
    INSERT INTO ledger.balances (account_id, currency, digits, side, may_go_negative)
    SELECT id, currency, digits, side, may_go_negative FROM described
)
SELECT created_at FROM described
$$;

-- How many minor units one has: 100 with two digits.
CREATE FUNCTION ledger.minor_units(digits integer) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT CASE digits WHEN 2 THEN 100 WHEN 0 THEN 1 WHEN 3 THEN 1000 WHEN 1 THEN 10 ELSE 10000 END::numeric $$;

-- One minor unit: 0.01 with two digits. To multiply with it is exact.
CREATE FUNCTION ledger.minor_unit(digits integer) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT CASE digits WHEN 2 THEN 0.01 WHEN 0 THEN 1 WHEN 3 THEN 0.001 WHEN 1 THEN 0.1 ELSE 0.0001 END $$;

-- Minor units as people write them: 1250 with two digits is 12.50.
CREATE FUNCTION ledger.show(amount numeric, digits integer) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$ SELECT (amount * ledger.minor_unit(digits))::text $$;

-- Post transactions, all of them or none. new_ids and new_references are the headings; the other arrays are the lines,
-- in order: of_transaction counts headings from 1, amounts are decimals, positive for debits, and a covered line must
-- not overdraw its account even where the account may go negative.
-- reverses, reason, hold and is_final are of a single transaction. The answer's arrays are by line; what is refused
-- has the outcome, and the place of the line (or 0).
CREATE FUNCTION ledger.post(
    new_ids uuid[], new_references text[], of_transaction integer[], line_accounts uuid[], line_amounts numeric[],
    line_covered boolean[], headers jsonb, notify boolean,
    reverses uuid DEFAULT NULL, new_reason text DEFAULT NULL, hold uuid DEFAULT NULL, is_final boolean DEFAULT NULL,
    OUT outcome text, OUT place integer, OUT moment timestamptz, OUT currencies text[], OUT amounts bigint[],
    OUT versions bigint[], OUT balances bigint[], OUT sides smallint[]
)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    locked ledger.balances[];
    refusals text[];
    wanted ledger.holds;
    taken numeric := 0;
    released numeric := 0;
    written integer;
BEGIN
    -- 1. The accounts' locks, in the order of their ids: whoever posts to the same accounts waits, and nobody in a
    -- circle. What a locked row says is its newest version, also after waiting.
    locked := ARRAY(SELECT b FROM ledger.balances b WHERE b.account_id = ANY(line_accounts)
                    ORDER BY b.account_id FOR NO KEY UPDATE);

    IF hold IS NOT NULL THEN
        -- Guarded by the lock of its account, which is one of the lines.
        SELECT * INTO wanted FROM ledger.holds h WHERE h.id = hold AND h.account_id = ANY(line_accounts) FOR UPDATE;
        SELECT sum(-b.side * l.amount * ledger.minor_units(b.digits)) INTO taken
        FROM unnest(line_accounts, line_amounts) AS l(account_id, amount)
        JOIN unnest(locked) AS b ON b.account_id = l.account_id
        WHERE l.account_id = wanted.account_id;
        outcome := CASE WHEN wanted.id IS NULL THEN 'hold_unknown' WHEN wanted.status <> 'ACTIVE' THEN 'hold_ended'
                        WHEN wanted.expires_at <= duly.now() THEN 'hold_ended'
                        WHEN taken > wanted.amount - wanted.captured THEN 'hold_exceeded' END;
        IF outcome IS NOT NULL THEN
            place := 0;
            RETURN;
        END IF;
        released := CASE WHEN is_final THEN wanted.amount - wanted.captured ELSE taken END;
    END IF;

    -- 2. What each line leads to, and the first that is refused.
    WITH lines AS (
        SELECT l.place, l.heading, l.covered, b.account_id, b.status, b.currency, b.side, b.may_go_negative, b.digits,
               l.amount * ledger.minor_units(b.digits) AS minor, b.version, b.balance, b.posted_at,
               b.held - CASE WHEN b.account_id = wanted.account_id THEN released ELSE 0 END AS held
        FROM unnest(of_transaction, line_accounts, line_amounts, line_covered) WITH ORDINALITY
             AS l(heading, account_id, amount, covered, place)
        LEFT JOIN unnest(locked) AS b ON b.account_id = l.account_id
    ), followed AS (
        SELECT l.*, l.version + row_number() OVER account AS next_version,
               l.balance + sum(l.minor) OVER account AS after,
               first_value(l.currency) OVER (PARTITION BY l.heading ORDER BY l.place) AS heading_currency,
               lead(l.heading) OVER account IS DISTINCT FROM l.heading AS is_last
        FROM lines l
        WINDOW account AS (PARTITION BY l.account_id ORDER BY l.place)
    ), judged AS (
        SELECT f.*, CASE
            WHEN f.account_id IS NULL THEN 'account_unknown'
            WHEN f.status <> 'ACTIVE' THEN 'account_closed'
            WHEN f.currency IS DISTINCT FROM f.heading_currency THEN 'currency_mixed'
            WHEN f.minor <> trunc(f.minor) THEN 'too_precise'
            WHEN abs(f.after) > 1000000000000000000 THEN 'too_large'
            WHEN f.is_last AND f.side * f.after - f.held < 0
                 AND (NOT f.may_go_negative OR (bool_or(f.covered) OVER (PARTITION BY f.heading, f.account_id)))
                THEN 'insufficient'
            END AS refusal
        FROM followed f
    )
    SELECT min(j.place) FILTER (WHERE j.refusal IS NOT NULL), array_agg(j.refusal ORDER BY j.place),
           array_agg(j.currency ORDER BY j.place), array_agg(j.next_version ORDER BY j.place),
           array_agg(j.side ORDER BY j.place),
           CASE WHEN count(j.refusal) = 0 THEN array_agg(j.minor ORDER BY j.place) END,
           CASE WHEN count(j.refusal) = 0 THEN array_agg(j.after ORDER BY j.place) END,
           greatest(duly.now(), max(j.posted_at))  -- time never runs backwards along an account
    INTO place, refusals, currencies, versions, sides, amounts, balances, moment
    FROM judged j;
    IF place IS NOT NULL THEN
        outcome := refusals[place];
        RETURN;
    END IF;
    place := 0;

    -- 3. The headings. A reference that is taken shows here; a rival that is about to take it is waited for.
    IF cardinality(new_ids) > 1 THEN
        SELECT r.nth INTO place FROM unnest(new_references) WITH ORDINALITY AS r(reference, nth)
        WHERE EXISTS (SELECT 1 FROM ledger.transactions t WHERE t.reference = r.reference)
           OR r.nth > array_position(new_references, r.reference)
        ORDER BY r.nth LIMIT 1;
        IF FOUND THEN
            outcome := 'reference_taken';
            RETURN;
        END IF;
        place := 0;
    END IF;
    INSERT INTO ledger.transactions (id, reference, currency, amount, reverses_id, hold_id, reason, posted_at)
    SELECT new_ids[h.heading], new_references[h.heading], h.currency, h.amount, reverses, hold, new_reason, moment
    FROM (SELECT l.heading, min(l.currency) AS currency, sum(l.amount) FILTER (WHERE l.amount > 0) AS amount
          FROM unnest(of_transaction, currencies, amounts) AS l(heading, currency, amount)
          GROUP BY l.heading) AS h
    ORDER BY h.heading
    ON CONFLICT (reference) DO NOTHING;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written < cardinality(new_ids) THEN
        IF written > 0 THEN  -- some are written: the whole must run again, and will find the reference then
            RAISE EXCEPTION 'a reference was taken meanwhile' USING ERRCODE = 'serialization_failure';
        END IF;
        outcome := 'reference_taken';
        place := 1;
        RETURN;
    END IF;

    -- 4. The lines, and where that leaves the accounts: one row each, however many lines.
    INSERT INTO ledger.entries (account_id, version, transaction_id, line, amount, balance_after, posted_at)
    SELECT l.account_id, l.version, new_ids[l.heading],
           row_number() OVER (PARTITION BY l.heading ORDER BY l.place), l.amount, l.after, moment
    FROM unnest(of_transaction, line_accounts, amounts, versions, balances) WITH ORDINALITY
         AS l(heading, account_id, amount, version, after, place);
    UPDATE ledger.balances b
    SET balance = f.after, version = f.version, posted_at = moment,
        held = b.held - CASE WHEN b.account_id = wanted.account_id THEN released ELSE 0 END
    FROM (SELECT DISTINCT ON (l.account_id) l.account_id, l.version, l.after
          FROM unnest(line_accounts, versions, balances) AS l(account_id, version, after)
          ORDER BY l.account_id, l.version DESC) AS f
    WHERE b.account_id = f.account_id;
    IF hold IS NOT NULL THEN
        UPDATE ledger.holds h
        SET captured = h.captured + taken,
            status = CASE WHEN h.captured + released = h.amount THEN 'CAPTURED' ELSE h.status END,
            ended_at = CASE WHEN h.captured + released = h.amount THEN duly.now() END
        WHERE h.id = hold;
    END IF;

    -- 5. The facts, in the outbox of the same commit.
    PERFORM duly.emit_many(
        array_agg(f.type ORDER BY f.heading), array_agg('ledger.events'::text), array_agg(f.subject ORDER BY f.heading),
        array_agg(f.payload ORDER BY f.heading), array_agg(headers), notify)
    FROM (
        SELECT l.heading, CASE WHEN reverses IS NULL THEN 'transaction.posted' ELSE 'transaction.reversed' END AS type,
               coalesce(reverses, new_ids[l.heading])::text AS subject,
               jsonb_build_object(
                   'transactionId', coalesce(reverses, new_ids[l.heading]), 'reference', new_references[l.heading],
                   'accountIds', jsonb_agg(DISTINCT l.account_id), 'currency', min(l.currency),
                   'amount', ledger.show(sum(l.amount) FILTER (WHERE l.amount > 0), min(b.digits)),
                   'postedAt', moment, 'entries', jsonb_agg(jsonb_build_object(
                       'accountId', l.account_id, 'version', l.version, 'amount', ledger.show(abs(l.amount), b.digits),
                       'direction', CASE WHEN l.amount > 0 THEN 'DEBIT' ELSE 'CREDIT' END) ORDER BY l.place))
               || CASE WHEN reverses IS NULL THEN jsonb_build_object('holdId', hold)
                       ELSE jsonb_build_object('reversalId', new_ids[l.heading], 'reason', new_reason) END AS payload
        FROM unnest(of_transaction, line_accounts, amounts, versions, currencies) WITH ORDINALITY
             AS l(heading, account_id, amount, version, currency, place)
        JOIN unnest(locked) AS b ON b.account_id = l.account_id
        GROUP BY l.heading) AS f;
    outcome := 'posted';
END
$$;

-- The mirror image of a transaction, once. Its own lock comes before those of the accounts.
CREATE FUNCTION ledger.reverse(
    original uuid, new_id uuid, new_reason text, headers jsonb, notify boolean,
    OUT outcome text, OUT place integer, OUT moment timestamptz, OUT currencies text[], OUT amounts bigint[],
    OUT versions bigint[], OUT balances bigint[], OUT sides smallint[], OUT new_reference text, OUT accounts uuid[]
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    found ledger.transactions;
    mirrored numeric[];
BEGIN
    SELECT * INTO found FROM ledger.transactions t WHERE t.id = original FOR NO KEY UPDATE;
    place := 0;
    outcome := CASE WHEN found.id IS NULL THEN 'transaction_unknown' WHEN found.status = 'REVERSED' THEN 'already_reversed'
                    WHEN found.reverses_id IS NOT NULL THEN 'is_reversal' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    new_reference := found.reference || '-rev';
    SELECT array_agg(e.account_id ORDER BY e.line),
           array_agg(-e.amount * ledger.minor_unit(a.digits) ORDER BY e.line)
    INTO accounts, mirrored
    FROM ledger.entries e JOIN ledger.accounts a ON a.id = e.account_id WHERE e.transaction_id = original;
    SELECT p.* INTO outcome, place, moment, currencies, amounts, versions, balances, sides
    FROM ledger.post(ARRAY[new_id], ARRAY[new_reference], array_fill(1, ARRAY[cardinality(accounts)]), accounts, mirrored,
                     array_fill(false, ARRAY[cardinality(accounts)]), headers, notify, original, new_reason) AS p;
    IF outcome = 'posted' THEN
        UPDATE ledger.transactions t SET status = 'REVERSED' WHERE t.id = original;
    END IF;
END
$$;

-- Set money aside that is there, also where an account may go negative.
CREATE FUNCTION ledger.place_hold(
    new_id uuid, account uuid, decimal_amount numeric, new_reference text, until timestamptz, lasting interval,
    longest interval,
    OUT outcome text, OUT created_at timestamptz, OUT expires_at timestamptz, OUT currency text, OUT amount bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    b ledger.balances;
    minor numeric;
    written integer;
BEGIN
    SELECT * INTO b FROM ledger.balances f WHERE f.account_id = account FOR NO KEY UPDATE;
    minor := decimal_amount * ledger.minor_units(b.digits);
    created_at := duly.now();
    expires_at := coalesce(until, created_at + lasting);
    currency := b.currency;
    outcome := CASE WHEN b.account_id IS NULL THEN 'account_unknown' WHEN b.status <> 'ACTIVE' THEN 'account_closed'
                    WHEN minor <> trunc(minor) THEN 'too_precise' WHEN expires_at <= created_at THEN 'too_late'
                    WHEN expires_at > created_at + longest THEN 'too_long'
                    WHEN b.side * b.balance - b.held - minor < 0 THEN 'insufficient' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    amount := minor;
    INSERT INTO ledger.holds (id, account_id, reference, amount, created_at, expires_at)
    VALUES (new_id, account, new_reference, amount, place_hold.created_at, place_hold.expires_at)
    ON CONFLICT (reference) DO NOTHING;
    GET DIAGNOSTICS written = ROW_COUNT;
    IF written = 0 THEN
        outcome := 'reference_taken';
        RETURN;
    END IF;
    UPDATE ledger.balances f SET held = f.held + amount WHERE f.account_id = account;
    outcome := 'placed';
END
$$;

-- Let go of what is still held: because somebody says so, or because its time is over.
CREATE FUNCTION ledger.end_hold(hold uuid, ending text, OUT outcome text, OUT remaining interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    h ledger.holds;
BEGIN
    PERFORM 1 FROM ledger.balances b
    WHERE b.account_id = (SELECT f.account_id FROM ledger.holds f WHERE f.id = hold) FOR NO KEY UPDATE;
    SELECT * INTO h FROM ledger.holds f WHERE f.id = hold FOR UPDATE;
    remaining := h.expires_at - duly.now();
    outcome := CASE WHEN h.id IS NULL THEN 'hold_unknown' WHEN h.status <> 'ACTIVE' THEN 'hold_ended'
                    WHEN ending = 'EXPIRED' AND remaining > interval '0' THEN 'early' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    UPDATE ledger.holds f SET status = ending, ended_at = duly.now() WHERE f.id = hold;
    UPDATE ledger.balances b SET held = b.held - (h.amount - h.captured) WHERE b.account_id = h.account_id;
    outcome := 'ended';
END
$$;

CREATE FUNCTION ledger.forget_holds(days integer, most integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
WITH gone AS (
    DELETE FROM ledger.holds WHERE id = ANY(ARRAY(
        SELECT h.id FROM ledger.holds h WHERE h.status <> 'ACTIVE' AND h.ended_at < duly.now() - make_interval(days => days)
        ORDER BY h.ended_at, h.id LIMIT most FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM gone
$$;

CREATE FUNCTION ledger.change_status(account uuid, becomes text, OUT outcome text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    b ledger.balances;
BEGIN
    SELECT * INTO b FROM ledger.balances f WHERE f.account_id = account FOR NO KEY UPDATE;
    outcome := CASE WHEN b.account_id IS NULL THEN 'account_unknown' WHEN b.status = becomes THEN 'unchanged'
                    WHEN becomes = 'CLOSED' AND (b.balance <> 0 OR b.held <> 0) THEN 'not_empty' END;
    IF outcome IS NOT NULL THEN
        RETURN;
    END IF;
    UPDATE ledger.balances f SET status = becomes, closed_at = CASE becomes WHEN 'CLOSED' THEN duly.now() END
    WHERE f.account_id = account;
    outcome := 'changed';
END
$$;

-- The last entry of an account up to a moment. Time does not run backwards along an account's versions, so halving them
-- finds it in as many probes of the primary key as the count of entries has bits.
CREATE FUNCTION ledger.find_entry_at(account uuid, moment timestamptz, OUT version bigint, OUT balance bigint)
LANGUAGE plpgsql STABLE SET enable_seqscan = off
AS $$
DECLARE
    low bigint := 0;
    high bigint;
    middle bigint;
    middle_at timestamptz;
BEGIN
    SELECT b.version INTO high FROM ledger.balances b WHERE b.account_id = account;
    WHILE low < high LOOP
        middle := low + (high - low + 1) / 2;
        SELECT e.posted_at INTO middle_at FROM ledger.entries e WHERE e.account_id = account AND e.version = middle;
        IF middle_at <= moment THEN
            low := middle;
        ELSE
            high := middle - 1;
        END IF;
    END LOOP;
    version := low;
    SELECT coalesce(max(e.balance_after), 0) INTO balance
    FROM ledger.entries e WHERE e.account_id = account AND e.version = low;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ledger FROM PUBLIC;

-- What was missed is made up for by one run: each looks at everything since the last.
INSERT INTO duly.schedules (name, cron, misfire) VALUES
    ('ledger.seal', '* * * * *', 'run_once'),
    ('ledger.forget-holds', '47 3 * * *', 'run_once');
