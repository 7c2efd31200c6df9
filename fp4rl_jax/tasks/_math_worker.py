"""Judges mathematical answers with math-verify, one JSON line in, one out. Run as a script."""

import json
import logging
import sys


def main() -> None:
    """Reads {"timeout"}, then requests {"gold", "answer"}; answers true or false."""
    from math_verify import parse, verify  # pyright: ignore[reportMissingImports] (optional package)

    logging.disable(logging.CRITICAL)  # it logs every time-out; the answer says it too
    seconds = json.loads(sys.stdin.readline())["timeout"]
    print("true", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        gold, answer = (
            parse(f"\\boxed{{{request[side]}}}", parsing_timeout=seconds) for side in ("gold", "answer")
        )
        print(json.dumps(bool(verify(gold, answer, timeout_seconds=seconds))), flush=True)


if __name__ == "__main__":
    main()
