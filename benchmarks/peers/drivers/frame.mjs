// What the Node drivers share: the same four figures, clocks and proofs as frame.py describes.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

const WARM_UP_JOBS = 20;
const PACE_MS = 20; // 50 jobs a second
const POLL_MS = 5;

export const request = JSON.parse(process.argv[2]);
export const require = createRequire(`${process.env.PEER_HOME}/package.json`);
export const now = () => Number(process.hrtime.bigint()); // nanoseconds; exact for a hundred days of uptime
const say = (facts) => new Promise((done) => process.stdout.write(JSON.stringify(facts) + "\n", done));
const range = (first, end) => Array.from({ length: end - first }, (_, index) => first + index);

// Which handlers started, and when. `mark` is the whole body of every no-op handler.
class Tally {
  starts = new Float64Array(request.size);
  started = 0;
  twice = 0;

  mark(number) {
    const at = now();
    if (number < 0) {
      say({ warm: number });
      return;
    }
    if (this.starts[number]) this.twice += 1;
    this.starts[number] = at;
    this.started += 1;
  }
}

export async function main(driver) {
  const settings = { ...driver.tuned[request.figure], ...request.settings };
  try {
    await (request.role === "worker" ? serve : measure)(driver, settings);
  } catch (error) {
    console.error(error.stack);
    process.exit(1);
  }
  process.exit(0); // pools stay open: all is settled
}

async function measure(driver, settings) {
  const figures = { noop, enqueue_one: enqueueOne, enqueue_bulk: enqueueBulk, latency };
  await driver.install(settings);
  await say({ values: await figures[request.figure](driver, settings, request.size) });
}

async function serve(driver, settings) {
  const tally = new Tally();
  await driver.work(tally, settings);
  while (tally.started < request.size) await sleep(POLL_MS); // the process that started this one ends it
  while (await driver.remaining()) await sleep(POLL_MS);
  await say({ settledAt: now(), starts: [...tally.starts], twice: tally.twice });
}

async function noop(driver, settings, size) {
  await driver.open();
  for (let first = 0; first < size; first += 1000) {
    await driver.enqueueMany(range(first, Math.min(first + 1000, size)));
  }
  await driver.analyze();
  const worker = startWorker();
  const { starts, settledAt } = onceEach(await worker.next());
  return [size / ((settledAt - starts.reduce((a, b) => Math.min(a, b))) / 1e9)];
}

async function enqueueOne(driver, settings, size) {
  await driver.open();
  for (const number of range(-WARM_UP_JOBS, 0)) await driver.enqueueOne(number);
  const began = now();
  for (let number = 0; number < size; number += 1) await driver.enqueueOne(number);
  const seconds = (now() - began) / 1e9;
  await checkQueued(driver, size + WARM_UP_JOBS);
  return [size / seconds];
}

async function enqueueBulk(driver, { batch }, size) {
  await driver.open();
  await driver.enqueueMany(range(-WARM_UP_JOBS, 0));
  const began = now();
  for (let first = 0; first < size; first += batch) {
    await driver.enqueueMany(range(first, Math.min(first + batch, size)));
  }
  const seconds = (now() - began) / 1e9;
  await checkQueued(driver, size + WARM_UP_JOBS);
  return [size / seconds];
}

async function latency(driver, settings, size) {
  await driver.open();
  const worker = startWorker();
  for (const number of range(-WARM_UP_JOBS, 0)) {
    await driver.enqueueOne(number);
    await worker.next();
  }
  const returned = [];
  const began = now();
  for (let number = 0; number < size; number += 1) {
    const wait = began / 1e6 + number * PACE_MS - now() / 1e6;
    if (wait > 0) await sleep(wait);
    await driver.enqueueOne(number);
    returned.push(now());
  }
  const { starts } = onceEach(await worker.next());
  return returned.map((back, number) => (starts[number] - back) / 1e6);
}

async function checkQueued(driver, expected) {
  const queued = await driver.remaining();
  if (queued !== expected) throw new Error(`${queued} jobs are in the queue, not ${expected}`);
}

function onceEach(facts) {
  const never = facts.starts.filter((at) => at === 0).length;
  if (never || facts.twice) throw new Error(`${never} jobs never ran, ${facts.twice} ran twice`);
  return facts;
}

// A second process is the one worker; `next` is its next line.
function startWorker() {
  const [script] = process.argv.slice(1);
  const child = spawn(process.execPath, [script, JSON.stringify({ ...request, role: "worker" })], {
    stdio: ["ignore", "pipe", "inherit"],
  });
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  return {
    async next() {
      const { value, done } = await lines.next();
      if (done) throw new Error("the worker ended early");
      return JSON.parse(value);
    },
  };
}
