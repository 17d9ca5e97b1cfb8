"""Colours of curves, roles and nodes in all views, distinct for the colour-blind as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour in the tones of its backgrounds."""

    light: str
    """Its tone on white."""
    dark: str
    """Its tone on black."""
    either: str
    """A tone that is readable on both, for what cannot know the background."""


COLOURS = (
    Colour("#0072b2", "#58b4ee", "#3f8fd2"),
    Colour("#d55e00", "#ff9352", "#e0823d"),
    Colour("#009e73", "#3ecf9f", "#34a56f"),
    Colour("#9a4f96", "#cf8fce", "#b472c8"),
    Colour("#b58a00", "#e3bd3e", "#c9a227"),
    Colour("#3f9fd4", "#8bc7ef", "#20a8b0"),
    Colour("#c2557a", "#ee8fb0", "#d96c8a"),
    Colour("#5b6770", "#9fabb5", "#7f8fe0"),
)
"""The colour of the first curve, role or node, of the second one, and so on."""
TRANSFER = Colour("#8a93a0", "#6c7784", "#1f9e9e")
STORAGE = Colour("#b9a07a", "#86734f", "#8a7f72")
WAIT = Colour("#e6eaee", "#20272e", "#9aa3ad")


def class_of(number: int) -> str:
    """Return the CSS class of the colour of curve ``number``; dashed from the ninth on, whose
    colours come again.
    """
    dashed = ""
    if number >= len(COLOURS):
        dashed = " dash"
    return f"r{number % len(COLOURS)}{dashed}"


def rules(tones: Sequence[str]) -> str:
    """Return the CSS rules of the classes, of which ``c0`` and ``r0`` have the first of the
    ``tones``.
    """
    return " ".join(
        f".c{number}, .r{number} {{ color: {tone} }}" for number, tone in enumerate(tones)
    )


def tint(colour: str, share: float) -> str:
    """Return a ``#rrggbb`` that is ``share`` of a colour, and white for the rest."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)
