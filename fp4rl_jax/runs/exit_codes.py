"""Exit codes of `fp4rl train` and of every other subcommand.

A supervisor restarts the command on `SAVED_PLEASE_RESTART` and on nothing else.
"""

OK = 0
#: Anything unforeseen: a traceback is printed.
FAILURE = 1
#: The command line or the configuration is wrong; nothing was started.
USAGE = 2
#: The run folder cannot be used: it exists, is missing, is busy, or its config differs.
RUN = 3
#: No checkpoint is sound, or the sound one belongs to another model.
CHECKPOINT = 4
#: Disk full, quota, read-only folder, failing disk.
STORAGE = 5
#: Too many non-finite updates in a row (the message names the last good checkpoint), or weights that
#: cannot be published.
NON_FINITE = 6
#: A prompt or a reward of the task is unusable, or no group of its completions teaches anything.
TASK = 7
#: The processes of the run did not find each other.
PROCESSES = 8
#: `fp4rl check` found a promise of the configuration broken.
CHECK = 9
#: `fp4rl sweep` has nothing left to run, and an arm failed; the table names it.
ARM = 10
#: SIGTERM or SIGINT arrived, or a sweep's budget is used up, and the state was saved: start the same command
#: again (`fp4rl train` with `run.resume="must"`).
SAVED_PLEASE_RESTART = 75
#: Whoever read the output closed it (`| head`): what a shell reports of a command that SIGPIPE ended.
OUTPUT_CLOSED = 141

MEANINGS = {
    OK: "finished",
    FAILURE: "unforeseen failure, with a traceback",
    USAGE: "wrong command line or configuration; nothing was started",
    RUN: "the run folder cannot be used (exists, missing, busy, or another config)",
    CHECKPOINT: "no sound checkpoint, or one of another model",
    STORAGE: "the disk refused (full, quota, read-only, failing)",
    NON_FINITE: "too many non-finite updates in a row, or weights that cannot be published",
    TASK: "the task cannot go on: a prompt, a reward, or no group that teaches",
    PROCESSES: "the processes of the run did not find each other",
    CHECK: "`fp4rl check` found something that does not hold",
    ARM: "`fp4rl sweep` is through, and an arm of it failed",
    SAVED_PLEASE_RESTART: "interrupted by a signal or a sweep's budget, and saved: please restart",
    OUTPUT_CLOSED: "whoever read the output closed it",
}
