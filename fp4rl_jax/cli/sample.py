"""`fp4rl sample`: chat with a model in the terminal, or answer the prompts of a file."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from fp4rl_jax.arrays import Array
from fp4rl_jax.cli import _failures, _flags, _policy
from fp4rl_jax.cli._policy import Policy
from fp4rl_jax.rollout import SamplingConfig, row_keys, sample
from fp4rl_jax.text import Prompt, encode_prompts

SUMMARY = "chat with a model in the terminal, or answer the prompts of a file"

_USAGE = """Without --prompts: a chat; an empty line or Ctrl-D ends it, /new starts over.
With --prompts FILE: one prompt a line; a line of JSON may hold {"prompt": ...} or {"messages": [...]}.
"""


def main(argv: Sequence[str]) -> int:
    """Samples; exit codes as docs/RUNS.md lists them."""
    values = flags.FlagValues()
    _policy.define_flags(values)
    flags.DEFINE_string("prompts", None, "a file of prompts; none: chat", flag_values=values)
    flags.DEFINE_string(
        "out", None, "write JSON lines here instead of text to the terminal", flag_values=values
    )
    flags.DEFINE_integer("num_samples", 1, "answers a prompt (with --prompts)", flag_values=values)
    flags.DEFINE_integer("batch_prompts", 8, "prompts a batch (with --prompts)", flag_values=values)
    _flags.parse(values, argv, name="sample", summary=f"{SUMMARY}\n\n{_USAGE}")
    with _failures.settings():
        out = _flags.output_file(values, "out")
        asked = values["prompts"].value
        prompts = None if asked is None else read_prompts(Path(asked))
        run = _policy.run_config(values, name="sample")
        policy = _policy.load(values, run)
        sampling = _policy.sampling(values, policy.tokenizer, run)
        print(_policy.describe(policy), file=sys.stderr)
        if prompts is None:
            _chat(policy, sampling, jax.random.key(_flags.get(values, "seed", int)))
        else:
            _answer_file(policy, sampling, prompts, values, out=out)
    return 0


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file: a plain line is a user's message, a line of JSON holds the chat itself.

    Raises:
        ValueError: `path` is no file, a line is wrong JSON or has neither "prompt" nor "messages" (with
            its number), or there is no prompt at all.
    """
    if not path.is_file():
        raise ValueError(
            f"--prompts {str(path)!r} is not a file: it takes a text file with one prompt a line "
            "(without --prompts you can type them)"
        )
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append([{"role": "user", "content": line}])
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if "messages" in row:
            prompts.append(row["messages"])
        elif "prompt" in row:
            prompts.append([{"role": "user", "content": row["prompt"]}])
        else:
            raise ValueError(f'{path}:{number}: expected "prompt" or "messages", got keys {sorted(row)}')
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def answers(
    policy: Policy, sampling: SamplingConfig, prompts: Sequence[Prompt], *, key: Array, num_samples: int,
    batch_prompts: int,
) -> Iterator[tuple[int, list[dict[str, Any]]]]:  # fmt: skip
    """Answers prompts in batches of one shape; yields (prompt number, its answers) as they come."""
    width = prompt_width(max(_length(policy, prompt) for prompt in prompts))
    rows = batch_prompts * num_samples
    for first in range(0, len(prompts), batch_prompts):
        chunk = list(prompts[first : first + batch_prompts])
        filled = chunk + chunk[:1] * (batch_prompts - len(chunk))
        limits = np.full(rows, sampling.max_new_tokens, np.int32)
        limits[len(chunk) * num_samples :] = 0
        out = sample(
            policy.published,
            *encode_prompts(policy.tokenizer, filled, width=width),
            row_limits=limits,
            keys=row_keys(key, first * num_samples + np.arange(rows, dtype=np.int32)),
            config=policy.config,
            side=policy.side,
            sampling=sampling,
            group_size=num_samples,
        )
        out = jax.device_get(out)
        for number in range(len(chunk)):
            group = range(number * num_samples, (number + 1) * num_samples)
            yield first + number, [_answer(policy, out, row) for row in group]


def prompt_width(longest: int) -> int:
    """The next power of two, at least 64: few widths, hence few compiled programs."""
    return max(64, 1 << (longest - 1).bit_length())


def _length(policy: Policy, prompt: Prompt) -> int:
    tokenizer = policy.tokenizer
    return len(tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt))


def _answer(policy: Policy, out: Any, row: int) -> dict[str, Any]:
    mask = out.loss_mask[row]
    return {
        "text": policy.tokenizer.decode(out.tokens[row][mask]),
        "finished": bool(out.finished[row]),
        "num_tokens": int(mask.sum()),
        "logprob": float(out.rollout_logprobs[row].sum()),
    }


def _answer_file(
    policy: Policy, sampling: SamplingConfig, prompts: list[Prompt], values: flags.FlagValues, *,
    out: Path | None,
) -> None:  # fmt: skip
    found = answers(
        policy,
        sampling,
        prompts,
        key=jax.random.key(_flags.get(values, "seed", int)),
        num_samples=_flags.get(values, "num_samples", int),
        batch_prompts=_flags.get(values, "batch_prompts", int),
    )
    if out is None:
        for number, texts in found:
            print(f"> {_shown(prompts[number])}")
            for answer in texts:
                print(answer["text"], end="\n\n")
        return
    with out.open("w", encoding="utf-8") as file:
        for number, texts in found:
            file.write(json.dumps({"prompt": prompts[number], "answers": texts}) + "\n")


def _shown(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _chat(policy: Policy, sampling: SamplingConfig, key: Array) -> None:
    """Reads a line, answers it with the whole chat so far as the prompt, until an empty line."""
    messages: list[dict[str, str]] = []
    turn = 0
    while line := _read_line():
        if line == "/new":
            messages = []
            continue
        messages.append({"role": "user", "content": line})
        turn_key = jax.random.fold_in(key, turn)
        ((_, (answer,)),) = answers(
            policy, sampling, [messages], key=turn_key, num_samples=1, batch_prompts=1
        )
        print(answer["text"], flush=True)
        messages.append({"role": "assistant", "content": answer["text"]})
        turn += 1


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
