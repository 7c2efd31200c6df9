"""fp4rl_jax: reinforcement-learning post-training of language models with FP4 rollouts, in JAX."""
