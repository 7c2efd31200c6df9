"""From raw timings of the packed matmul to a compact record, and from a record to the tuning table.

    python benchmarks/kernels_table.py record RAW... --commit 8e2b571 --fp4-peers PEERS.json --out RECORD.json
    python benchmarks/kernels_table.py table RECORD.json     # rewrites pallas_kernels/packed_matmul/table.py

RAW are files of `kernels.py tune`, `time` and `peers`, one run on one machine. A config timed by several
processes counts with the median of its figures, and what they differ by is recorded under `again`. The
winner of a row is the config with the least time, so a winner's figure is the least of several and a
little flattered. A config of the fixed order may serve the free order too, never the other way round.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path

#: Bits of a packed weight.
BITS = {"nvfp4": 4.5, "mxfp4": 4.25, "hif4": 4.5}
#: A winner of many rows that is slower by this than the winner of fewer, run several times, was badly sought.
BADLY_SOUGHT = 1.15
TABLE = Path(__file__).parent.parent / "pallas_kernels" / "packed_matmul" / "table.py"
HEAD = '''"""Measured winners of the packed matmul; written by `benchmarks/kernels_table.py`, not by hand.

From `{record}`: {device}, {date},
kernels of {commit}, NVFP4 weights, no second term, free order.
"""

from pallas_kernels.packed_matmul.config import Config

#: (n, k) -> ((rows up to, config), ...), ascending.
TABLE: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = {{
'''


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def pooled(rows: list[dict]) -> dict[tuple, dict[str, list[dict]]]:
    """Timed rows by (case, m, fmt, residual_k, order), then by config."""
    found: dict[tuple, dict[str, list[dict]]] = {}
    for row in rows:
        if row["part"] not in ("tune", "time") or "us" not in row or "impossible" in row:
            continue
        for order in {"free", row["order"]}:
            key = (row["case"], row["m"], row["fmt"], row["residual_k"], order)
            found.setdefault(key, {}).setdefault(row["config"], []).append(row)
    return found


def winner(configs: dict[str, list[dict]]) -> dict:
    """The config with the least time, its time and spread."""
    us = {config: statistics.median(r["us"] for r in rows) for config, rows in configs.items()}
    best = min(us, key=lambda config: us[config])
    spread = max(r["spread"] for r in configs[best])
    timed = {"configs": len(configs), "processes": len(configs[best])}
    return dict(config=best, us=rounded(us[best]), spread=rounded(spread), **timed)


def fastest_fp4(peers: dict) -> dict[tuple, dict]:
    """(case, m) -> the fastest FP4 matmul of another project, whatever its format."""
    found: dict[tuple, dict] = {}
    for row in peers["rows"]:
        key = (row["shape"], row["m"])
        other = row["fmt"] in ("nvfp4", "mxfp4") and row["peer"] != "ours"
        if other and row["us"] < found.get(key, {"us": 1e9})["us"]:
            found[key] = row
    return found


def compact_row(key: tuple, configs: dict, shape: tuple, bf16: dict, fp4: dict[tuple, dict]) -> dict:
    """One line of the record; the ratios are other over ours, so above 1 ours is faster."""
    case, m, fmt, residual_k, order = key
    row = dict(case=case, n=shape[0], k=shape[1], m=m, fmt=fmt, residual_k=residual_k, order=order)
    row |= winner(configs)
    row["tbps"] = rounded(shape[0] * shape[1] * BITS[fmt] / 8 / row["us"] / 1e6)
    if (case, m) in bf16 and not residual_k:
        dense = bf16[case, m]
        row |= {f"over_{name}": rounded(us / row["us"]) for name, us in dense.items()}
        best = min(us for name, us in dense.items() if name.endswith("bf16"))
        row["over_best_bf16"] = rounded(best / row["us"])
    if (case, m) in fp4 and not residual_k:
        row |= dict(over_fp4=rounded(fp4[case, m]["us"] / row["us"]), fp4=fp4[case, m]["peer"])
    return row


def record(args) -> None:
    """Writes the compact record of one run."""
    raw = [json.loads(path.read_text()) for path in args.raw]
    rows = [row for data in raw for row in data["rows"]]
    peers = json.loads(args.fp4_peers.read_text())
    shapes = {r["case"]: (r["n"], r["k"]) for r in rows if "case" in r and "n" in r}
    dense: dict[tuple, dict] = {}
    for r in rows:
        if r["part"] == "peer":
            dense[r["case"], r["m"]] = {f"torch_{t}": r[f"torch_{t}_us"] for t in ("bf16", "fp8")}
    for r in rows:
        if r["part"] == "xla_bf16":
            dense[r["case"], r["m"]] |= dict(xla_bf16=r["us"])
    pools, fp4 = pooled(rows), fastest_fp4(peers)
    found = [compact_row(key, pools[key], shapes[key[0]], dense, fp4) for key in sorted(pools, key=str)]
    found.sort(key=lambda r: (r["fmt"] != "nvfp4", r["fmt"], r["order"], r["residual_k"] > 0, r["m"]))
    read = [r["tbps"] for r in rows if r["part"] == "read"]
    data = dict(
        date=raw[0]["date"][:10],
        commit=args.commit,
        commit_of_the_copy=sorted({d["commit"] for d in raw}),
        device=raw[0]["device"],
        jax=raw[0]["jax"],
        notes=args.note,
        read_tbps=dict(least=rounded(min(read)), median=rounded(statistics.median(read)), most=max(read)),
        fp4_peers=dict(device=peers["gpu"], date=peers["date"], note="another run on the same kind of GPU"),
        rows=found,
        again=again(rows),
        dense=[
            dict(case=c, m=m, **{f"{k}_us": rounded(v) for k, v in d.items()}) for (c, m), d in dense.items()
        ],
    )
    args.out.write_text(one_line_each(data))


def again(rows: list[dict]) -> list[dict]:
    """Programs that more than one process timed: least and greatest figure."""
    seen: dict[tuple, list[float]] = {}
    for r in rows:
        if r["part"] in ("tune", "time") and "us" in r:
            seen.setdefault((r["case"], r["m"], r["fmt"], r["residual_k"], r["config"]), []).append(r["us"])
    return [
        dict(case=key[0], m=key[1], fmt=key[2], config=key[4], least=rounded(min(us)), most=rounded(max(us)))
        for key, us in seen.items()
        if len(us) > 1
    ]


def one_line_each(data: dict) -> str:
    """JSON with one line for each entry and each row of a list."""
    parts = []
    for name, value in data.items():
        listed = isinstance(value, list) and value and isinstance(value[0], dict)
        text = "[\n" + ",\n".join(json.dumps(v) for v in value) + "\n]" if listed else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(args) -> None:
    """Writes `table.py` from a record."""
    data = json.loads(args.record.read_text())
    rows = [
        r
        for r in data["rows"]
        if (r["fmt"], r["residual_k"], r["order"]) == ("nvfp4", 0, "free") and r["case"] != "empty"
    ]
    rows.sort(key=lambda r: (-r["n"] * r["k"], r["n"], r["m"]))
    name = args.record.name
    text = HEAD.format(
        record=f"benchmarks/results/{name}", **{k: data[k] for k in ("device", "date", "commit")}
    )
    for (n, k), group in itertools.groupby(rows, key=lambda r: (r["n"], r["k"])):
        text += f"    ({n}, {k}): (\n"
        group = well_sought(list(group))
        text += "".join(f"        ({r['m']}, Config({r['config'].replace(',', ', ')})),\n" for r in group)
        text += "    ),\n"
    TABLE.write_text(text + "}\n")


def well_sought(rows: list[dict]) -> list[dict]:
    """Rows of one n x k, ascending in m, without winners of prefill that a smaller m's would beat."""
    kept: list[dict] = []
    for row in rows:
        fewer = [r["us"] * row["m"] / r["m"] for r in kept if r["m"] >= 1024]
        if not fewer or row["us"] <= BADLY_SOUGHT * min(fewer):
            kept.append(row)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("record")
    one.add_argument("raw", nargs="+", type=Path)
    one.add_argument("--commit", required=True, help="whose kernels ran")
    one.add_argument("--fp4-peers", required=True, type=Path)
    one.add_argument("--note", action="append", default=[])
    one.add_argument("--out", required=True, type=Path)
    two = parts.add_parser("table")
    two.add_argument("record", type=Path)
    args = parser.parse_args()
    {"record": record, "table": table}[args.part](args)


if __name__ == "__main__":
    main()
