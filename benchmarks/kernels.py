"""Exactness and speed of the packed FP4 matmul on a GPU, against bfloat16 and FP8 dots.

    python benchmarks/kernels.py check                         # exact first: one line a check
    python benchmarks/kernels.py tune --cases all --m 8 64     # sweeps configs, prints the winners
    python benchmarks/kernels.py time --cases all --m 8 64     # what the tuning table takes, nothing else
    python benchmarks/kernels.py peers --m 8 64                # torch's bfloat16 and FP8

A time is of a whole operation (sums of parts, scales, transpose and bfloat16 output included);
`kernels_timing.py` says how it is made. All programs are compiled first, `--compile` seconds long; then
they are timed. Processes that share a GPU and a `--meet` folder wait there for one another between the
two and then time one after the other, so that nothing compiles while something is timed.
A config that the compiler or the GPU refuses is recorded with its error and the run goes on
(JaxRuntimeError, ValueError and NotImplementedError; anything else stops it).
"""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import os
import time
from pathlib import Path

from kernels_candidates import candidates
from kernels_check import check
from kernels_operands import EMPTY, REFUSALS, SHAPES, Record, short
from kernels_timing import FastestRead, Operands, Packed, XlaBf16, floor_us, torch_us

from pallas_kernels.formats import FORMATS
from pallas_kernels.packed_matmul.tuning import config_for, fixed_config_for


class Meeting:
    """Where processes wait for one another to have compiled, and take turns at the GPU."""

    def __init__(self, folder: Path | None, size: int, patience: float):
        self.folder, self.size, self.end = folder, size, time.monotonic() + patience

    def wait(self) -> None:
        """Until as many have come as were announced, or patience is over."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"ready_{os.getpid()}").touch()
        while len(list(self.folder.glob("ready_*"))) < self.size and time.monotonic() < self.end:
            time.sleep(0.2)

    @contextlib.contextmanager
    def turn(self, seconds: float):
        """Alone at the GPU; gives a function that says whether the turn's seconds are over."""
        with contextlib.ExitStack() as stack:
            if self.folder is not None:
                file = stack.enter_context((self.folder / "turn").open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            end = time.monotonic() + seconds
            yield lambda: time.monotonic() > end


def configs_of(args, n: int, k: int, m: int, residual_k: int) -> list:
    """The configs that one row of the table tries."""
    if args.part == "time" or args.order == "fixed":
        choose = config_for if args.order == "free" else fixed_config_for
        chosen = choose(m, n, k, fmt=args.fmt, residual_k=residual_k)
        return [] if chosen is None else [chosen]
    most = args.most if m < 2048 else 2
    found = candidates(n, k, m, args.fmt, residual_k=residual_k)[:most]
    return [dataclasses.replace(c, early=False) for c in found] if args.late else found


def residual_columns(k: int, part: float, fmt: str) -> int:
    """Columns of the second term: a part of k in whole steps."""
    return int(k * part) // 512 * 512 if part else 0


def compiled_rows(record: Record, args) -> list[tuple[dict, Packed | XlaBf16]]:
    """Everything that will be timed, compiled round robin over the cases until `--compile` seconds."""
    until = time.monotonic() + args.compile
    operands = {name: Operands(*(SHAPES | EMPTY)[name], args.fmt) for name in args.cases}
    queues = []
    for m, name in itertools.product(args.m, args.cases):
        n, k = (SHAPES | EMPTY)[name]
        second = residual_columns(k, args.residual, args.fmt)
        row = dict(case=name, n=n, k=k, m=m)
        if args.xla:
            queues.append([(row | dict(part="xla_bf16"), None)])
        base = row | dict(part=args.part, fmt=args.fmt, residual_k=second, order=args.order)
        queues.append([(base | dict(config=short(c)), c) for c in configs_of(args, n, k, m, second)])
    found = []
    for row, config in (job for jobs in itertools.zip_longest(*queues) for job in jobs if job):
        if time.monotonic() > until:
            break
        try:
            if config is None:
                found.append((row, XlaBf16(row["n"], row["k"], row["m"])))
            else:
                found.append((row, Packed(operands[row["case"]], row["m"], config, row["residual_k"])))
        except REFUSALS as error:
            record.add(**row, error=f"{type(error).__name__}: {str(error)[:200]}")
    print(f"compiled {len(found)} of {sum(map(len, queues))} programs", flush=True)
    return found


def timed(record: Record, args) -> None:
    """`tune` and `time`: compiles, waits for the others, then times serially and prints the winners."""
    reader, rows = FastestRead(), compiled_rows(record, args)
    args.meeting.wait()
    with args.meeting.turn(args.turn) as over:
        read = reader.tbps(args.repeats)
        record.add(part="read", tbps=read)
        best: dict = {}
        for row, job in rows:
            if record.over() or over():
                print("the time is spent", flush=True)
                break
            print("time", row["case"], row["m"], row.get("config"), flush=True)  # one that hangs is named
            try:
                result = job.sample(args.repeats)
            except REFUSALS as error:
                record.add(**row, error=f"{type(error).__name__}: {str(error)[:200]}")
                continue
            record.add(**row, **result, **_marks(row, result["us"], read))
            key = (row["case"], row["m"], row["part"])
            if "impossible" in record.data["rows"][-1]:
                continue
            best[key] = min(best.get(key, (1e9, None)), (result["us"], row.get("config")), key=lambda t: t[0])
    for (case, m, part), (us, config) in best.items():
        record.add(part="winner", case=case, m=m, what=part, fmt=args.fmt, us=us, config=config)


def _marks(row: dict, us: float, read_tbps: float) -> dict:
    """Rates, and `impossible` where a figure beats the bound."""
    n, k, m = row["n"], row["k"], row["m"]
    size = n * k * (2 if row["part"] == "xla_bf16" else 4.5 / 8)
    flops = 2 * n * m * (k + row.get("residual_k", 0))
    marks = dict(tbps=size / us / 1e6, tflops=flops / us / 1e6)
    return marks | (dict(impossible=True) if us < floor_us(size, flops, read_tbps) * 0.97 else {})


def peers(record: Record, args) -> None:
    """torch's bfloat16 and FP8, case by case, in their turn."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.ones(1, device="cuda")
    args.meeting.wait()
    with args.meeting.turn(args.turn) as over:
        for m, name in itertools.product(args.m, args.cases):
            if record.over() or over():
                return
            n, k = (SHAPES | EMPTY)[name]
            record.add(part="peer", case=name, n=n, k=k, m=m, **torch_us(n, k, m, args.repeats))
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["check", "tune", "time", "peers"])
    parser.add_argument("--cases", nargs="+", default=["all"], help=f"of {', '.join(SHAPES | EMPTY)}")
    parser.add_argument("--m", nargs="+", type=int, default=[8])
    parser.add_argument("--fmt", default="nvfp4", choices=["all", *FORMATS])
    parser.add_argument("--residual", type=float, default=0, help="part of k that has a second term, to 1")
    parser.add_argument("--order", default="free", choices=["free", "fixed"])
    parser.add_argument("--late", action="store_true", help="load no weight before the kernel in front ends")
    parser.add_argument("--xla", action="store_true", help="time XLA's bfloat16 dot too")
    parser.add_argument("--most", type=int, default=8, help="configs tried a case")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", type=float, default=120, help="seconds of compiling")
    parser.add_argument("--budget", type=float, default=300, help="seconds after which nothing is begun")
    parser.add_argument("--meet", type=Path, default=None, help="a folder that several processes share")
    parser.add_argument("--turn", type=float, default=1e9, help="most seconds at the GPU")
    parser.add_argument("--size", type=int, default=1, help="how many processes meet")
    parser.add_argument("--patience", type=float, default=120, help="seconds to wait for the others")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    args.cases = list(SHAPES) if args.cases == ["all"] else args.cases
    args.meeting = Meeting(args.meet, args.size, args.patience)
    today = datetime.date.today().isoformat()
    out = args.out or Path(__file__).parent / "results" / f"kernels_{args.part}_{today}.json"
    record = Record(out, args.budget)
    {"check": check, "tune": timed, "time": timed, "peers": peers}[args.part](record, args)


if __name__ == "__main__":
    main()
