"""Writes what was measured into docs/performance.md, between its markers, and draws it; what was not, it says so."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import bars, lines
from benchmarks.results import (
    Results,
    Round,
    Spread,
    best_of,
    contestants,
    percentiles,
    ratio,
    spread_of,
    value_of,
)
from benchmarks.targets import DULY, GROWTH_VARIANTS, growth_of, judge, memory_slopes

NOT_MEASURED = "Not measured yet.\n"
SHARES = (0.5, 0.95, 0.99)
MARKERS = re.compile(r"(<!-- begin: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
NAMES = {
    "duly": "**duly**", "duly-asyncpg": "**duly**, on a bare asyncpg connection",
    "raw": "raw: bare asyncpg, the same writes", "raw-overlapped": "raw: the same, claim and settlement overlapped",
    "each": "a commit each", "each-asyncpg": "a commit each, handlers on asyncpg", "group-100": "a hundred in a commit",
    "group-500": "five hundred in a commit", "raw-each": "raw: a commit each", "write-each": "a commit each",
    "write-each-asyncpg": "a commit each, handlers on asyncpg", "write-group-100": "a hundred in a commit",
    "write-group-100-asyncpg": "a hundred in a commit, handlers on asyncpg", "raw-write-each": "raw: a commit each",
    "single": "one event a commit", "many-200": "two hundred events a commit",
    "ordered": "one event a commit, order kept within 1,000 aggregates", "batch-100": "relay, 100 a cycle",
    "batch-500": "relay, 500 a cycle", "1": "one process", "2": "two processes", "4": "four processes",
}  # fmt: skip
VARIANT_NAMES = {
    "due": "waiting, due now, of the same name", "future": "waiting for a later time", "history": "in the history",
    "schedules": "schedules",
}  # fmt: skip


def write(results: Results, page: Path, plots: Path) -> None:
    """Fill the page's markers and the directory of plots."""
    drawn = draw(results)
    plots.mkdir(parents=True, exist_ok=True)
    for old in plots.glob("*.svg"):
        if old.stem not in drawn:
            old.unlink()
    for name, content in drawn.items():
        (plots / f"{name}.svg").write_text(content)
    page.write_text(fill(page.read_text(), results, set(drawn)))


def fill(text: str, results: Results, drawn: set[str]) -> str:
    """The page with every section written anew."""

    def section(found: re.Match[str]) -> str:
        name = found[2]
        body = SECTIONS[name](results) or NOT_MEASURED
        picture = f"\n![{name}](performance/{name}.svg)\n" if name in drawn else ""
        return f"{found[1]}{body}{picture}{found[3]}"

    return MARKERS.sub(section, text)


# -- tables ---------------------------------------------------------------------------------------------------------


def machine_section(results: Results) -> str:
    """Where and when each part ran; parts that ran alike share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, part in results.parts.items():
        if machine := part.get("machine"):
            settings = ", ".join(f"{key} {value}" for key, value in machine.get("settings", {}).items())
            where = f"{machine['cores']} cores ({machine['architecture']}), {machine['memory_gib']:.0f} GiB"
            versions = f"PostgreSQL {machine['postgresql']}, Python {machine['python']}"
            alike.setdefault((where, versions, settings), []).append(f"{name} ({str(part['at'])[:10]})")
    rows = [[", ".join(names), *facts] for facts, names in alike.items()]
    return table(["part", "machine", "versions", "PostgreSQL's settings"], rows)


def targets_section(results: Results) -> str:
    """Every target, met or not."""
    rows = []
    for verdict in judge(results):
        target, found = verdict.target, verdict.found
        need = f"{'≤' if target.at_most else '≥'} {target.need:g}{target.unit}"
        said = {None: "not measured", True: "met", False: "**not met**"}[verdict.met]
        rows.append([target.what, need, "-" if found is None else ratio_text(found, target.unit), said])
    return table(["what", "target", "measured: median (smallest to largest)", ""], rows)


def rates_section(figure: str, unit: str, *, against: tuple[str, ...] = DULY) -> Callable[[Results], str]:
    """Rates of everybody, and how many times faster ``against`` is in the same round."""

    def section(results: Results) -> str:
        rounds = results.rounds(figure)
        rows = []
        for name in contestants(rounds):
            found = spread_of(rounds, name)
            ours = None if name in against else ratio(rounds, best_of(*against), value_of(name))
            assert found is not None
            rows.append([title(results, name), rate_text(found), "" if ours is None else ratio_text(ours, "x")])
        if not rows:
            return ""
        return table(["", unit, "duly is faster by"], rows) + missing_text(results, figure)

    return section


def own_section(figure: str, unit: str, base: str) -> Callable[[Results], str]:
    """Our own ways of doing one thing, beside the first of them."""

    def section(results: Results) -> str:
        rounds = results.rounds(figure)
        rows = []
        for name in contestants(rounds):
            found, times = spread_of(rounds, name), ratio(rounds, value_of(name), value_of(base))
            assert found is not None
            rows.append([title(results, name), rate_text(found), "" if times is None else ratio_text(times, "x")])
        return (table(["", unit, f"against {NAMES[base]}"], rows) if rows else "") + missing_text(results, figure)

    return section


def latency_section(results: Results) -> str:
    """Percentiles, each the median over the rounds."""
    samples = results.rounds("latency")
    by_share = [percentiles(samples, share) for share in SHARES]
    rows = []
    for name in contestants(samples):
        found = [spread_of(rounds, name) for rounds in by_share]
        count = sum(len(one.get(name, [])) for one in samples)
        rows.append([title(results, name), *(milliseconds_text(one) for one in found), f"{count:,}"])
    if not rows:
        return ""
    return table(["", "p50 ms", "p95 ms", "p99 ms", "jobs"], rows) + missing_text(results, "latency")


def peers_section(results: Results) -> str:
    """Who they are and how they were set up."""
    rows = [
        [
            name, str(peer.get("version", "")), str(peer.get("language", "")), str(peer.get("configuration", "")),
            "yes" if peer.get("durable") else "no", str(peer.get("notes", "")),
        ]
        for name, peer in results.peers().items()
    ]  # fmt: skip
    left_out = {name: reason for name, reason in results.missing().items() if ", " not in name}
    rows += [[name, "-", "", "", "", f"left out: {reason}"] for name, reason in left_out.items()]
    return table(["", "version", "language", "configuration", "durable", "notes"], rows) if rows else ""


def growth_section(results: Results) -> str:
    """Throughput and the cost of a claim by size, for each kind of rows."""
    parts = []
    for variant in (*GROWTH_VARIANTS, "schedules"):
        rates, costs = results.rounds(f"throughput:{variant}"), results.rounds(f"claim_ms:{variant}")
        buffers = results.rounds(f"claim_buffers:{variant}")
        rows = [
            [
                f"{int(size):,}", rate_text(spread_of(rates, size)), milliseconds_text(spread_of(costs, size)),
                rate_text(spread_of(buffers, size)),
            ]
            for size in contestants(rates)
        ]  # fmt: skip
        if not rows:
            continue
        heading = f"Rows {VARIANT_NAMES[variant]}" if variant != "schedules" else "Schedules"
        slower, dearer = growth_of(rates, "throughput"), growth_of(costs, "claim_ms")
        said = ""
        if slower and dearer:
            lost = ratio_text(slower, "x")
            said = f"\nFrom 10³ to 10⁷: throughput lower by {lost}, a claim dearer by {ratio_text(dearer, 'x')}.\n"
        parts.append(f"{heading}:\n\n" + table([heading.lower(), "jobs/s", "a claim, ms", "its buffers"], rows) + said)
    return "\n".join(parts) + tick_text(results)


def tick_text(results: Results) -> str:
    """What a tick of the scheduler costs."""
    idle, busy = results.rounds("tick_ms:idle"), results.rounds("tick_ms:busy")
    rows = [
        [f"{int(size):,}", milliseconds_text(spread_of(idle, size)), milliseconds_text(spread_of(busy, size))]
        for size in contestants(idle)
    ]
    return "\n" + table(["schedules", "a tick with nothing due, ms", "with a hundred due, ms"], rows) if rows else ""


def snapshot_section(results: Results) -> str:
    """By phase: before, while it was held, after."""
    windows = results.rounds("windows")
    rows = []
    for phase in ("before", "held", "after"):
        some = [one for one in windows if one.get("phase") == phase]
        for label, part in _stretches(phase, some):
            claims = [one["claim_ms"] for one in part if "claim_ms" in one]
            dead = max(one["dead"] for one in part)
            rate = rate_text(Spread.of(one["rate"] for one in part))
            rows.append([label, rate, f"{dead:,}", milliseconds_text(Spread.of(claims)) if claims else ""])
    return table(["", "jobs/s", "dead rows, at most", "a claim from the start, ms"], rows) if rows else ""


def _stretches(phase: str, windows: Sequence[Round]) -> list[tuple[str, Sequence[Round]]]:
    if not windows:
        return []
    if phase != "held" or len(windows) < 8:
        return [({"before": "without a snapshot", "held": "held", "after": "after its end"}[phase], windows)]
    quarter = len(windows) // 4
    return [
        (f"held, {name} quarter", windows[place * quarter : None if place == 3 else (place + 1) * quarter])
        for place, name in enumerate(("first", "second", "third", "last"))
    ]


def memory_section(results: Results) -> str:
    """First, last and slope of each process."""
    samples = results.rounds("memory")
    slopes = memory_slopes(results)
    rows = [
        [name, f"{samples[0][name]:.1f}", f"{samples[-1][name]:.1f}", f"{slopes[name]:+.2f}"]
        for name in slopes
    ]  # fmt: skip
    minutes = samples[-1]["seconds"] / 60 if samples else 0
    said = f"\n{len(samples)} samples over {minutes:.1f} min.\n" if rows else ""
    return (table(["", "first, MiB", "last, MiB", "slope after warm-up, MiB/h"], rows) if rows else "") + said


SECTIONS: Mapping[str, Callable[[Results], str]] = {
    "machine": machine_section,
    "targets": targets_section,
    "peers": peers_section,
    "noop": rates_section("noop", "jobs/s"),
    "enqueue_one": rates_section("enqueue_one", "jobs/s"),
    "enqueue_bulk": rates_section("enqueue_bulk", "jobs/s"),
    "latency": latency_section,
    "transactional": own_section("transactional", "jobs/s", "each"),
    "writing": own_section("writing", "jobs/s", "write-each"),
    "processes": own_section("processes", "jobs/s", "1"),
    "relay": own_section("relay", "events/s", "batch-100"),
    "consumers": own_section("consumers", "events/s", "single"),
    "growth": growth_section,
    "snapshot": snapshot_section,
    "memory": memory_section,
}


# -- plots ----------------------------------------------------------------------------------------------------------


def draw(results: Results) -> dict[str, str]:
    """Every plot that there are figures for."""
    drawn: dict[str, str] = {}
    for figure, what, unit in (
        ("noop", "No-op jobs, one worker process", "jobs/s"),
        ("enqueue_one", "Enqueue, one job a commit, one connection", "jobs/s"),
        ("enqueue_bulk", "Enqueue in bulk", "jobs/s"),
        ("transactional", "Transactional no-op handlers", "jobs/s"),
        ("processes", "No-op jobs by worker processes", "jobs/s"),
    ):
        if rows := _bars_of(results.rounds(figure)):
            drawn[figure] = bars(what, unit, rows)
    if rows := _bars_of(percentiles(results.rounds("latency"), 0.99), most_first=False):
        drawn["latency"] = bars("Commit to start at 50 jobs/s, p99", "ms", rows)
    growth = {
        variant: _by_size(results.rounds(f"throughput:{variant}"))
        for variant in GROWTH_VARIANTS
        if results.rounds(f"throughput:{variant}")
    }
    if growth:
        drawn["growth"] = lines("Throughput by rows", "rows", "jobs/s", growth, log_x=True)
    if windows := results.rounds("windows"):
        drawn["snapshot"] = _draw_windows(windows)
    if samples := results.rounds("memory"):
        names = [name for name in samples[0] if name != "seconds"]
        series = {name: [(one["seconds"] / 60, one[name]) for one in samples] for name in names}
        drawn["memory"] = lines("Resident memory under load", "minutes", "MiB", series)
    return drawn


def _bars_of(rounds: Sequence[Round], *, most_first: bool = True) -> list[tuple[str, Spread]]:
    found = [(name, spread) for name in contestants(rounds) if (spread := spread_of(rounds, name)) is not None]
    return sorted(found, key=lambda row: row[1].median, reverse=most_first)


def _by_size(rounds: Sequence[Round]) -> list[tuple[float, float]]:
    return [
        (float(size), spread.median)
        for size in sorted(contestants(rounds), key=int)
        if (spread := spread_of(rounds, size)) is not None
    ]


def _draw_windows(windows: Sequence[Round]) -> str:
    began = windows[0]["at"]
    points = [((one["at"] - began) / 60, one["rate"]) for one in windows]
    held = [(one["at"] - began) / 60 for one in windows if one["phase"] == "held"]
    band = (held[0], held[-1]) if held else None
    series = {"jobs/s": points}
    return lines("Throughput, a snapshot held (shaded)", "minutes", "jobs/s", series, band=band)


# -- words ----------------------------------------------------------------------------------------------------------


def title(results: Results, name: str) -> str:
    """What a row is called."""
    peer = results.peers().get(name)
    return f"{name} {peer.get('version', '')}".strip() if peer else NAMES.get(name, name)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    if not rows:
        return ""
    clean = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    written = [f"| {' | '.join(row)} |" for row in [list(heads), ["---"] * len(heads), *clean]]
    return "\n".join(written) + "\n"


def missing_text(results: Results, figure: str) -> str:
    """Who is not in the table, and why."""
    found = {key: why for key, why in results.missing().items() if key.startswith(f"{figure}, ")}
    return "".join(f"\nLeft out: {key.partition(', ')[2]} ({_one_line(why)}).\n" for key, why in found.items())


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def rate_text(found: Spread | None) -> str:
    """A rate with its spread."""
    return "-" if found is None else f"{found.median:,.0f} ({found.low:,.0f} to {found.high:,.0f})"


def milliseconds_text(found: Spread | None) -> str:
    """A time with its spread."""
    return "-" if found is None else f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def ratio_text(found: Spread, unit: str) -> str:
    """A ratio with its spread."""
    return f"{found.median:.2f}{unit} ({found.low:.2f} to {found.high:.2f})"


def print_summary(results: Results, figures: Mapping[str, Any]) -> None:
    """On the terminal, after a run."""
    for name in SECTIONS:
        if (name in figures or name == "targets") and (text := SECTIONS[name](results)):
            print(f"\n{name}\n{text}", flush=True)
