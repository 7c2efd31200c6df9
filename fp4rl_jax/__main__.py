"""`python -m fp4rl_jax` is `fp4rl`."""

import sys

from fp4rl_jax.cli import main

sys.exit(main())
