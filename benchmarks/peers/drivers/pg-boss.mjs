// pg-boss: large batches fetched without a pause while they come back full, and LISTEN/NOTIFY to wake up.
import { main, request, require } from "./frame.mjs";

const { PgBoss } = require("pg-boss");
const pg = require("pg");

let boss, pool;

const start = async (max, useListenNotify) => {
  boss = new PgBoss({ connectionString: request.dsn, max, useListenNotify, schedule: false });
  boss.on("error", (error) => console.error(error));
  await boss.start();
};

await main({
  tuned: {
    noop: { batchSize: 1000, localConcurrency: 2, notify: false },
    enqueue_one: { notify: false },
    enqueue_bulk: { batch: 5000, notify: false },
    latency: { batchSize: 1, localConcurrency: 2, notify: true },
  },

  async install({ notify }) {
    await start(1, false);
    await boss.createQueue("noop", { notify });
    await boss.stop({ graceful: false });
  },

  async open() {
    pool = new pg.Pool({ connectionString: request.dsn, max: 1 });
    await start(1, false);
  },

  enqueueOne: (number) => boss.send("noop", { number }),

  enqueueMany: (numbers) => boss.insert("noop", numbers.map((number) => ({ data: { number } }))),

  analyze: () => pool.query("ANALYZE"),

  async work(tally, { batchSize, localConcurrency, notify }) {
    pool = new pg.Pool({ connectionString: request.dsn, max: 1 });
    await start(10, notify);
    const options = { batchSize, localConcurrency, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5 };
    await boss.work("noop", options, async (jobs) => {
      for (const job of jobs) tally.mark(job.data.number);
    });
  },

  async remaining() {
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM pgboss.job WHERE state <> 'completed'");
    return rows[0].n;
  },
});
