"""The table of options: verl's and siiRL's names, ours, and why some have no counterpart.

docs/migrating.md shows this table, and a test holds the page to it. The names and defaults are
those of verl 0.9 (``ppo_trainer.yaml`` and ``ppo_megatron_trainer.yaml``, with the names of earlier
versions) and of siiRL 0.2.
"""

from __future__ import annotations

from siirl_dask.commands.migrate.option import Option, Use
from siirl_dask.commands.migrate.options_data import ALGORITHM, DATA, REWARD
from siirl_dask.commands.migrate.options_model import ACTOR, CRITIC, MEGATRON, MODEL, optimizer
from siirl_dask.commands.migrate.options_run import REST, ROLLOUT, TRAINER

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


def option_of(name: str) -> Option | None:
    """Return the row of an option. None for a name that neither system has in any group."""
    return next(
        (option for part in TABLE.values() for option in part if option.matches(name)), None
    )


def markdown() -> str:
    """Return the table as a page shows it."""
    texts = []
    for part, options in TABLE.items():
        rows = [
            f"| {_names(option)} | {_counterpart(option)} | {option.note} |" for option in options
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


def _counterpart(option: Option) -> str:
    if option.use is Use.NONE:
        return "**none**"
    return ", ".join(f"`{key}`" for key in option.ours.split(", ")) if option.ours else "always so"
