"""Scores answers with a reasoning-gym data set, one JSON line in, one out. Run as a script."""

import json
import sys


def main() -> None:
    """Reads {"dataset", "options"}, then requests {"index", "answer"}; answers a score."""
    import reasoning_gym

    setup = json.loads(sys.stdin.readline())
    create = reasoning_gym.create_dataset  # pyright: ignore[reportAttributeAccessIssue] (optional package)
    dataset = create(setup["dataset"], **setup["options"])
    print("true", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        score = dataset.score_answer(answer=request["answer"], entry=dataset[request["index"]])
        print(json.dumps(float(score)), flush=True)


if __name__ == "__main__":
    main()
