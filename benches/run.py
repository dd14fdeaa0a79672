"""Run the bench lines and say which limits they reach.

    run.py                      every line, and the table of docs/performance.md
    run.py hash lookup          some lines; the table keeps the others' last figures
    run.py --quick              whether every line works; figures mean little, nothing is written

Every figure is a ratio to a limit, or to a peer, measured in the same run in turn with ours. Run it
on a quiet machine: a line waits for a load below `--max-load` and says how loaded it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import ROOT, Bench, Stop
from lines import (
    across,
    copies,
    disk,
    engine,
    hashing,
    identity,
    index,
    layerwise,
    package,
    refuse,
    remote,
    remote_s3,
    vllm,
    waiting,
)
from measure import Result

DOCUMENT = ROOT / "docs" / "performance.md"
# Kept beside the code, so that one line can be taken anew in a fresh clone and the others stay.
RESULTS = ROOT / "benches" / "results.json"
BEGIN, END = "<!-- the table: made by make bench -->", "<!-- end of the table -->"
LINES: dict[str, Callable[[Bench], list[Result]]] = {
    "hash": hashing.run,
    "lookup": index.lookup,
    "churn": index.churn,
    "bytes": index.index_bytes,
    "engine": engine.run,
    "blocks": copies.blocks,
    "runs": copies.runs,
    "across": across.run,
    "waiting": waiting.run,
    "disk": disk.run,
    "remote": remote.run,
    "remote_s3": remote_s3.run,
    "identity": identity.run,
    "package": package.run,
    "vllm": vllm.run,
    "layerwise": layerwise.run,
    "refuse": refuse.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", nargs="*", help=f"some of {', '.join(LINES)}; none: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--max-load", type=float, default=1.5, help="load to wait for (1.5)")
    parser.add_argument("--max-wait", type=float, default=120, help="seconds to wait a line (120)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.lines if name not in LINES]
    if unknown:
        parser.error(f"{unknown[0]} is no line; lines are {', '.join(LINES)}")
    bench = Bench(arguments.quick)
    measured: dict[str, Any] = {}
    failed = 0
    for name in arguments.lines or LINES:
        load = 0.0 if bench.quick else wait_for_quiet(arguments.max_load, arguments.max_wait)
        print(f"== {name}", flush=True)
        try:
            rows = LINES[name](bench)
        except Stop as stop:
            print(f"bench: {name}: {stop}", file=sys.stderr)
            failed += 1
            continue
        for row in rows:
            print(f"   {row.verdict.strip('*'):8} {row.work}: {row.measured} [{row.must}]")
        measured[name] = {
            "rows": [{**row.as_dict(), "verdict": row.verdict} for row in rows],
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "load": round(load, 2),
        }
    if bench.quick:
        print("quick mode: nothing is written")
        return int(failed > 0)
    results = keep(measured)
    write_table(results)
    print(f"written: {RESULTS}, {DOCUMENT}")
    return int(failed > 0)


def wait_for_quiet(max_load: float, max_wait: float) -> float:
    """Waits for a quiet machine, not for ever; the load of the last minute."""
    until = time.monotonic() + max_wait
    while (load := os.getloadavg()[0]) >= max_load and time.monotonic() < until:
        print(f"   load {load:.1f}: waiting for less than {max_load}", flush=True)
        time.sleep(10)
    return load


def keep(measured: dict[str, Any]) -> dict[str, Any]:
    """Joins what was measured now with the last figures of the other lines."""
    known = json.loads(RESULTS.read_text())["lines"] if RESULTS.exists() else {}
    lines = known | measured
    results = {
        "machine": machine(),
        "lines": {name: lines[name] for name in LINES if name in lines},
    }
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return results


def machine() -> dict[str, Any]:
    facts = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in facts.splitlines() if "model name" in line]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
    }


def write_table(results: dict[str, Any]) -> None:
    """Puts the table between the marks of the document; the words around it stay."""
    about = results["machine"]
    lines = [
        f"{about['processor']}, {about['cores']} cores, {about['memory_gb']} GB; "
        f"{about['system']}. Command: `benches/run.py`, as `make bench` runs it. `load` is the "
        "load of the minute before the line. A spread in parentheses is from the first to the "
        "third quartile.",
        "",
        "| line | work | must reach | measured | verdict | pairs | date, load |",
        "|---|---|---|---|---|--:|---|",
    ]
    for name, line in results["lines"].items():
        for row in line["rows"]:
            cells = [name, row["work"], row["must"], row["measured"], row["verdict"]]
            cells += [f"{row['pairs']:,}", f"{line['date']}, {line['load']}"]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    text = DOCUMENT.read_text() if DOCUMENT.exists() else f"{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]))


if __name__ == "__main__":
    sys.exit(main())
