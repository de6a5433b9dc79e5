// Graphile Worker: the configuration of its page on performance, with local queue and batched completion.
import { main, request, require } from "./frame.mjs";

const { run, makeWorkerUtils, Logger } = require("graphile-worker");
const pg = require("pg");

const logger = new Logger(() => () => {});
let utils, pool;

const preset = ({ concurrentJobs, localQueue, completeJobBatchDelay }) => ({
  worker: {
    connectionString: request.dsn,
    concurrentJobs,
    maxPoolSize: concurrentJobs + 1,
    localQueue: { size: localQueue },
    completeJobBatchDelay,
    failJobBatchDelay: completeJobBatchDelay,
    logger,
  },
});

await main({
  tuned: {
    noop: { concurrentJobs: 24, localQueue: 500, completeJobBatchDelay: 0 },
    enqueue_bulk: { batch: 1000 },
    latency: { concurrentJobs: 24, localQueue: -1, completeJobBatchDelay: -1 },
  },

  async install() {
    const made = await makeWorkerUtils({ connectionString: request.dsn, logger });
    await made.migrate();
    await made.release();
  },

  async open() {
    pool = new pg.Pool({ connectionString: request.dsn, max: 1 });
    utils = await makeWorkerUtils({ pgPool: pool, logger });
  },

  enqueueOne: (number) => utils.addJob("noop", { number }),

  enqueueMany: (numbers) => utils.addJobs(numbers.map((number) => ({ identifier: "noop", payload: { number } }))),

  analyze: () => pool.query("ANALYZE"),

  async work(tally, settings) {
    pool = new pg.Pool({ connectionString: request.dsn, max: 1 });
    await run({ preset: preset(settings), taskList: { noop: async ({ number }) => tally.mark(number) } });
  },

  async remaining() {
    const { rows } = await pool.query("SELECT count(*)::int AS n FROM graphile_worker._private_jobs");
    return rows[0].n;
  },
});
