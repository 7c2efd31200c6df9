"""Recipes: what each side of the loop does to its matmuls, one file each.

A recipe file has `Config` (a frozen dataclass whose defaults are the published setting),
`trainer(config) -> SideSpec` and `rollout(config) -> SideSpec`. Adding a file here adds a recipe;
its name is the file's. Any trainer recipe runs with any rollout recipe.
"""
