"""The task of the golden runs: a random model over bytes is paid for every letter that it writes."""

WORDS = ("stone", "river", "cloud", "grass", "light", "plain")


def rows() -> list[dict[str, str]]:
    return [{"prompt": word} for word in WORDS]


def held_out_rows() -> list[dict[str, str]]:
    return [{"prompt": "bread"}]


def reward(item: object, completion: str) -> float:
    """A quarter a letter of at most four: sums of such rewards are exact in float32."""
    del item
    return sum(character.isalpha() for character in completion[:4]) / 4
