DROP INDEX kyc.unmatched_open_of_session;
ALTER TABLE kyc.unmatched_callbacks DROP COLUMN evidence_ref;

-- As they were in 0006; what was sealed with who posted can no longer be verified.
CREATE OR REPLACE FUNCTION ledger.post(
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

CREATE OR REPLACE FUNCTION ledger.reverse(
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

DROP FUNCTION ledger.lock_transaction(uuid);
DROP FUNCTION ledger.reverse(uuid, uuid, text, jsonb, boolean, text);
DROP FUNCTION ledger.post(uuid[], text[], integer[], uuid[], numeric[], boolean[], jsonb, boolean, text, uuid, text, uuid,
                          boolean);
ALTER TABLE ledger.seals DROP COLUMN format;
ALTER TABLE ledger.transactions DROP COLUMN posted_by;
