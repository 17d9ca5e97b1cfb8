"""The table of options: verl's and siiRL's names, ours, and why some have no counterpart.

docs/migrating.md shows this table, and a test holds the page to it. The names and defaults are
those of verl 0.9 (``ppo_trainer.yaml`` and ``ppo_megatron_trainer.yaml``, with the names of earlier
versions) and of siiRL 0.2.
"""

from __future__ import annotations

from siirl_dask.commands.migrate.option import Option
from siirl_dask.commands.migrate.options_data import ALGORITHM, DATA, REWARD
from siirl_dask.commands.migrate.options_model import ACTOR, CRITIC, MEGATRON, MODEL, optimizer
from siirl_dask.commands.migrate.options_run import REST, ROLLOUT, TRAINER
from siirl_dask.commands.migrate.trl.options import TRL

TABLE: dict[str, tuple[Option, ...]] = {
    "Data": DATA,
    "Model": MODEL,
    "Policy": (*optimizer("actor_rollout_ref.actor.optim", "trainer"), *MEGATRON, *ACTOR),
    "Engine and reference": ROLLOUT,
    "Critic": (*optimizer("critic.optim", "critic"), *CRITIC),
    "Algorithm": ALGORITHM,
    "Rewards": REWARD,
    "Run": (*TRAINER, *REST),
}
"""All options in the order of the page, by part; of several that match a name, the first counts."""


def options_of(system: str) -> list[Option]:
    """Return the rows of a system's options: of ``TRL``, or of ``verl`` and ``siiRL``."""
    if system == "TRL":
        return [*TRL]
    return [option for part in TABLE.values() for option in part]


def option_of(name: str, system: str = "verl") -> Option | None:
    """Return the row of an option. None for a name that the system has in no group."""
    return next((option for option in options_of(system) if option.matches(name)), None)


def markdown() -> str:
    """Return the table as a page shows it."""
    texts = []
    for part, options in TABLE.items():
        rows = [
            f"| {_names(option)} | {option.counterpart()} | {option.note} |" for option in options
        ]
        texts.append(
            "\n".join(
                [
                    f"### {part}",
                    "",
                    "| verl, siiRL | here | how, or why not |",
                    "|---|---|---|",
                    *rows,
                ]
            )
        )
    return "\n\n".join(texts) + "\n"


def _names(option: Option) -> str:
    return ", ".join(f"`{name}`" for name in option.names)
