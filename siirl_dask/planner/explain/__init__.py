"""Plans for readers: as text, JSON or SVG, with estimated bytes and memory."""
